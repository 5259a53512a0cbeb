"""Facts about a run, for lists and comparisons of runs: from its summary, or from its config and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.config import TrainConfig
from assay.runs.console import finite


@dataclass(frozen=True)
class RunParts:
    """The content of the files of a run that `facts_of` needs. Missing files are empty."""

    state: str
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()  # lines of metrics.jsonl
    summary: Mapping[str, Any] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


def facts_of(parts: RunParts, name: str, path: str) -> dict[str, Any]:
    config, summary, rows = parts.config, parts.summary, parts.rows
    facts = {
        "run": name,
        "path": path,
        "state": parts.state,
        "error": parts.status.get("error") if parts.state == "failed" else None,
        "started": parts.environment.get("started"),
        "task": summary.get("task") or lookup(config, "task", "name"),
        "model": summary.get("model") or lookup(config, "model", "source"),
        "algorithm": summary.get("algorithm") or lookup(config, "algo", "recipe"),
        "seed": summary.get("seed", lookup(config, "seed")),
        "steps": max((row["step"] for row in rows), default=summary.get("steps", 0)),
        "steps_planned": parts.status.get("total_steps", planned_steps(config)),
        "warm_start": {"step": last(rows, "sft/step"), "steps": lookup(config, "sft", "steps")},
        "answers": last(rows, "sampling/answers"),
        "budget": lookup(config, "train", "budget") or None,
        "reward": last(rows, "reward/mean"),
        "wall_s": summary.get("wall_s", last(rows, "time/wall")),
        "config": config,
    }
    facts |= {key: summary.get(key) for key in ("before", "after", "paired", "tokens")}
    if not summary and (value := last(rows, "before/accuracy")) is not None:
        low, high = last(rows, "before/low"), last(rows, "before/high")
        facts["before"] = {"accuracy": value, "ci95": None if low is None or high is None else [low, high]}
    return facts


def planned_steps(config: Mapping[str, Any]) -> int | None:
    """Number of steps in the settings of a run that has not begun; None if it depends on the data."""
    steps, epochs, budget = (lookup(config, "train", key) for key in ("steps", "epochs", "budget"))
    return None if epochs or budget else steps


def last(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The last value of a metric that is a finite number."""
    return next((value for row in reversed(rows) if (value := finite(row, metric)) is not None), None)


def lookup(tree: Any, *keys: str) -> Any:
    """A nested value of the config, or None if it does not exist."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def default_settings() -> dict[str, Any]:
    """Defaults of all settings by dotted keys, as they are read from a config file. None: there is no fixed default."""
    return {key: _as_read(value) for key, value in flattened(TrainConfig().model_dump()).items()}


def _as_read(value: Any) -> Any:
    return [_as_read(item) for item in value] if isinstance(value, (list, tuple)) else value
