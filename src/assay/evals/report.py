"""Evaluates a model on problems and summarizes the outcomes of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from assay.engine.base import SamplingParams
from assay.evals.stats import Paired, bootstrap, majority_at_k, paired_test, pass_at_k_values, wilson
from assay.rollout import Collector
from assay.types import TASK_LABEL, Group, Prompt, Status

READABLE = (Status.OK, Status.WRONG)  # the answer has the required format
MAX_ANSWERS = 4096  # held in memory at the same time


class AnswerOutcome(NamedTuple):
    """What an evaluation keeps of an answer."""

    status: Status
    parsed: str | None
    length: int  # in tokens
    truncated: bool
    reward: float

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> AnswerOutcome:
        """From a line of an evaluation file of a run."""
        verdict = line["verdict"]
        return cls(Status(verdict["status"]), verdict["parsed"], line["length"], line["truncated"], verdict["reward"])


@dataclass
class Report:
    """Outcomes of Q questions with n answers per question."""

    ids: list[str]
    outcomes: list[list[AnswerOutcome]]  # [Q][n]
    tasks: list[str]  # label of each question's task, if several tasks are mixed; else empty texts
    correct: np.ndarray = field(init=False)  # [Q, n] bool

    def __post_init__(self) -> None:
        """Raises a ValueError if the questions have different numbers of answers."""
        self.correct = np.array([[answer.status is Status.OK for answer in row] for row in self.outcomes], dtype=bool)

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Report:
        judged = [[(r, r.verdict) for r in group.rollouts if r.verdict is not None] for group in groups]
        outcomes = [
            [AnswerOutcome(v.status, v.parsed, r.length, r.truncated, v.reward) for r, v in row] for row in judged
        ]
        tasks = [str(group.prompt.fields.get(TASK_LABEL, "")) for group in groups]
        return cls([group.prompt.id for group in groups], outcomes, tasks)

    @classmethod
    def read(cls, lines: Sequence[Mapping[str, Any]]) -> Report:
        """Build a report from the lines of an evaluation file of a run."""
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for line in lines:
            groups.setdefault(line["group"], []).append(line)  # not by id: rows of a user's file may share an id
        outcomes = [list(map(AnswerOutcome.read, group)) for group in groups.values()]
        first = [group[0] for group in groups.values()]
        return cls([line["prompt_id"] for line in first], outcomes, [line.get("task", "") for line in first])

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    @property
    def truncated(self) -> float:
        """Fraction of answers that were cut off."""
        return float(np.mean([answer.truncated for row in self.outcomes for answer in row]))

    def summary(self) -> dict[str, Any]:
        questions, samples = self.correct.shape
        answers = [answer for row in self.outcomes for answer in row]
        statuses = Counter(answer.status for answer in answers)
        summary: dict[str, Any] = {
            "accuracy": self.accuracy,
            "ci95": list(interval(self.correct.mean(axis=1))),
            "n": questions,
            "samples": samples,
            "reward": float(np.mean([answer.reward for answer in answers])),
            "mean_length": float(np.mean([answer.length for answer in answers])),
            "truncated": self.truncated,
            "format": sum(statuses[status] for status in READABLE) / len(answers),
            "statuses": {str(status): count for status, count in sorted(statuses.items())},
        }
        if any(self.tasks):
            summary["by_task"] = {task: self._summary_of(task) for task in dict.fromkeys(self.tasks)}
        if samples > 1:
            ks = range(1, samples + 1)
            passed = {str(k): pass_at_k_values(self.correct, k) for k in ks}
            summary["pass_at_k"] = {k: float(values.mean()) for k, values in passed.items()}
            summary["pass_at_k_ci95"] = {k: list(interval(values)) for k, values in passed.items()}
        if samples > 1 and any(answer.parsed is not None for answer in answers):
            parsed = [[answer.parsed for answer in row] for row in self.outcomes]
            summary["majority_at_k"] = {str(k): majority_at_k(parsed, self.correct, k) for k in ks}
        return summary

    def _summary_of(self, task: str) -> dict[str, Any]:
        """Accuracy on the questions of one of several tasks."""
        means = self.correct[[label == task for label in self.tasks]].mean(axis=1)
        return {"accuracy": float(means.mean()), "ci95": list(interval(means)), "n": len(means)}


def interval(values: np.ndarray) -> tuple[float, float]:
    """95 % confidence interval of the mean of one number from 0 to 1 per question."""
    if np.isin(values, (0.0, 1.0)).all():
        # Successes and failures only: the Wilson interval applies. A bootstrap of equal values would have no width.
        return wilson(int(values.sum()), len(values))
    return bootstrap(values, seed=0)


def compare(before: Report, after: Report) -> Paired:
    """Paired test of two reports on the same questions."""
    assert before.ids == after.ids, "a paired test needs the same questions in the same order"
    return paired_test(before.correct.mean(axis=1), after.correct.mean(axis=1), seed=0)


def evaluate(
    collector: Collector, prompts: Sequence[Prompt], params: SamplingParams, seed: int
) -> tuple[Report, list[Group]]:
    """Sample and judge answers. Seeds do not depend on the training step, so every model gets the same noise."""
    groups: list[Group] = []
    size = max(MAX_ANSWERS // params.n, 1)
    for start in range(0, len(prompts), size):
        part = f", part {start // size + 1} of {-(-len(prompts) // size)}" if len(prompts) > size else ""
        groups += collector.collect(prompts[start : start + size], params, (seed, -1), what=f"evaluating{part}")
    return Report.of(groups), groups
