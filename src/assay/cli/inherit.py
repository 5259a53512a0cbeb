"""What a run's checkpoint brings along when it is named as a model: the run's own settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.config import TrainConfig
from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.settings import load_settings

SECTIONS = ("task", "env", "prompt", "reward", "eval")


def inherited_settings(models: Sequence[str], runs_dir: Path) -> dict[str, Any]:
    """The settings of these sections of the first model that is a run's checkpoint, as dotted overrides."""
    for model in models:
        if model.startswith(PREFIX):
            name, _ = split_tag(model.removeprefix(PREFIX))
            cfg = load_settings(TrainConfig, find_run(name, runs_dir) / "config.toml", {})
            tree = cfg.model_dump()
            for key in ("max_new_tokens", "stop"):
                tree["eval"][key] = tree["eval"][key] or tree["sampling"][key]
            found = {f"{s}.{key}": value for s in SECTIONS for key, value in tree[s].items()}
            return found | {"seed": tree["seed"], "model.max_length": tree["model"]["max_length"]}
    return {}
