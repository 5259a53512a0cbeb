"""Causes of a run that does not learn, by name, and the steps of a run in which a symptom shows one.

A cause can hide others, which are its consequences. The most important cause is reported first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from statistics import fmean, variance
from typing import Any, Literal

from assay.runs.console import finite
from assay.runs.directory import setting
from assay.types import Problem

Severity = Literal["error", "warning", "note"]  # the run cannot learn; something harms it; worth knowing
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

# All causes, the most important first, with the severities that they can have.
CAUSES: dict[str, tuple[Severity, ...]] = {
    "refused": ("error",),
    "zero_loss": ("error",),
    "judge_fails": ("error", "warning"),
    "not_finite": ("error",),
    "stale_weights": ("error",),
    "masked": ("error",),
    "zero_advantages": ("error",),
    "zero_gradient": ("error",),
    "tiny_updates": ("error",),
    "truncated": ("error", "warning"),
    "no_answer": ("error",),
    "never_rewarded": ("error",),
    "equal_rewards": ("error",),
    "equal_in_groups": ("error",),
    "leakage": ("error", "warning"),
    "repeated_ids": ("warning",),
    "learning_rate_high": ("warning",),
    "learning_rate_low": ("warning",),
    "mismatch": ("warning",),
    "entropy_collapse": ("error", "warning"),
    "length_collapse": ("warning",),
    "length_explosion": ("warning",),
    "kl_blow_up": ("warning",),
    "always_clipped": ("warning",),
    "few_useful_groups": ("warning",),
    "too_easy": ("warning",),
    "fell_from_best": ("warning",),
    "memory_full": ("warning",),
    "slow": ("warning",),
    "starving": ("warning",),
    "no_change": ("warning",),
    "not_significant": ("note",),
    "small_batch": ("note",),
    "risky_setting": ("note",),
    "unused_setting": ("note",),
}
NO_GAIN = ("no_change", "not_significant", "few_useful_groups")  # follow from everything that keeps a run from learning
UNSTABLE = ("kl_blow_up", "always_clipped", "entropy_collapse", "length_collapse", "length_explosion")
NO_SIGNAL = ("truncated", "no_answer", "never_rewarded", "equal_rewards", "equal_in_groups", "too_easy")
# Consequences of a cause: not reported if the cause is. Every error also hides the consequences of `NO_GAIN`.
CONSEQUENCES: dict[str, tuple[str, ...]] = {
    "zero_loss": (*NO_SIGNAL, "zero_advantages", "zero_gradient", "masked"),
    "judge_fails": NO_SIGNAL,
    "stale_weights": ("mismatch", "learning_rate_high", *UNSTABLE),
    "learning_rate_high": (*UNSTABLE, *NO_SIGNAL, *NO_GAIN),
    "length_explosion": ("truncated", *NO_GAIN),
    **dict.fromkeys(("mismatch", "kl_blow_up"), ("always_clipped", *NO_GAIN)),
    **dict.fromkeys(("entropy_collapse", "length_collapse", "always_clipped", "truncated", "too_easy"), NO_GAIN),
}


@dataclass(frozen=True)
class Diagnosis:
    """A cause: its name, what was observed, what to change, how bad it is, and answers that show it."""

    name: str
    evidence: str
    remedy: str
    severity: Severity = None  # type: ignore[assignment]  # by default, the first one of `CAUSES`
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.severity is None:
            object.__setattr__(self, "severity", CAUSES[self.name][0])
        assert self.severity in CAUSES[self.name], f"{self.name}: {self.severity}"

    def __str__(self) -> str:
        return str(Problem(self.evidence, self.remedy))


def ranked(causes: Iterable[Diagnosis]) -> list[Diagnosis]:
    """The most important first, each name once, without consequences of others."""
    by_name: dict[str, Diagnosis] = {}
    for cause in causes:
        by_name.setdefault(cause.name, cause)
    hidden = {name for cause in by_name.values() for name in CONSEQUENCES.get(cause.name, ())}
    if any(cause.severity == "error" for cause in by_name.values()):
        hidden |= set(NO_GAIN)
    names = list(CAUSES)
    shown = [cause for cause in by_name.values() if cause.name not in hidden]
    return sorted(shown, key=lambda cause: (SEVERITIES.index(cause.severity), names.index(cause.name)))


def as_facts(causes: Sequence[Diagnosis]) -> dict[str, list[dict[str, Any]]]:
    """The entry of summary.json; none if there are no causes."""
    return {"diagnosis": [asdict(cause) | {"examples": [*cause.examples]} for cause in causes]} if causes else {}


def now(config: Mapping[str, Any], key: str) -> str:
    """A setting and its value, as in "optim.lr (now 1e-06)"."""
    value = setting(config, key)
    return key if value in (None, "") else f"{key} (now {value})"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


# Steps of a run

Row = Mapping[str, Any]  # a line of metrics.jsonl
Symptom = Callable[[Row], bool]

MIN_STEPS, MIN_ANSWERS = 4, 64  # from the start of the run: evidence for a warning during the run
LONG = 20  # steps after which a symptom counts although it began later, and after which a trend counts
FIRST, LAST = 8, 64  # steps that `remember` keeps: the start, to compare with, and the latest


def remember(rows: list[Row], row: Row) -> None:
    """Append a line of metrics, and drop lines that the rules do not need."""
    if "reward/mean" in row:
        rows.append(row)
        del rows[FIRST:-LAST]


def values(rows: Sequence[Row], name: str) -> list[float]:
    """The values of a metric that are finite numbers."""
    return [value for row in rows if (value := finite(row, name)) is not None]


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean of a metric; missing values count as 0."""
    return sum(values(rows, name)) / max(len(rows), 1)


def trailing(steps: Sequence[Row], symptom: Symptom) -> list[Row]:
    """The steps up to the last one in which the symptom holds without interruption."""
    return [*takewhile(symptom, reversed(steps))][::-1]


def change(before: Sequence[Row], after: Sequence[Row], name: str) -> tuple[float, float]:
    """Difference of the means of a metric, and its standard error from the differences between steps."""
    values_before, values_after = values(before, name), values(after, name)
    if len(values_before) < 2 or len(values_after) < 2:
        return 0.0, math.inf
    error = math.sqrt(variance(values_before) / len(values_before) + variance(values_after) / len(values_after))
    return fmean(values_after) - fmean(values_before), error


@dataclass(frozen=True)
class Window:
    """The last steps of a run, in all of which a symptom holds, and what is needed to explain it."""

    rows: Sequence[Row]
    first: Sequence[Row]  # the first steps of the run
    config: Mapping[str, Any]

    @property
    def from_start(self) -> bool:
        return bool(self.rows) and self.rows[0]["step"] <= 1

    @property
    def answers(self) -> float:
        """Number of answers, if the window begins with the first step."""
        return finite(self.rows[-1], "sampling/answers") or 0.0

    @property
    def span(self) -> str:
        count = len(self.rows)
        if not self.from_start:
            return f"in the last {count} steps"
        if count < self.rows[-1]["step"]:  # of a long run, only the first and the last steps are known
            return f"in all {count} examined steps"
        return f"in all {count} steps" if count > 1 else "in step 1"

    def mean(self, name: str) -> float:
        return mean_of(self.rows, name)

    def start(self, name: str) -> float:
        """Mean over the first steps of the run."""
        return mean_of(self.first, name)

    def now(self, key: str) -> str:
        """A setting and its value, as in "optim.lr (now 1e-06)"."""
        return now(self.config, key)

    @property
    def has_env(self) -> bool:
        return bool(setting(self.config, "env.name"))

    @property
    def improved(self) -> bool:
        """Whether rewards are higher than in the first steps: then equal rewards are a sign of convergence."""
        return self.mean("reward/mean") > self.start("reward/mean") + 1e-6

    @property
    def improving(self) -> bool:
        """Whether rewards are higher than in the first steps by more than one standard error: then the run learns,
        and a symptom alone does not justify a warning.
        """
        difference, error = change(self.first, self.rows, "reward/mean")
        return difference > error + 1e-6


@dataclass(frozen=True)
class RunHistory:
    """The training steps of a run; of a long one, the first and the last."""

    steps: Sequence[Row]
    config: Mapping[str, Any] = field(default_factory=dict)
    finished: bool = False  # then any number of steps is evidence

    @property
    def first(self) -> Sequence[Row]:
        return self.steps[:FIRST]

    def window(self, symptom: Symptom, late: int = LONG) -> Window | None:
        """The last steps with the symptom, if they are evidence: from the start, or at least `late` later on."""
        window = Window(trailing(self.steps, symptom), self.first, self.config)
        if not window.rows:
            return None
        enough = self.finished or (len(window.rows) >= MIN_STEPS and window.answers >= MIN_ANSWERS)
        return window if (window.from_start and enough) or len(window.rows) >= late else None

    def lasting(self, symptom: Symptom, count: int) -> Window | None:
        """At least `count` last steps with the symptom, whatever the run has learned."""
        rows = trailing(self.steps, symptom)
        return Window(rows, self.first, self.config) if len(rows) >= count else None

    def trend(self, symptom: Symptom, count: int = LONG) -> Window | None:
        """At least `count` last steps with the symptom, besides the first steps of the run, to be compared with them.

        None if there are fewer, or if the run improves.
        """
        if len(self.steps) < FIRST + count:
            return None
        window = Window(trailing(self.steps[FIRST:], symptom), self.first, self.config)
        return window if len(window.rows) >= count and not window.improving else None


def at_least(name: str, limit: float) -> Symptom:
    """The symptom that a metric is at least `limit`."""
    return lambda row: (finite(row, name) or 0.0) >= limit
