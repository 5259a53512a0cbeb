"""Sequences of metrics and summaries, for tests of the rules."""

from __future__ import annotations

from typing import Any

from assay.checks import diagnose

CONFIG: dict[str, Any] = {
    "sampling": {"max_new_tokens": 64, "temperature": 0.1},
    "train": {"samples": 4, "steps": 10, "prompts": 32},
    "optim": {"lr": 1e-6},
    "reward": {"timeout_s": 5.0, "extract": "boxed", "function": ""},
    "env": {"name": ""},
}
HEALTHY: dict[str, Any] = {
    **{"reward/mean": 0.4, "reward/std": 0.49, "reward/range": 1.0, "reward/correct": 0.4, "status/ok": 0.4},
    **{"status/wrong": 0.6, "groups/zero_variance": 0.3, "advantage/zero": 0.3, "length/truncated": 0.05},
    **{"length/max": 64.0, "sampling/entropy": 0.8, "optim/grad_norm": 0.2, "optim/skipped": 0.0},
    **{"optim/non_finite": 0.0, "weights/changed": 1.0},
}


def steps(count: int, changes: dict[str, Any], first: int = 1, answers: int = 32) -> list[dict[str, Any]]:
    rows = [{"step": n, "sampling/answers": answers * n, **HEALTHY, **changes} for n in range(first, first + count)]
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def summary(before: float, after: float, gained: int, lost: int, p_value: float = 1.0) -> dict[str, Any]:
    return {
        "steps": 10,
        "before": {"accuracy": before, "n": 50, "mean_length": 20.0},
        "after": {"accuracy": after, "n": 50, "mean_length": 20.0},
        "paired": {"gained": gained, "lost": lost, "p_value": p_value},
    }


def errors(*arguments: Any) -> list[str]:
    return [cause.name for cause in diagnose(*arguments) if cause.severity == "error"]


def names(*arguments: Any) -> list[str]:
    return [cause.name for cause in diagnose(*arguments)]
