"""What the console and the curves call a metric, and the keys of metrics.jsonl where it may be found, best first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

KEYS: dict[str, tuple[str, ...]] = {
    "reward": ("reward/mean",),
    "accuracy": ("eval/accuracy",),
    "accuracy_low": ("eval/low",),
    "accuracy_high": ("eval/high",),
    "start": ("start/accuracy",),
    "start_low": ("start/low",),
    "start_high": ("start/high",),
    "before": ("before/accuracy",),
    "before_low": ("before/low",),
    "before_high": ("before/high",),
    "after": ("after/accuracy",),
    "after_low": ("after/low",),
    "after_high": ("after/high",),
    "any_accuracy": ("eval/accuracy", "after/accuracy", "before/accuracy"),
    "sft_loss": ("sft/loss",),
    "length": ("length/mean",),
    "truncated": ("length/truncated",),
    "entropy": ("policy/entropy",),
    "kl": ("policy/kl",),
    "mismatch": ("mismatch/logprob_abs_diff",),
    "grad_norm": ("optim/grad_norm",),
    "lr": ("optim/lr",),
    "seconds": ("time/step",),
}


def find(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric as a finite number, or None where it is missing or is not one."""
    for key in KEYS[name]:
        value = metrics.get(key)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    return None
