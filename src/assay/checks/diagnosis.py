"""Diagnosis of a run: all rules on metrics and summary, and what the rollout and evaluation files show.

Damaged or missing files are left out: what can be read is diagnosed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from assay.checks import results, steps
from assay.checks.causes import FIRST, Diagnosis, Row, RunHistory, Window, percent, ranked
from assay.checks.results import slower_than_best
from assay.runs.directory import Run
from assay.runs.reading import RunFiles, setting
from assay.types import Status, describe_error, excerpt

Rule = Callable[[RunHistory], Diagnosis | None]
# Rules that do not apply to a run whose accuracy has increased significantly, up to its end.
LEARNING: tuple[Rule, ...] = (
    steps.cannot_learn,
    steps.judge_often_fails,
    steps.stale_or_mismatched,
    steps.learning_rate_high,
    steps.entropy_collapse,
    steps.length_collapse,
    steps.length_explosion,
    steps.kl_blow_up,
    steps.always_clipped,
    steps.truncated,
    steps.few_useful_groups,
)
MACHINE: tuple[Rule, ...] = (results.memory_full, results.slower_than_before, results.starving)


def diagnose(
    rows: Sequence[Row], config: Mapping[str, Any], summary: Mapping[str, Any] | None = None
) -> list[Diagnosis]:
    """Causes that keep the run from learning or harm it, most important first; empty if nothing is wrong.

    A cause that is only a consequence of another one in the list is left out. `rows`: lines of metrics.jsonl; of a long
    run, the first and the last steps are enough. `summary`: of a finished run, for which any number of steps is
    evidence. If its accuracy has increased significantly and is not far below the best one during the run, only causes
    that concern the machine remain.
    """
    run = RunHistory([row for row in rows if "reward/mean" in row], config, finished=summary is not None)
    fallen = results.fell_from_best(run)
    gained = summary is not None and results.has_gained(summary) and fallen is None
    found = [fallen, *(rule(run) for rule in (*(() if gained else LEARNING), *MACHINE))]
    if summary is not None and not gained:
        found.append(results.not_significant(summary, config))
        if not Window(run.steps[FIRST:], run.first, config).improving:
            found.append(results.unchanged_accuracy(summary, config))
    return ranked(cause for cause in found if cause is not None)


# Run folders

UNEXPECTED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)  # values of a damaged file
SHOWN = 3  # examples of a cause
EXAMPLE_CHARS = 160  # of the end of an answer, where the final answer is
QUOTED = 60  # characters of a detail or an extracted answer
MAX_FILES = 200  # rollout files whose prompts are compared with evaluations, spread over the run
JUDGED = (Status.NO_ANSWER, Status.UNPARSABLE, Status.WRONG)
# Causes that answers illustrate, and the statuses of these answers. None: answers that were cut off.
ILLUSTRATED: dict[str, tuple[Status, ...] | None] = {
    "judge_fails": (Status.ERROR, Status.TIMEOUT),
    "no_answer": (Status.NO_ANSWER, Status.UNPARSABLE),
    "never_rewarded": JUDGED,
    "equal_rewards": JUDGED,
    "truncated": None,
}


def diagnose_run(run: Run) -> list[Diagnosis]:
    """Diagnose a run folder, finished or not."""
    return diagnose_files(RunFiles(run.path))


def diagnose_files(
    files: RunFiles,
    rows: Sequence[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    leakage: bool = True,
) -> list[Diagnosis]:
    """Diagnose what can be read. Afterwards, `files.problems` says what cannot.

    `rows` (of metrics.jsonl), `config`, `summary`: read from the files unless they are given. `leakage`: also compare
    the prompts of training and evaluations.
    """
    rows = files.metrics() if rows is None else rows
    config = files.config() if config is None else config
    summary = files.document("summary.json") or None if summary is None else summary
    found: list[Diagnosis] = []

    def attempt(rules: Callable[[], Iterable[Diagnosis | None]]) -> None:
        try:
            found.extend(filter(None, rules()))
        except UNEXPECTED as error:
            files.add_problem(f"some rules cannot be applied: a file has unexpected values ({describe_error(error)})")

    attempt(lambda: diagnose(rows, config, summary))
    attempt(lambda: [slower_than_best(files.path, rows, config)])
    if leakage:
        attempt(lambda: [shared_prompts(files, config)])
    return [with_examples(cause, files) for cause in ranked(found)]


# Examples


def with_examples(cause: Diagnosis, files: RunFiles) -> Diagnosis:
    """The cause with three answers of the last step that show it, and the most frequent reason of their verdicts."""
    if cause.name not in ILLUSTRATED or cause.examples:
        return cause
    steps = files.rollout_steps()
    lines = [*files.rollouts(steps[-1])] if steps else []
    statuses = ILLUSTRATED[cause.name]
    if statuses is None:
        lines = [line for line in lines if line.get("truncated")]
        return replace(cause, examples=tuple(map(example, spread(lines))))
    kinds = Counter(kind for line in lines if (kind := failure(line))[0] in statuses)
    if not kinds:
        return cause
    (kind, count), *_ = kinds.most_common(1)
    detail = f" ({excerpt(kind[1], QUOTED)})" if kind[1] else ""
    shown = spread([line for line in lines if failure(line) == kind])
    evidence = f"{cause.evidence}; in step {steps[-1]}, {percent(count / len(lines))} of the verdicts are {kind[0]}"
    return replace(cause, evidence=evidence + detail, examples=tuple(map(example, shown)))


def failure(line: Mapping[str, Any]) -> tuple[str, str]:
    """Status and detail of a verdict."""
    status, detail = (setting(line, f"verdict.{name}") for name in ("status", "detail"))
    return str(status or ""), str(detail or "")


def spread(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Answers to different prompts, as far as there are any."""
    by_prompt = {str(line.get("prompt_id")): line for line in reversed(lines)}
    others = [line for line in lines if line not in by_prompt.values()]
    return [*reversed(by_prompt.values()), *others][:SHOWN]


def example(line: Mapping[str, Any]) -> str:
    """One line: the prompt, the end of the answer, what was extracted from it, and the expected answer."""
    parsed = setting(line, "verdict.parsed")
    expected = f", expected {excerpt(str(line['answer']), QUOTED)}" if line.get("answer") else ""
    found = "" if parsed is None else f", extracted {excerpt(str(parsed), QUOTED)}"
    text = str(line.get("text", "")).strip()
    end = text if len(text) <= EXAMPLE_CHARS else f"... {text[-EXAMPLE_CHARS:]}"
    return f"{line.get('prompt_id')}: {json.dumps(end, ensure_ascii=False)}{found}{expected}"


# Leakage


def shared_prompts(files: RunFiles, config: Mapping[str, Any]) -> Diagnosis | None:
    """Problems that the run was trained on and evaluated on, by their text.

    Episodes of environments may begin with the same text, and are not compared.
    """
    if setting(config, "env.name"):
        return None
    trained: dict[str, str] = {}
    steps = files.rollout_steps()
    for step in steps[:: max(len(steps) // MAX_FILES, 1)]:
        for line in files.rollouts(step):
            if line.get("sample") in (0, None):
                trained.setdefault(prompt_text(line), str(line.get("prompt_id")))
    for label in ("before", "eval"):
        for file in sorted((files.path / "evals").glob(f"step-*-{label}-*.jsonl"))[:1] if trained else ():
            split = file.stem.rpartition("-")[2]
            if split not in ("train", "all"):
                ids = {prompt_text(line): str(line.get("prompt_id")) for line in files.lines(file)}
                if shared := [(own, trained[text]) for text, own in ids.items() if text in trained]:
                    return explain_leakage(split, len(shared), len(ids), shared[0])
    return None


def prompt_text(line: Mapping[str, Any]) -> str:
    """The text of the user's messages, without differences in case and white space."""
    messages = line.get("messages")
    parts = [part for part in messages if isinstance(part, Mapping)] if isinstance(messages, list) else []
    words = (str(part.get("content")).casefold().split() for part in parts if part.get("role") == "user")
    return " ".join(chain.from_iterable(words))


def explain_leakage(split: str, shared: int, count: int, example: Sequence[str]) -> Diagnosis:
    """`example`: ids of the same problem in the evaluation and in the train split."""
    return Diagnosis(
        "leakage",
        f"{shared} of the {count} {split} problems are also in the train split (e.g. {' and '.join(example)}), so the "
        "accuracy on them is too high",
        "remove them from the train split: give task.path a folder with train.jsonl and test.jsonl that share no "
        "problem, or choose other task.args",
        "error" if shared == count else "warning",
    )
