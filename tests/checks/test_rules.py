"""All rules together: several causes, and their cost."""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

from metric_rows import CONFIG, names, steps, summary

from assay.checks import diagnose, remember
from assay.checks.causes import FIRST, LAST, LONG

FULL = {"memory/host": 0.97}


def test_independent_causes_are_reported_together_the_most_important_first() -> None:
    failing = {**FULL, "status/error": 0.1, "policy/clip_fraction": 0.5, "policy/kl": 3.0}
    rows = [*steps(FIRST, FULL), *steps(LONG, failing, first=FIRST + 1)]
    assert names(rows, CONFIG) == ["judge_fails", "kl_blow_up", "memory_full"]  # clipping follows from the KL
    assert names(rows, CONFIG, summary(0.4, 0.4, 0, 0)) == ["judge_fails", "kl_blow_up", "memory_full"]
    assert names(rows, CONFIG, summary(0.2, 0.6, 20, 0, 1e-5)) == ["memory_full"]  # it has learned nevertheless


def test_the_same_causes_are_found_in_the_whole_run_and_in_what_is_remembered() -> None:
    failing = {"status/timeout": 0.2, "policy/clip_fraction": 0.5}
    rows = [*steps(100, {}), *steps(30, failing, first=101)]
    kept: list[Any] = []
    for row in rows:
        remember(kept, row)
    assert names(kept, CONFIG) == names(rows, CONFIG) == ["judge_fails", "always_clipped"]


def test_a_healthy_step_takes_few_operations() -> None:
    """Counted, because times vary: a step of a run takes about a hundred thousand calls at least."""
    rows = steps(FIRST + LAST, {"policy/clip_fraction": 0.01, "memory/host": 0.4, "time/tokens_per_s": 900.0})
    profile = cProfile.Profile()
    profile.runcall(diagnose, rows, CONFIG)
    assert pstats.Stats(profile).total_calls < 5_000
