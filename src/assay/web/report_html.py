"""The HTML of a report. Text of any origin is escaped by `shown`; everything else is written here."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from assay import __version__
from assay.runs.console import duration, percent, printable
from assay.runs.facts import default_settings, flattened
from assay.types import plural
from assay.web.samples import Samples, cut

MAX_VALUE = 2000  # characters of a setting, a path, a name
MAX_SETTINGS = 1000
NONE = "\u2013"
INTERVAL = "95\u00a0% interval"


@dataclass(frozen=True)
class ReportContent:
    """What the report shows. Read once; samples and curves are then shortened until they fit."""

    detail: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    paired: Mapping[str, Any] | None
    problems: Sequence[str]
    config_toml: str


def accuracy_intervals(detail: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for label in ("before", "after"):
        value, low, high = measured(detail.get(label))
        if value is not None:
            rows.append({"label": label, "value": value, "low": low, "high": high})
    return rows


def measured(evaluation: Any) -> tuple[float | None, float | None, float | None]:
    """Accuracy and the ends of its interval."""
    own = evaluation if isinstance(evaluation, Mapping) else {}
    ends = own.get("ci95")
    low, high = ends if isinstance(ends, (list, tuple)) and len(ends) == 2 else (None, None)
    return number(own.get("accuracy")), number(low), number(high)


def number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None


def shown(text: Any, limit: int = MAX_VALUE) -> str:
    """Text of any origin as HTML: escaped, with control characters made visible, without lone surrogates."""
    return html.escape(printable(cut(text, limit)).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


def tag(name: str, content: str, **attributes: str) -> str:
    """An element; the content is HTML already."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    return f"<{name}{words}>{content}</{name}>"


def body(content: ReportContent, samples: Sequence[Samples], shortened: bool) -> str:
    detail = content.detail
    parts = [
        header(detail),
        problem_list(content.problems),
        section("Summary", facts(detail, content.paired) + tag("div", "", id="intervals")),
        section("Findings", findings(content.findings)),
        section("Curves", tag("div", "", id="curves", class_="charts") + tag("noscript", "Curves need JavaScript.")),
        *sample_sections(samples, shortened),
        section("Repeat it", repeat(detail)),
        section("Settings", settings(detail.get("config") or {}, content.config_toml)),
        section("Versions and machine", environment(detail.get("environment") or {})),
    ]
    return tag("main", "\n".join(filter(None, parts)))


def header(detail: Mapping[str, Any]) -> str:
    about = " \u00b7 ".join(shown(detail[key], 100) for key in ("algorithm", "task", "model") if detail.get(key))
    made = f"assay {html.escape(__version__)}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    state = tag("span", shown(detail.get("state"), 40), class_=f"pill {state_tone(detail)}")
    switch = tag("button", "Theme", type="button", id="theme", hidden="")
    name = tag("h1", shown(detail["name"], 200) + " " + state)
    return tag(
        "header", tag("div", name + tag("p", about, class_="muted")) + switch + tag("p", made, class_="made muted")
    )


def state_tone(detail: Mapping[str, Any]) -> str:
    return {"finished": "good", "failed": "bad", "interrupted": "warn"}.get(str(detail.get("state")), "note")


def section(title: str, content: str) -> str:
    return tag("section", tag("h2", html.escape(title)) + content) if content else ""


def problem_list(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(tag("li", shown(problem, 500)) for problem in problems[:30])
    return tag("div", tag("strong", "Some files of this run cannot be read.") + tag("ul", items), class_="problems")


def facts(detail: Mapping[str, Any], paired: Mapping[str, Any] | None) -> str:
    summary = detail.get("summary") or {}
    planned = detail.get("steps_planned")
    rows = [
        ("accuracy before", *accuracy(detail.get("before"))),
        ("accuracy after", *accuracy(detail.get("after"))),
        ("difference", *difference(paired)),
        ("questions", *questions(paired)),
        ("reward, last step", plain_number(detail.get("reward")), ""),
        ("steps", f"{detail.get('steps', 0)}" + (f" of {planned}" if planned else ""), ""),
        ("time", duration(wall) if (wall := number(detail.get("wall_s"))) is not None else NONE, ""),
        ("answers sampled", f"{answers:,.0f}" if (answers := number(summary.get("answers"))) is not None else NONE, ""),
        ("seed", "" if detail.get("seed") is None else str(detail["seed"]), ""),
        ("started", str(detail.get("started") or NONE).replace("T", " ").replace("+00:00", " UTC"), ""),
    ]
    cells = [fact(name, value, note) for name, value, note in rows if value not in ("", NONE)]
    error = tag("p", tag("strong", "Error: ") + shown(detail["error"]), class_="bad") if detail.get("error") else ""
    return error + tag("dl", "".join(cells), class_="facts")


def fact(name: str, value: Any, note: str = "") -> str:
    """`note`: lines below the value."""
    small = "".join(tag("small", shown(line, 200)) for line in note.splitlines())
    return tag("div", tag("dt", shown(name, 60)) + tag("dd", shown(value, 200) + small))


def accuracy(evaluation: Any) -> tuple[str, str]:
    value, low, high = measured(evaluation)
    if value is None:
        return NONE, ""
    interval = "" if low is None or high is None else f"{INTERVAL} {100 * low:.1f} to {100 * high:.1f}\u00a0%"
    count = number(evaluation.get("n"))
    return percent(value), "\n".join(filter(None, (interval, plural(int(count), "question") if count else "")))


def difference(paired: Mapping[str, Any] | None) -> tuple[str, str]:
    if not paired:
        return NONE, ""
    low, high = paired["ci95"]
    return f"{100 * paired['difference']:+.1f} points", f"{INTERVAL} {100 * low:+.1f} to {100 * high:+.1f}"


def questions(paired: Mapping[str, Any] | None) -> tuple[str, str]:
    if not paired:
        return NONE, ""
    test = (
        ""
        if paired["p_value"] is None
        else f"paired test on {paired['questions']} questions: p = {paired['p_value']:.2g}"
    )
    return f"{paired['gained']} gained, {paired['lost']} lost", test


def plain_number(value: Any) -> str:
    known = number(value)
    return NONE if known is None else f"{known:.4g}"


def findings(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return tag("p", "The doctor has found nothing wrong.", class_="healthy")
    items = [
        tag(
            "li",
            tag("span", shown(one["severity"].capitalize(), 20), class_="severity")
            + tag("p", shown(one["evidence"]), class_="evidence")
            + tag("p", shown(one["remedy"]), class_="remedy")
            + "".join(tag("pre", shown(example, 600), class_="example") for example in one.get("examples", ())),
            class_=f"finding {one['severity'] if one['severity'] in ('error', 'warning', 'note') else 'note'}",
        )
        for one in found[:50]
    ]
    return tag("ul", "".join(items), class_="findings")


# Samples


def sample_sections(samples: Sequence[Samples], shortened: bool) -> list[str]:
    number_of_tokens = 0
    sections = []
    for kind in samples:
        items = [pair(one) for one in kind.pairs]
        for one in kind.rollouts:
            items.append(rollout(one, number_of_tokens if one["tokens"] else None))
            number_of_tokens += bool(one["tokens"])
        about = f"{kind.about}; {len(items)} of {kind.total:,} shown"
        sections.append(section(kind.title, tag("p", html.escape(about), class_="muted about") + "".join(items)))
    if shortened:
        note = "Samples were shortened or left out, so that this file stays small; assay view shows everything."
        sections.insert(0, tag("p", note, class_="muted about"))
    return sections


def question(messages: Sequence[Mapping[str, str]], answer: Any) -> str:
    several = len(messages) > 1
    texts = [
        (tag("span", shown(message["role"]), class_="role") if several else "") + shown(message["content"], 10**6)
        for message in messages
    ]
    gold = (
        tag("p", "Gold answer: " + tag("code", shown(answer, 300)), class_="gold") if answer not in (None, "") else ""
    )
    return "".join(tag("div", text, class_="text question") for text in texts) + gold


def pair(one: Mapping[str, Any]) -> str:
    sides = [
        tag(
            "div",
            tag("h4", title + " " + verdict(one[side])) + tag("div", shown(one[side]["text"], 10**6), class_="text"),
        )
        for side, title in (("a", "Before"), ("b", "After"))
    ]
    content = question(one["messages"], one["answer"]) + tag("div", "".join(sides), class_="sides")
    return tag("details", tag("summary", summary_line(one["prompt_id"], one["messages"])) + content, class_="sample")


def rollout(one: Mapping[str, Any], tokens: int | None) -> str:
    facts = [
        f"reward {plain_number(one['reward'])}",
        "" if number(one["advantage"]) is None else f"advantage {plain_number(one['advantage'])}",
        plural(int(one["length"]), "token") if isinstance(one["length"], int) else "",
        "cut off" if one["truncated"] else "",
    ]
    line = summary_line(one["prompt_id"], one["messages"])
    line += tag("span", f"step {one['step']}, answer {one['index']}", class_="muted nowrap")
    detail = one["verdict"].get("detail") if isinstance(one["verdict"], Mapping) else None
    parsed = one["verdict"].get("parsed") if isinstance(one["verdict"], Mapping) else None
    about = tag("p", verdict(one) + " " + html.escape(", ".join(filter(None, facts))), class_="muted")
    if parsed not in (None, ""):
        about += tag("p", "Read as: " + tag("code", shown(parsed, 300)), class_="gold")
    if detail:
        about += tag("p", "Judge: " + shown(detail, 500), class_="muted")
    answer = tag("div", shown(one["text"], 10**6), class_="text") if not one["turns"] else turns(one["turns"])
    view = ""
    if tokens is not None:
        total, kept = one["tokens"]["total"], len(one["tokens"]["ids"])
        label = f"the first {kept:,} of {total:,} tokens" if kept < total else plural(total, "token")
        view = tag("div", tag("p", label, class_="muted"), class_="token-place", data_tokens=str(tokens))
    elif one["tokens_problem"]:
        view = tag("p", shown(one["tokens_problem"], 300), class_="muted")
    content = question(one["messages"], one["answer"]) + about + answer + view
    return tag("details", tag("summary", line) + content, class_="sample")


def turns(episode: Sequence[Mapping[str, Any]]) -> str:
    """An episode of several turns; the first context is the prompt, which is shown above."""
    parts = []
    for turn in episode[1:]:
        if turn["text"]:
            title = "Action" if turn["role"] == "action" else "Observation"
            parts.append(
                tag(
                    "div",
                    tag("span", title, class_="role") + shown(turn["text"], 10**6),
                    class_=f"text {title.lower()}",
                )
            )
    return "".join(parts)


def summary_line(prompt_id: Any, messages: Sequence[Mapping[str, str]]) -> str:
    text = " ".join(messages[-1]["content"].split()) if messages else ""
    return tag("span", shown(prompt_id, 60), class_="mono") + tag("span", shown(text[:160]), class_="asked")


def verdict(one: Mapping[str, Any]) -> str:
    status = one.get("status")
    tone = {"ok": "good", "wrong": "bad"}.get(str(status), "warn")
    return tag("span", shown(status or "no verdict", 40), class_=f"pill {tone}")


# Settings and machine


def repeat(detail: Mapping[str, Any]) -> str:
    known = detail.get("environment") or {}
    command = known.get("command")
    lines = []
    if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
        words = ["assay" if Path(command[0]).name in ("assay", "__main__.py") else command[0], *command[1:]]
        lines.append(tag("p", "The run was started with") + code(shlex.join(words)))
    folder, git = known.get("folder"), known.get("git")
    where = [f"in the folder {folder}"] if folder else []
    if isinstance(git, Mapping) and git.get("commit"):
        dirty = ", with changes that are not in the commit" if git.get("dirty") else ""
        where.append(f"at the git commit {git['commit']}{dirty}")
    if where:
        lines.append(tag("p", shown(" ".join(where)), class_="muted"))
    lines.append(
        tag("p", "All settings are below, as the file config.toml. Saved under this name, they repeat the run with")
    )
    return "".join(lines) + code("assay train config.toml")


def code(text: str) -> str:
    return tag("pre", tag("code", shown(text)), class_="command")


def settings(config: Mapping[str, Any], toml: str) -> str:
    if not config and not toml:
        return ""
    defaults = default_settings()
    flat = list(flattened(config).items())[:MAX_SETTINGS]
    ignored = ("name", "runs_dir")
    changed = [(key, value) for key, value in flat if key not in ignored and value != defaults.get(key)]
    rows = [
        tag(
            "tr",
            tag("td", tag("code", shown(key, 200)))
            + tag("td", setting(value))
            + tag("td", setting(defaults.get(key)), class_="muted"),
        )
        for key, value in changed
    ]
    head = tag("tr", tag("th", "setting") + tag("th", "value") + tag("th", "default"))
    table = (
        tag("table", tag("thead", head) + tag("tbody", "".join(rows)))
        if rows
        else tag("p", "All settings have their defaults.")
    )
    intro = tag("p", "Settings that differ from their defaults", class_="muted about") if rows else ""
    raw = tag(
        "details", tag("summary", "All settings (config.toml)") + tag("pre", shown(toml, 60_000)), class_="sample"
    )
    return intro + tag("div", table, class_="table-frame") + (raw if toml else "")


def setting(value: Any) -> str:
    if value is None:
        return NONE
    return tag("code", shown(json.dumps(value, ensure_ascii=False, default=str), 300))


def environment(known: Mapping[str, Any]) -> str:
    rows = []
    for name in ("versions", "machine"):
        part = known.get(name)
        rows += [(str(key), value) for key, value in part.items()] if isinstance(part, Mapping) else []
    rows += [("threads", known["threads"])] if known.get("threads") is not None else []
    rows += [("resumed", f"{len(known['resumed'])} times")] if isinstance(known.get("resumed"), list) else []
    cells = [
        tag(
            "div",
            tag("dt", shown(key, 60))
            + tag("dd", shown(", ".join(map(str, value)) if isinstance(value, list) else value, 200)),
        )
        for key, value in rows[:60]
        if value not in (None, [], "")
    ]
    return tag("dl", "".join(cells), class_="facts") if cells else ""
