"""The files of a run folder, of which some may be damaged, missing or not readable."""

from __future__ import annotations

import io
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
