"""All rules on the metrics and the summary of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from assay.checks import learning, results, stability
from assay.checks.causes import Diagnosis, ranked
from assay.checks.history import FIRST, Row, RunHistory, Window

Rule = Callable[[RunHistory], Diagnosis | None]
# Rules that do not apply to a run whose accuracy has increased significantly, up to its end.
LEARNING: tuple[Rule, ...] = (
    learning.cannot_learn,
    learning.judge_often_fails,
    stability.stale_or_mismatched,
    stability.learning_rate_high,
    stability.entropy_collapse,
    stability.length_collapse,
    stability.length_explosion,
    stability.kl_blow_up,
    stability.always_clipped,
    stability.truncated,
    stability.few_useful_groups,
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
