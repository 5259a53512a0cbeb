"""Comparison of two evaluations question by question, from the lines of their files; they may be of different runs.

Two lines belong to the same question if its id, its text and its gold answer are the same: generated problems can have
the same id and differ. System messages are not compared, because they are part of what may differ between runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.evals.stats import difference_interval, paired_p_value
from assay.types import Status

Key = tuple[str, str, str, int]  # id, text, gold answer, and a number if several questions have all three in common


@dataclass(frozen=True)
class EvalComparison:
    """The answers of A and B compared, on the questions that both have answered.

    Without common questions the comparison is not paired: it is between all questions of A and all of B, `p_value` is
    None, and nothing is gained or lost.
    """

    questions: int  # common ones
    only_a: int
    only_b: int
    accuracy_a: float  # on the compared questions
    accuracy_b: float
    difference: float  # B minus A
    ci95: tuple[float, float]  # of the difference
    p_value: float | None
    gained: list[str]  # ids of questions that B answers correctly more often than A
    lost: list[str]

    @property
    def paired(self) -> bool:
        return self.questions > 0


def compare_evaluations(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> EvalComparison:
    """Compare the lines of two evaluation files. Neither may be empty."""
    first, second = accuracies(a), accuracies(b)
    common = [key for key in first if key in second]
    was, now = (np.array([rates[key] for key in common or rates]) for rates in (first, second))
    return EvalComparison(
        questions=len(common),
        only_a=len(first) - len(common),
        only_b=len(second) - len(common),
        accuracy_a=float(was.mean()),
        accuracy_b=float(now.mean()),
        difference=float(now.mean()) - float(was.mean()),
        ci95=difference_interval(was, now, paired=bool(common)),
        p_value=paired_p_value(was, now) if common else None,
        gained=[key[0] for key, x, y in zip(common, was, now, strict=False) if y > x + 1e-9],
        lost=[key[0] for key, x, y in zip(common, was, now, strict=False) if y < x - 1e-9],
    )


def accuracies(lines: Sequence[Mapping[str, Any]]) -> dict[Key, float]:
    """Fraction of correct answers to each question."""
    questions: dict[int, tuple[str, str, str]] = {}
    correct: dict[int, list[bool]] = {}
    for line in lines:
        group = line["group"]
        asked = "\n".join(str(message["content"]) for message in line["messages"] if message.get("role") != "system")
        questions[group] = str(line["prompt_id"]), asked, str(line["answer"])
        correct.setdefault(group, []).append((line["verdict"] or {}).get("status") == Status.OK)
    seen: Counter[tuple[str, str, str]] = Counter()
    rates: dict[Key, float] = {}
    for group, question in questions.items():
        rates[(*question, seen[question])] = sum(correct[group]) / len(correct[group])
        seen[question] += 1
    return rates
