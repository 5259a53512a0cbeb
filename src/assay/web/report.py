"""`assay report`: a run as one HTML file that needs no server, no network and no other file.

Everything except curves and tokens is HTML (static/report.html.jinja). Whatever the template prints passes `shown`,
which escapes it, unless the template declares it safe. The script gets its data from a JSON block, in which no
character can end the block, and puts text into the page as text only. The content security policy allows this script
and this style alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, Undefined
from markupsafe import Markup

from assay import __version__
from assay.runs.console import duration, percent, printable
from assay.runs.directory import changed_settings
from assay.runs.metrics import X_LABELS
from assay.types import describe_error, hide_credentials, plural
from assay.web.data import MetricsQuery, RunView, ViewError, compare, plain
from assay.web.folder import finite_number
from assay.web.index import TRAIN, IndexedFile
from assay.web.table import CompareQuery, RolloutsQuery, paired


@dataclass(frozen=True)
class ReportLimits:
    """What a report may contain, so that it stays small."""

    samples: int = 6  # of each kind
    text: int = 4000  # characters of a text
    token_views: int = 6  # rollouts that are shown token by token
    tokens: int = 1000  # of such a rollout
    points: int = 500  # of a curve


STATIC = Path(__file__).parent / "static"
MODULES = ("dom", "charts", "tokens", "report")  # in the order of their imports
MAX_BYTES = 3_000_000
LEVELS = (  # tried in this order, until the file is small enough
    ReportLimits(),
    ReportLimits(samples=4, text=2000, token_views=6, tokens=400, points=300),
    ReportLimits(samples=3, text=600, token_views=3, tokens=200, points=150),
    ReportLimits(samples=0, text=300, token_views=0, tokens=0, points=60),
)
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
MAX_VALUE = 2000  # characters of a setting, a path, a name
NONE = "\u2013"
INTERVAL = "95\u00a0% interval"
STATE_TONES = {"finished": "good", "failed": "bad", "interrupted": "warn"}
Facts = list[tuple[str, Any, list[str]]]  # name, value, and lines below the value


def write_report(run_path: Path) -> tuple[str, bool]:
    """The report of a run as HTML, and whether samples were left out or shortened to keep it small."""
    view = RunView(run_path.resolve().name, run_path)
    content = read_content(view)
    for number, limits in enumerate(LEVELS):
        text = render(view, content, limits, shortened=number > 0)
        if len(text.encode()) < MAX_BYTES:
            return text, number > 0
    raise AssertionError("a report without samples is small, because all of its texts are limited")


def read_content(view: RunView) -> dict[str, Any]:
    """What the report shows, apart from samples and curves, which are shortened until they fit."""
    detail = view.detail(findings_wait_s=None)
    content: dict[str, Any] = {"detail": detail, "problems": list(dict.fromkeys(detail["problems"]))}
    try:
        content["paired"] = paired_facts(view)
    except Exception as error:
        content["problems"].append(f"the evaluations cannot be compared ({describe_error(error)})")
    with suppress(OSError):
        content["toml"] = hide_credentials(view.folder.read("config.toml").decode(errors="replace"))
    return content


def render(view: RunView, content: dict[str, Any], limits: ReportLimits, shortened: bool) -> str:
    samples, problems = select_samples(view, limits) if limits.samples else ([], [])
    tokens = [rollout["tokens"] for kind in samples for rollout in kind.rollouts if rollout["tokens"]]
    data = {
        "metrics": {x: rounded(view.metrics(MetricsQuery(x=x, points=limits.points))) for x in X_LABELS},
        "tokens": tokens,
        "intervals": accuracy_intervals(content["detail"]),
    }
    script = bundle()
    style = (STATIC / "style.css").read_text("utf-8") + (STATIC / "report.css").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    numbers = {id(values): number for number, values in enumerate(tokens)}
    return page(
        **content | {"problems": [*content["problems"], *problems]},
        policy=policy,
        style=style,
        data=json_block(data),
        script=script,
        samples=samples,
        shortened=shortened,
        token_number=lambda values: numbers[id(values)],
    )


# The page


def page(detail: Mapping[str, Any], paired: Mapping[str, Any] | None = None, **parts: Any) -> str:
    """The whole file. Of `parts`, policy, style, data and script are not escaped."""
    known = detail.get("environment") or {}
    template = template_environment().get_template("report.html.jinja")
    return template.render(
        detail=detail,
        about=[detail[key] for key in ("algorithm", "task", "model") if detail.get(key)],
        state_tone=STATE_TONES.get(str(detail.get("state")), "note"),
        version=__version__,
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        summary=summary(detail, paired),
        command=command(known),
        place=place(known),
        changed=changed_settings(detail.get("config") or {}),
        environment=environment(known),
        **parts,
    )


@cache
def template_environment() -> Environment:
    loader = FileSystemLoader(STATIC)
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


def measured(evaluation: Mapping[str, Any] | None) -> tuple[float | None, float | None, float | None]:
    """Accuracy and the ends of its interval."""
    known = evaluation or {}
    return (known.get("accuracy"), *(known.get("ci95") or (None, None)))


def summary(detail: Mapping[str, Any], paired: Mapping[str, Any] | None) -> Facts:
    totals = detail.get("summary") or {}
    planned = detail.get("steps_planned")
    wall, answers = finite_number(detail.get("wall_s")), finite_number(totals.get("answers"))
    rows = [
        ("accuracy before", *accuracy(detail.get("before"))),
        ("accuracy after", *accuracy(detail.get("after"))),
        *compared(paired),
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


def compared(paired: Mapping[str, Any] | None) -> Facts:
    """The difference between the evaluations before and after training."""
    if not paired:
        return []
    (low, high), p_value = paired["ci95"], paired["p_value"]
    test = [] if p_value is None else [f"paired test on {paired['questions']} questions: p = {p_value:.2g}"]
    interval = f"{INTERVAL} {100 * low:+.1f} to {100 * high:+.1f}"
    return [
        ("difference", f"{100 * paired['difference']:+.1f} points", [interval]),
        ("questions", f"{len(paired['gained'])} gained, {len(paired['lost'])} lost", test),
    ]


def plain_number(value: Any) -> str:
    known = finite_number(value)
    return NONE if known is None else f"{known:.4g}"


# Samples: rollouts that are worth reading

UNREADABLE = ("unparsable", "no_answer")
Change = Literal["gained", "lost"]
CHANGED: dict[Change, str] = {
    "gained": "wrong before training and correct after it",
    "lost": "correct before training and wrong after it",
}
CANDIDATES = 60  # rows from which samples with different prompts are chosen
TOKENIZER_S = 60.0  # to load the tokenizer
DIGITS = 5  # significant ones of numbers of tokens


@dataclass(frozen=True)
class Samples:
    """Samples of one kind."""

    title: str
    about: str
    total: int  # of this kind in the run, shown or not
    pairs: Sequence[Mapping[str, Any]] = ()  # questions with the answers before and after training
    rollouts: Sequence[Mapping[str, Any]] = ()


def first_and_last(view: RunView) -> tuple[IndexedFile, IndexedFile] | None:
    """The evaluations before and after training, on the same split."""
    files = [file for file in view.current_table().files if file.place.is_evaluation]
    after = [file for file in files if file.place.label == "after"]
    before = [file for file in files if file.place.label == "before"]
    same = [(b, a) for a in after[-1:] for b in before if b.place.split == a.place.split]
    return same[0] if same else None


def paired_facts(view: RunView) -> dict[str, Any] | None:
    """Comparison of the answers before and after training; None if it is impossible."""
    files = first_and_last(view)
    pairing = paired(*files) if files else None
    return pairing.facts() if pairing and pairing.keys else None


def select_samples(view: RunView, limits: ReportLimits) -> tuple[list[Samples], list[str]]:
    """Samples of all kinds, and what could not be read."""
    found: list[Samples] = []
    problems: list[str] = []
    for change in CHANGED:
        try:
            found += changed_questions(view, change, limits)
        except (ViewError, OSError) as error:
            problems.append(f"questions {change}: {error}")
    last = max((file.place.step for file in view.table.files if file.place.source == TRAIN), default=None)
    evaluations = [file.place.source for file in view.table.files if file.place.is_evaluation]
    if last is None and not evaluations:
        return found, problems
    source = TRAIN if last is not None else evaluations[-1]
    where = f"step {last}" if source == TRAIN else f"the evaluation {source}"
    some, views = limits.samples, limits.token_views
    latest = RolloutsQuery(source=source, order="desc", limit=CANDIDATES)
    here = {"first_step": last, "last_step": last} if source == TRAIN else {}
    best = latest.model_copy(update={"sort": "reward", **here})
    kinds = [
        ("Best answers", f"highest rewards of {where}", best, views // 3),
        ("Worst answers", f"lowest rewards of {where}", best.model_copy(update={"order": "asc"}), views // 3),
        ("Cut off", "answers that reached a length limit, latest first",
         latest.model_copy(update={"truncated": True}), views // 6),
        ("Without a readable answer", "status unparsable or no_answer, latest first",
         latest.model_copy(update={"statuses": UNREADABLE}), views // 6),
    ]  # fmt: skip
    view.tokens(TOKENIZER_S)
    for title, about, query, with_tokens in kinds:
        listed = listed_rollouts(view, query)
        chosen = different_prompts(listed["rows"], some)
        rollouts: list[dict[str, Any]] = []
        for row in chosen:
            try:
                rollout = view.rollout(row["source"], row["step"], row["index"])
                rollouts.append(shortened_rollout(rollout, limits, tokens=len(rollouts) < with_tokens))
            except (ViewError, OSError) as error:
                problems.append(str(error))
        if rollouts:
            found.append(Samples(title, about, listed["total"], rollouts=rollouts))
    return found, problems


def listed_rollouts(view: RunView, query: RolloutsQuery) -> dict[str, Any]:
    """The first rollouts in this order. Of many with the same reward, those with the largest or least advantage."""
    listed = view.rollouts(query)
    rewards = {row["reward"] for row in listed["rows"]}
    if query.sort != "reward" or len(rewards) != 1 or query.source != TRAIN:
        return listed
    (reward,) = rewards
    equal = query.model_copy(update={"min_reward": reward, "max_reward": reward, "sort": "advantage"})
    return {**listed, "rows": view.rollouts(equal)["rows"]}


def changed_questions(view: RunView, change: Change, limits: ReportLimits) -> list[Samples]:
    files = first_and_last(view)
    if files is None:
        return []
    names = [file.place.source for file in files]
    query = CompareQuery(run_a=view.id, run_b=view.id, a=names[0], b=names[1], show=change, limit=limits.samples)
    listed = compare(view, view, query)
    if not listed["rows"]:
        return []
    pairs = [_pair(row, limits) for row in listed["rows"]]
    return [Samples(f"Questions {change}", CHANGED[change], listed["total"], pairs)]


def _pair(row: Mapping[str, Any], limits: ReportLimits) -> dict[str, Any]:
    sides = {side: {**row[side], "text": cut(row[side]["text"], limits.text)} for side in ("a", "b")}
    return {**row, **sides, "messages": shortened_messages(row["messages"], limits)}


def different_prompts(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """At most `count` rows: first one of each prompt, then others."""
    firsts: dict[Any, Mapping[str, Any]] = {}
    for row in rows:
        firsts.setdefault(row["prompt_id"], row)
    others = (row for row in rows if firsts[row["prompt_id"]] is not row)
    return [*firsts.values(), *others][:count]


def shortened_rollout(rollout: Mapping[str, Any], limits: ReportLimits, tokens: bool) -> dict[str, Any]:
    """What the report shows of a rollout. `tokens`: with the numbers of its tokens."""
    kept = ("source", "step", "index", "prompt_id", "answer", "reward", "advantage", "length", "finish", "truncated",
            "status", "verdict")  # fmt: skip
    turns = [
        {"role": turn.get("role"), "text": cut(turn.get("text"), limits.text), "reward": turn.get("reward")}
        for turn in rollout["turns"][: 2 * limits.samples]
    ]
    return {
        **{name: rollout.get(name) for name in kept},
        "messages": shortened_messages(rollout.get("messages"), limits),
        "text": cut(rollout.get("text"), limits.text),
        "turns": turns if len([turn for turn in rollout["turns"] if turn.get("role") == "action"]) > 1 else [],
        "tokens": shortened_tokens(rollout["tokens"], limits.tokens) if tokens and rollout["tokens"] else None,
        "tokens_problem": rollout["tokens_problem"] if tokens else None,
    }


def shortened_messages(messages: Any, limits: ReportLimits) -> list[dict[str, str]]:
    if not isinstance(messages, list):
        return []
    kept = [message for message in messages if isinstance(message, dict)]
    return [
        {"role": cut(message.get("role"), 40), "content": cut(message.get("content"), limits.text)}
        for message in kept[-limits.samples :]
    ]


def shortened_tokens(tokens: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The first tokens, with numbers of a few digits."""
    columns = {name: values[:limit] for name, values in tokens.items() if isinstance(values, list)}
    for name, values in columns.items():
        if name.endswith("logprobs") or name in ("entropies", "advantages"):
            columns[name] = [None if value is None else float(f"{value:.{DIGITS}g}") for value in values]
    return {**dict.fromkeys(tokens), **columns, "bytes": {}, "total": len(tokens["ids"])}


def cut(text: Any, limit: int) -> str:
    """The text without its middle if it is longer than the limit."""
    text = text if isinstance(text, str) else "" if text is None else str(text)
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    return f"{text[: limit // 2]}\n[... {left_out:,} characters left out ...]\n{text[len(text) - limit // 2 :]}"


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


# Scripts and data


def bundle() -> str:
    """The modules as one script. Each has its own scope, because names are only unique within a module."""
    parts = ['"use strict";']
    for name in MODULES:
        text = (STATIC / f"{name}.js").read_text("utf-8")
        text = IMPORT.sub(lambda match: f"const {{{match[1].replace(' as ', ': ')}}} = {match[2]};\n", text)
        exported = EXPORT.findall(text)
        text = EXPORT.sub("", text)
        assert not re.search(r"^(?:import|export)\b", text, re.MULTILINE), (
            f"{name}.js: an import or export of this kind"
        )
        parts.append(f"const {name} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();")
    return "\n".join(parts).replace("</script", "<\\/script").replace("<!--", "<\\!--")


def digest(text: str) -> str:
    """The source of an inline script or style for the content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def json_block(data: Any) -> str:
    """JSON that stays inside of its element whatever texts it contains."""
    text = json.dumps(plain(data), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def rounded(value: Any) -> Any:
    """Numbers with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value
