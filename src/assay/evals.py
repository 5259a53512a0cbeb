"""Evaluation of models on problems: a report of the outcomes, with accuracy, pass@k and majority votes; confidence
intervals and paired tests, in numpy. Accuracies are fractions from 0 to 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from assay.types import TASK_LABEL, Group, Prompt, Status, UserError

if TYPE_CHECKING:  # pages about runs need the statistics only
    from assay.engine.base import SamplingParams
    from assay.rollout import Collector

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


# Statistics

Answer = str | None

CONFIDENCE = 0.95  # of all intervals
CHUNK = 1_000_000  # random numbers generated at a time, to bound memory
MAX_SCALE = 1024  # largest common denominator that the exact paired test tries
MAX_EXACT_WORK = 200_000_000  # additions; beyond this the paired test uses random sign flips


@dataclass(frozen=True)
class Paired:
    """Result of a paired test: two-sided p-value, and the numbers of questions that improved and got worse."""

    p_value: float
    gained: int
    lost: int


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson score interval of a proportion; (0, 1) if n is 0."""
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}")
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    rate = successes / n
    center = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # The bounds for 0 and n successes are exact despite rounding.
    low = 0.0 if successes == 0 else max(center - half, 0.0)
    high = 1.0 if successes == n else min(center + half, 1.0)
    return low, high


def bootstrap(values_per_question: ArrayLike, seed: int, n: int = 10_000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over questions (samples of one question are not independent).

    It has no width if all values are equal; for one answer per question use `wilson`.
    """
    values = np.asarray(values_per_question, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise UserError("the evaluation set is empty: an interval needs at least one question")
    rng = np.random.default_rng(seed)
    rows = max(CHUNK // values.size, 1)
    means = [
        values[rng.integers(0, values.size, size=(min(rows, n - start), values.size))].mean(axis=1)
        for start in range(0, n, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct (Chen et al. 2021).

    `c` of `n` samples are correct.
    """
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} with {c} of {n} samples correct: requires 0 <= c <= n and 1 <= k <= n")
    # 1 - C(n-c, k) / C(n, k) as a product of factors in [0, 1]; one of them is 0 if fewer than k samples are wrong.
    return 1.0 - math.prod(max(1.0 - k / i, 0.0) for i in range(n - c + 1, n + 1))


def pass_at_k_values(correct: ArrayLike, k: int) -> NDArray[np.float64]:
    """pass@k of each question, from correct[question, sample]."""
    table = np.asarray(correct, dtype=bool)
    n = table.shape[1]
    by_count = np.array([pass_at_k(n, c, k) for c in range(n + 1)])
    return by_count[table.sum(axis=1)]


def majority_correct(answers: Sequence[Answer], correct: Sequence[bool], k: int) -> bool:
    """Whether the most frequent of a question's first k answers is correct.

    Answers are compared as strings; an answer is correct if its first sample is. A tie is won by the answer that occurs
    first. A missing answer (None) has no vote; without votes the result is wrong.
    """
    votes = Counter(answer for answer in answers[:k] if answer is not None)
    if not votes:
        return False
    winner = max(votes, key=votes.__getitem__)  # a Counter keeps the order of insertion, and max returns the first
    return bool(correct[list(answers).index(winner)])


def majority_at_k(answers: Sequence[Sequence[Answer]], correct: ArrayLike, k: int) -> float:
    """Fraction of questions whose majority answer over the first k samples is correct; arguments are [Q][n]."""
    table = np.asarray(correct, dtype=bool)
    if not answers or not 1 <= k <= table.shape[1]:
        raise ValueError(f"majority@{k} of {len(answers)} questions with samples {table.shape[1:]}")
    won = [majority_correct(row, row_correct, k) for row, row_correct in zip(answers, table.tolist(), strict=True)]
    return sum(won) / len(won)


def mcnemar(before: ArrayLike, after: ArrayLike) -> Paired:
    """Exact two-sided McNemar test of correctness on the same questions, with one answer per question."""
    was, now = np.asarray(before, dtype=bool), np.asarray(after, dtype=bool)
    _require_same_questions(was, now)
    gained, lost = int((~was & now).sum()), int((was & ~now).sum())
    return Paired(_sign_test(gained, lost), gained, lost)


def paired_test(before_means: ArrayLike, after_means: ArrayLike, seed: int, rounds: int = 20_000) -> Paired:
    """Two-sided sign-flip test of the mean difference between per-question means (several answers per question).

    Successes and failures are compared by McNemar's test. Means of n samples are multiples of 1/n, so the null
    distribution can be computed exactly. For other values, or too many, signs are flipped at random `rounds` times, and
    the p-value is at least 1 / (rounds + 1).
    """
    was, now = np.asarray(before_means, dtype=np.float64), np.asarray(after_means, dtype=np.float64)
    if _are_binary(was, now):
        return mcnemar(was, now)
    _require_same_questions(was, now)
    differences = now - was
    scale = _common_denominator(differences)
    units = np.rint(differences * scale).astype(np.int64) if scale else None
    if units is not None and np.abs(units).sum() * np.count_nonzero(units) <= MAX_EXACT_WORK:
        return Paired(_exact_sign_flip(units), int((units > 0).sum()), int((units < 0).sum()))
    p_value = _sampled_sign_flip(differences, seed, rounds)
    return Paired(p_value, int((differences > 1e-9).sum()), int((differences < -1e-9).sum()))


def difference_interval(before: ArrayLike, after: ArrayLike, paired: bool = True) -> tuple[float, float]:
    """Interval of the mean of `after` minus the mean of `before`; one value from 0 to 1 per question.

    For successes and failures: the score intervals of Newcombe (Statistics in Medicine 17, 1998, both articles), which
    have a width even if no question differs. Else a percentile bootstrap over questions.
    """
    was, now = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if paired:
        _require_same_questions(was, now)
    if _are_binary(was, now):
        return _newcombe(was, now, _correlation(was, now) if paired else 0.0)
    if paired:
        return bootstrap(now - was, seed=0)
    spread = [np.array(bootstrap(values, seed=0)) - values.mean() for values in (was, now)]
    middle = float(now.mean() - was.mean())
    # Independent samples: distances of the ends from the means are added as variances are.
    low, high = np.hypot(spread[1][0], spread[0][1]), np.hypot(spread[1][1], spread[0][0])
    return middle - float(low), middle + float(high)


def _newcombe(was: NDArray, now: NDArray, correlation: float) -> tuple[float, float]:
    (low, high), (low_now, high_now) = (wilson(int(v.sum()), v.size) for v in (was, now))
    rate, rate_now = (float(v.mean()) for v in (was, now))

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * correlation * a * b + b * b, 0.0))

    middle = rate_now - rate
    return middle - distance(rate_now - low_now, high - rate), middle + distance(high_now - rate_now, rate - low)


def _correlation(was: NDArray, now: NDArray) -> float:
    """Correlation of successes, with the continuity correction that Newcombe recommends; 0 if one side is constant."""
    n = was.size
    both, none = int((was * now).sum()), int(((1 - was) * (1 - now)).sum())
    first, second = int((was * (1 - now)).sum()), int(((1 - was) * now).sum())
    product = float(both * none - first * second)
    product = max(product - n / 2, 0.0) if product > 0 else product
    sides = (both + first) * (second + none) * (both + second) * (first + none)
    return product / math.sqrt(sides) if sides else 0.0


def _are_binary(*values: NDArray) -> bool:
    """Whether all values are successes or failures."""
    return bool(np.isin(np.concatenate([part.ravel() for part in values]), (0.0, 1.0)).all())


def _require_same_questions(before: NDArray, after: NDArray) -> None:
    if before.shape != after.shape or before.ndim != 1:
        raise ValueError(f"a paired test needs the same questions, not shapes {before.shape} and {after.shape}")


def _sign_test(gained: int, lost: int) -> float:
    """Two-sided binomial test with p = 1/2, in integers: it cannot overflow or lose digits."""
    flips = gained + lost
    ways = tail = 1  # C(flips, 0)
    for i in range(1, min(gained, lost) + 1):
        ways = ways * (flips - i + 1) // i
        tail += ways
    return min(2 * tail / 2**flips, 1.0)


def _common_denominator(values: NDArray[np.float64]) -> int | None:
    for scale in range(1, MAX_SCALE + 1):
        scaled = values * scale
        if np.abs(scaled - np.rint(scaled)).max(initial=0.0) < 1e-6:
            return scale
    return None


def _exact_sign_flip(units: NDArray[np.int64]) -> float:
    """P(|sum of randomly signed units| >= |their sum|), from the distribution of the sum of the positive ones."""
    sizes = np.abs(units[units != 0])
    total, observed = int(sizes.sum()), abs(int(units.sum()))
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    for size in sizes:
        chance[size:] = (chance[size:] + chance[: total + 1 - size]) / 2
        chance[:size] /= 2
    # The signed sum is 2 * positive - total. Twice the lower tail has small terms only and keeps its precision.
    return min(2 * float(chance[: (total - observed) // 2 + 1].sum()), 1.0)


def _sampled_sign_flip(differences: NDArray[np.float64], seed: int, rounds: int) -> float:
    rng = np.random.default_rng(seed)
    observed = abs(differences.sum()) - 1e-9  # equal sums may differ in rounding
    rows = max(CHUNK // differences.size, 1)
    reached = 0
    for start in range(0, rounds, rows):
        signs = rng.integers(0, 2, size=(min(rows, rounds - start), differences.size), dtype=np.int8) * 2 - 1
        reached += int((np.abs(signs @ differences) >= observed).sum())
    return (reached + 1) / (rounds + 1)
