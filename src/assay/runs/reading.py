"""Read runs: files of which some may be damaged, missing or unreadable; facts for lists and comparisons of runs."""

from __future__ import annotations

import io
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.config import TrainConfig
from assay.runs.console import finite
from assay.runs.files import from_json, json_lines, json_object, unreadable
from assay.runs.rollouts import rollout_path, rollout_steps

METRICS = "metrics.jsonl"
FOLDERS = ("rollouts", "evals")


class RunFiles:
    """Reads the files of a run. Nothing is raised: `problems` says what could not be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._problems: dict[str, str] = {}  # by file

    @property
    def problems(self) -> list[str]:
        """One line per file, also for folders that cannot be listed."""
        for folder in FOLDERS:
            try:
                os.listdir(self.path / folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._problems[folder] = f"{folder} cannot be listed ({reason(error)})"
        return list(self._problems.values())

    def add_problem(self, text: str) -> None:
        self._problems[text] = text

    def config(self) -> dict[str, Any]:
        """The settings; empty if they cannot be read."""
        try:
            return tomllib.loads((self._read(self.path / "config.toml") or b"").decode())
        except (ValueError, RecursionError) as error:
            self._problems["config.toml"] = f"config.toml is not valid TOML ({error})"
            return {}

    def document(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty if it is missing or damaged."""
        content = self._read(self.path / name)
        value = None if content is None else json_object(content)
        if content is not None and value is None:
            self._problems[name] = f"{name} is damaged: it has no JSON object"
        return value or {}

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that can be read."""
        rows = [{key: from_json(value) for key, value in row.items()} for row in self.lines(self.path / METRICS)]
        return [row for row in rows if isinstance(row.get("step"), int)]

    def rollout_steps(self) -> list[int]:
        return rollout_steps(self.path)

    def rollouts(self, step: int) -> Iterator[dict[str, Any]]:
        return self.lines(rollout_path(self.path, step))

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The lines of a file that are JSON objects. The incomplete last line of metrics is left out without a word:
        the run may be in progress, or was killed.
        """
        name = self.name(path)
        lines = json_lines(io.BytesIO(self._read(path) or b""))
        values = [line.value for line in lines if line.is_complete or line.value is not None or name != METRICS]
        if damaged := values.count(None):
            self._problems[name] = f"{name}: {damaged} of {len(values)} lines cannot be read"
        yield from (value for value in values if value is not None)

    def name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _read(self, path: Path) -> bytes | None:
        """The content of a file; None if it is missing or cannot be read."""
        if why := unreadable(path):
            self._problems[self.name(path)] = f"{self.name(path)} {why}"
            return None
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:  # of the disk
            self._problems[self.name(path)] = f"{self.name(path)} cannot be read ({reason(error)})"
            return None


def reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


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
        "task": summary.get("task") or setting(config, "task.name"),
        "model": summary.get("model") or setting(config, "model.source"),
        "algorithm": summary.get("algorithm") or setting(config, "algo.recipe"),
        "seed": summary.get("seed", setting(config, "seed")),
        "steps": max((row["step"] for row in rows), default=summary.get("steps", 0)),
        "steps_planned": parts.status.get("total_steps", planned_steps(config)),
        "warm_start": {"step": last(rows, "sft/step"), "steps": setting(config, "sft.steps")},
        "answers": last(rows, "sampling/answers"),
        "budget": setting(config, "train.budget") or None,
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
    steps, epochs, budget = (setting(config, f"train.{key}") for key in ("steps", "epochs", "budget"))
    return None if epochs or budget else steps


def last(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The last value of a metric that is a finite number."""
    return next((value for row in reversed(rows) if (value := finite(row, metric)) is not None), None)


def setting(tree: Any, key: str) -> Any:
    """The value of a dotted key of the config; None if it is not set."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
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
