"""The HTML of a report: static/report.html.jinja, and the texts in it.

Whatever the template prints passes `shown`, which escapes it, unless the template declares it safe.
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from assay import __version__
from assay.runs.console import duration, percent, printable
from assay.runs.reading import default_settings, flattened
from assay.types import plural
from assay.web.folder import finite_number
from assay.web.samples import Samples, cut

MAX_VALUE = 2000  # characters of a setting, a path, a name
MAX_SETTINGS = 1000
NONE = "\u2013"
INTERVAL = "95\u00a0% interval"
STATE_TONES = {"finished": "good", "failed": "bad", "interrupted": "warn"}
Facts = list[tuple[str, Any, list[str]]]  # name, value, and lines below the value


@dataclass(frozen=True)
class ReportContent:
    """What the report shows. Read once; samples and curves are then shortened until they fit."""

    detail: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    paired: Mapping[str, Any] | None
    problems: Sequence[str]
    config_toml: str


def page(content: ReportContent, samples: Sequence[Samples], shortened: bool, **parts: str) -> str:
    """The whole file. `parts`: policy, style, data and script, which are not escaped."""
    detail = content.detail
    known = detail.get("environment") or {}
    tokens = [rollout["tokens"] for kind in samples for rollout in kind.rollouts if rollout["tokens"]]
    numbers = {id(one): number for number, one in enumerate(tokens)}
    return (
        template_environment()
        .get_template("report.html.jinja")
        .render(
            detail=detail,
            about=[detail[key] for key in ("algorithm", "task", "model") if detail.get(key)],
            state_tone=STATE_TONES.get(str(detail.get("state")), "note"),
            version=__version__,
            made=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
            problems=content.problems,
            summary=summary(detail, content.paired),
            findings=content.findings,
            samples=samples,
            shortened=shortened,
            command=command(known),
            place=place(known),
            changed=changed_settings(detail.get("config") or {}),
            toml=content.config_toml,
            environment=environment(known),
            token_number=lambda one: numbers[id(one)],
            **parts,
        )
    )


def template_environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent / "static")
    made = Environment(loader=loader, autoescape=True, finalize=finalized, keep_trailing_newline=True)
    made.filters["shown"] = shown
    made.globals |= {"asked": asked, "rollout_facts": rollout_facts, "token_label": token_label, "setting": setting}
    return made


def finalized(value: Any) -> Markup:
    return value if isinstance(value, Markup) else shown("" if isinstance(value, Undefined) else value)


def shown(text: Any, limit: int = MAX_VALUE) -> Markup:
    """Text of any origin as HTML: escaped, with control characters made visible, without lone surrogates."""
    text = printable(cut(text, limit)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Markup(html.escape(text))


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
    return finite_number(own.get("accuracy")), finite_number(low), finite_number(high)


def summary(detail: Mapping[str, Any], paired: Mapping[str, Any] | None) -> Facts:
    totals = detail.get("summary") or {}
    planned = detail.get("steps_planned")
    wall, answers = finite_number(detail.get("wall_s")), finite_number(totals.get("answers"))
    rows = [
        ("accuracy before", *accuracy(detail.get("before"))),
        ("accuracy after", *accuracy(detail.get("after"))),
        ("difference", *difference(paired)),
        ("questions", *questions(paired)),
        ("reward, last step", plain_number(detail.get("reward")), []),
        ("steps", f"{detail.get('steps', 0)}" + (f" of {planned}" if planned else ""), []),
        ("time", NONE if wall is None else duration(wall), []),
        ("answers sampled", NONE if answers is None else f"{answers:,.0f}", []),
        ("seed", "" if detail.get("seed") is None else str(detail["seed"]), []),
        ("started", str(detail.get("started") or NONE).replace("T", " ").replace("+00:00", " UTC"), []),
    ]
    return [row for row in rows if row[1] not in ("", NONE)]


def accuracy(evaluation: Any) -> tuple[str, list[str]]:
    value, low, high = measured(evaluation)
    if value is None:
        return NONE, []
    interval = "" if low is None or high is None else f"{INTERVAL} {100 * low:.1f} to {100 * high:.1f}\u00a0%"
    count = finite_number(evaluation.get("n"))
    return percent(value), [*filter(None, (interval, plural(int(count), "question") if count else ""))]


def difference(paired: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    if not paired:
        return NONE, []
    low, high = paired["ci95"]
    return f"{100 * paired['difference']:+.1f} points", [f"{INTERVAL} {100 * low:+.1f} to {100 * high:+.1f}"]


def questions(paired: Mapping[str, Any] | None) -> tuple[str, list[str]]:
    if not paired:
        return NONE, []
    p_value = paired["p_value"]
    test = [] if p_value is None else [f"paired test on {paired['questions']} questions: p = {p_value:.2g}"]
    return f"{paired['gained']} gained, {paired['lost']} lost", test


def plain_number(value: Any) -> str:
    known = finite_number(value)
    return NONE if known is None else f"{known:.4g}"


# Samples


def asked(messages: Sequence[Mapping[str, str]]) -> str:
    """The beginning of the question, on one line."""
    return " ".join(messages[-1]["content"].split())[:160] if messages else ""


def rollout_facts(rollout: Mapping[str, Any]) -> str:
    facts = [
        f"reward {plain_number(rollout['reward'])}",
        "" if finite_number(rollout["advantage"]) is None else f"advantage {plain_number(rollout['advantage'])}",
        plural(int(rollout["length"]), "token") if isinstance(rollout["length"], int) else "",
        "cut off" if rollout["truncated"] else "",
    ]
    return ", ".join(filter(None, facts))


def token_label(tokens: Mapping[str, Any]) -> str:
    total, kept = tokens["total"], len(tokens["ids"])
    return f"the first {kept:,} of {total:,} tokens" if kept < total else plural(total, "token")


# Settings and machine


def command(known: Mapping[str, Any]) -> str:
    """The command that started the run; empty if it is not known."""
    words = known.get("command")
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        return ""
    return shlex.join(["assay" if Path(words[0]).name in ("assay", "__main__.py") else words[0], *words[1:]])


def place(known: Mapping[str, Any]) -> str:
    """Folder and commit of the run, as far as they are known."""
    folder, git = known.get("folder"), known.get("git")
    where = [f"in the folder {folder}"] if folder else []
    if isinstance(git, Mapping) and git.get("commit"):
        dirty = ", with changes that are not in the commit" if git.get("dirty") else ""
        where.append(f"at the git commit {git['commit']}{dirty}")
    return " ".join(where)


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, value and default of the settings that differ from their defaults."""
    defaults = default_settings()
    flat = list(flattened(config).items())[:MAX_SETTINGS]
    changed = [(key, value) for key, value in flat if value != defaults.get(key)]
    return [(key, value, defaults.get(key)) for key, value in changed if key not in ("name", "runs_dir")]


def setting(value: Any) -> str:
    if value is None:
        return NONE
    return Markup("<code>{}</code>").format(shown(json.dumps(value, ensure_ascii=False, default=str), 300))


def environment(known: Mapping[str, Any]) -> Facts:
    rows: list[tuple[str, Any]] = []
    for name in ("versions", "machine"):
        part = known.get(name)
        rows += [(str(key), value) for key, value in part.items()] if isinstance(part, Mapping) else []
    rows.append(("threads", known.get("threads")))
    rows += [("resumed", f"{len(known['resumed'])} times")] if isinstance(known.get("resumed"), list) else []
    return [
        (key, ", ".join(map(str, value)) if isinstance(value, list) else value, [])
        for key, value in rows[:60]
        if value not in (None, [], "")
    ]
