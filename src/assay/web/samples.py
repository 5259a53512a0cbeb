"""Rollouts that are worth reading, chosen for the report of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.web.compare import CompareQuery, compare, paired
from assay.web.data import RunView, ViewError
from assay.web.index import TRAIN, IndexedFile
from assay.web.table import RolloutsQuery

UNREADABLE = ("unparsable", "no_answer")
Change = Literal["gained", "lost"]
CHANGED: tuple[Change, ...] = ("gained", "lost")
CANDIDATES = 60  # rows from which samples with different prompts are chosen
TOKENIZER_S = 60.0  # to load the tokenizer
DIGITS = 5  # significant ones of numbers of tokens


@dataclass(frozen=True)
class ReportLimits:
    """What a report may contain, so that it stays small."""

    samples: int = 6  # of each kind
    text: int = 4000  # characters of a text
    token_views: int = 6  # rollouts that are shown token by token
    tokens: int = 1000  # of such a rollout
    points: int = 500  # of a curve


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
    source = TRAIN if last is not None else last_evaluation(view)
    if source is None:
        return found, problems
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
                one = view.rollout(row["source"], row["step"], row["index"])
                rollouts.append(shortened_rollout(one, limits, tokens=len(rollouts) < with_tokens))
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


def last_evaluation(view: RunView) -> str | None:
    return next((file.place.source for file in reversed(view.table.files) if file.place.is_evaluation), None)


def changed_questions(view: RunView, change: Change, limits: ReportLimits) -> list[Samples]:
    files = first_and_last(view)
    if files is None:
        return []
    names = [file.place.source for file in files]
    query = CompareQuery(run_a=view.id, run_b=view.id, a=names[0], b=names[1], show=change, limit=limits.samples)
    listed = compare(view, view, query)
    if not listed["rows"]:
        return []
    about = {
        "gained": "wrong before training and correct after it",
        "lost": "correct before training and wrong after it",
    }[change]
    return [
        Samples(f"Questions {change}", about, listed["total"], pairs=[_pair(row, limits) for row in listed["rows"]])
    ]


def _pair(row: Mapping[str, Any], limits: ReportLimits) -> dict[str, Any]:
    sides = {side: {**row[side], "text": cut(row[side]["text"], limits.text)} for side in ("a", "b")}
    return {**row, **sides, "messages": shortened_messages(row["messages"], limits)}


def different_prompts(rows: Iterable[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """At most `count` rows: first one of each prompt, then others."""
    firsts: dict[Any, Mapping[str, Any]] = {}
    others = []
    for row in rows:
        if row["prompt_id"] in firsts:
            others.append(row)
        else:
            firsts[row["prompt_id"]] = row
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
