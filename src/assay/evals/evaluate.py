"""Measure a model on problems."""

from __future__ import annotations

from collections.abc import Sequence

from assay.engine.base import SamplingParams
from assay.evals.report import Report
from assay.rollout import Collector
from assay.types import Group, Prompt

AT_ONCE = 4096  # answers held in memory together


def evaluate(
    collector: Collector, prompts: Sequence[Prompt], params: SamplingParams, seed: int
) -> tuple[Report, list[Group]]:
    """Outcomes and the answers themselves. The seed knows no training step: every model gets the same noise."""
    groups: list[Group] = []
    size = max(AT_ONCE // params.n, 1)
    for start in range(0, len(prompts), size):
        groups += collector.collect(prompts[start : start + size], params, (seed, -1))
    return Report.of(groups), groups
