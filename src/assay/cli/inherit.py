"""What a run's checkpoint brings along when it is named as a model: the run's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.settings import read_toml

SECTIONS = ("task", "prompt", "reward", "eval")


def inherited_settings(models: Sequence[str], runs_dir: Path) -> dict[str, Any]:
    """Task, prompt, reward and eval settings of the first model that is a run's checkpoint, as dotted overrides."""
    for model in models:
        if model.startswith(PREFIX):
            name, _ = split_tag(model.removeprefix(PREFIX))
            tree = read_toml(find_run(name, runs_dir) / "config.toml")
            tree["eval"]["max_new_tokens"] = tree["eval"]["max_new_tokens"] or tree["sampling"]["max_new_tokens"]
            return {f"{s}.{key}": value for s in SECTIONS for key, value in tree.get(s, {}).items()}
    return {}
