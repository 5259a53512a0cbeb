"""Evaluates a model on problems and summarizes the outcomes of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.engine.base import SamplingParams
from assay.evals.stats import Paired, bootstrap, majority_at_k, paired_test, pass_at_k_values, wilson
from assay.rollout import Collector
from assay.types import TASK_LABEL, Group, Prompt, Status

Outcome = tuple[Status, str | None, int, bool, float]  # status, parsed answer, number of tokens, truncated, reward
READABLE = (Status.OK, Status.WRONG)  # the answer has the required format
MAX_ANSWERS = 4096  # held in memory at the same time


@dataclass(frozen=True)
class Report:
    """Outcomes of Q questions with n answers per question."""

    ids: list[str]
    correct: np.ndarray  # [Q, n] bool
    parsed: list[list[str | None]]
    statuses: list[list[Status]]
    lengths: np.ndarray  # [Q, n] tokens
    truncated: np.ndarray  # [Q, n] bool
    rewards: np.ndarray  # [Q, n]
    tasks: list[str] = field(default_factory=list)  # label of each question's task, if several tasks are mixed

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Report:
        outcomes = [
            [
                (v.status, v.parsed, r.length, r.truncated, v.reward)
                for r in group.rollouts
                if (v := r.verdict) is not None
            ]
            for group in groups
        ]
        tasks = [str(group.prompt.fields.get(TASK_LABEL, "")) for group in groups]
        return cls._from([group.prompt.id for group in groups], outcomes, tasks)

    @classmethod
    def read(cls, lines: Sequence[Mapping[str, Any]]) -> Report:
        """Build a report from the lines of an evaluation file of a run."""
        outcomes: dict[int, list[Outcome]] = {}
        ids: dict[int, str] = {}
        tasks: dict[int, str] = {}
        for line in lines:
            verdict, group = line["verdict"], line["group"]  # not by id: rows of a user's file may share an id
            outcome = (
                Status(verdict["status"]),
                verdict["parsed"],
                line["length"],
                line["truncated"],
                verdict["reward"],
            )
            outcomes.setdefault(group, []).append(outcome)
            ids[group] = line["prompt_id"]
            tasks[group] = line.get("task", "")
        return cls._from(list(ids.values()), list(outcomes.values()), list(tasks.values()))

    @classmethod
    def _from(cls, ids: list[str], outcomes: list[list[Outcome]], tasks: list[str]) -> Report:
        return cls(
            ids=ids,
            correct=np.array([[status is Status.OK for status, *_ in row] for row in outcomes], dtype=bool),
            parsed=[[parsed for _, parsed, *_ in row] for row in outcomes],
            statuses=[[status for status, *_ in row] for row in outcomes],
            lengths=np.array([[length for _, _, length, *_ in row] for row in outcomes]),
            truncated=np.array([[truncated for *_, truncated, _ in row] for row in outcomes], dtype=bool),
            rewards=np.array([[reward for *_, reward in row] for row in outcomes], dtype=float),
            tasks=tasks if any(tasks) else [],
        )

    @property
    def accuracy(self) -> float:
        return float(self.correct.mean())

    @property
    def ci95(self) -> tuple[float, float]:
        """Wilson interval for one answer per question; otherwise a bootstrap over questions."""
        return interval(self.correct.mean(axis=1))

    def summary(self) -> dict[str, Any]:
        questions, samples = self.correct.shape
        flat = [status for row in self.statuses for status in row]
        summary: dict[str, Any] = {
            "accuracy": self.accuracy,
            "ci95": list(self.ci95),
            "n": questions,
            "samples": samples,
            "reward": float(self.rewards.mean()),
            "mean_length": float(self.lengths.mean()),
            "truncated": float(self.truncated.mean()),
            "format": sum(status in READABLE for status in flat) / len(flat),
            "statuses": {str(status): count for status, count in sorted(Counter(flat).items())},
        }
        if self.tasks:
            summary["by_task"] = {task: self._summary_of(task) for task in dict.fromkeys(self.tasks)}
        if samples > 1:
            ks = range(1, samples + 1)
            passed = {str(k): pass_at_k_values(self.correct, k) for k in ks}
            summary["pass_at_k"] = {k: float(values.mean()) for k, values in passed.items()}
            summary["pass_at_k_ci95"] = {k: list(interval(values)) for k, values in passed.items()}
        if samples > 1 and any(answer is not None for row in self.parsed for answer in row):
            summary["majority_at_k"] = {str(k): majority_at_k(self.parsed, self.correct, k) for k in ks}
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
