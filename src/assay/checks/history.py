"""The steps of a run that the rules look at, and windows of steps in which a symptom holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, variance
from typing import Any

from assay.checks.causes import now, setting
from assay.runs.console import finite

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
    found: list[Row] = []
    for row in reversed(steps):
        if not symptom(row):
            break
        found.append(row)
    return found[::-1]


def change(before: Sequence[Row], after: Sequence[Row], name: str) -> tuple[float, float]:
    """Difference of the means of a metric, and its standard error from the differences between steps."""
    one, other = values(before, name), values(after, name)
    if len(one) < 2 or len(other) < 2:
        return 0.0, math.inf
    error = math.sqrt(variance(one) / len(one) + variance(other) / len(other))
    return fmean(other) - fmean(one), error


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
        and a symptom is no reason to warn.
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

    def trend(self, symptom: Symptom, count: int = LONG) -> Window | None:
        """At least `count` last steps with the symptom, besides the first steps of the run, to be compared with them.

        None if there are fewer, or if the run improves.
        """
        if len(self.steps) < FIRST + count:
            return None
        window = Window(trailing(self.steps[FIRST:], symptom), self.first, self.config)
        return window if len(window.rows) >= count and not window.improving else None

    def at_least(self, name: str, limit: float) -> Symptom:
        """The symptom that a metric is at least `limit`."""
        return partial(_at_least, name=name, limit=limit)


def _at_least(row: Row, name: str, limit: float) -> bool:
    value = finite(row, name)
    return value is not None and value >= limit
