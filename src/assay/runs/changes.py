"""Settings that differ between two starts of a run: which ones, from what to what, and which of them are refused."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import Any

from assay.config import TrainConfig
from assay.runs import checkpoints
from assay.settings import keys, load_settings, toml_value
from assay.types import UserError

SETTINGS = "config.toml"  # in a run, and a copy in each of its checkpoints
SECTIONS = ("task.", "env.", "lora.")  # fixed for as long as a run lasts, like the model
FIXED = (
    *("eval.final_split", "eval.final_examples", "optim.name"),
    *("algo.refresh_reference", "algo.reference_ema", "algo.critic", "critic.trunk"),
)


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """The settings in which two configs differ, except for the run's name and folder."""
    trees = one.model_dump(), other.model_dump()
    pairs = [(key, *(_value(tree, key) for tree in trees)) for key, _ in keys(TrainConfig)]
    return [key for key, left, right in pairs if left != right and key not in ("name", "runs_dir")]


def describe(before: TrainConfig, after: TrainConfig) -> dict[str, str]:
    """`old -> new` for each setting that differs."""
    return {key: f"{_text(before, key)} -> {_text(after, key)}" for key in differences(before, after)}


def check_fixed(before: TrainConfig, after: TrainConfig, name: str) -> None:
    """Refuse changes that make another experiment of a run."""
    if after.model != before.model:
        raise UserError(
            f"run {name} trains {before.model.source or 'another model'}, not {after.model.source or 'this one'}: "
            "resume without changing the model, or start a new run"
        )
    for key, change in describe(before, after).items():
        if key.startswith(SECTIONS) or key in FIXED:
            raise UserError(f"run {name} was begun with another {key} ({change}): start a new run to change it")


def run_settings(run_path: Path) -> TrainConfig:
    """The settings in a run's folder; where they cannot be read, the error names the copy in the last checkpoint."""
    try:
        return load_settings(TrainConfig, run_path / SETTINGS, {})
    except UserError as error:
        last = checkpoints.last(run_path)
        if last is None or saved_settings(run_path, last) is None:
            raise
        copy = checkpoints.folder(run_path, last) / SETTINGS
        raise UserError(f"{error}; to restore the settings of step {last}, copy {copy} over it") from error


def saved_settings(run_path: Path, step: int) -> TrainConfig | None:
    """The settings that a checkpoint was saved with; None where they are damaged or the checkpoint has none."""
    folder = checkpoints.folder(run_path, step)
    if not (folder / SETTINGS).is_file() or checkpoints.problems(folder, SETTINGS):
        return None
    try:
        return load_settings(TrainConfig, folder / SETTINGS, {})
    except UserError:  # of a version with other settings
        return None


def since_checkpoint(cfg: TrainConfig, run_path: Path, step: int) -> list[str]:
    """One line for each setting that differs from those of the checkpoint; fixed ones are refused."""
    saved = saved_settings(run_path, step)
    if saved is None:
        return []
    try:
        check_fixed(saved, cfg, run_path.name)
    except UserError as error:
        copy = checkpoints.folder(run_path, step) / SETTINGS
        raise UserError(f"{error}; if {SETTINGS} was changed by accident, restore it from {copy}") from error
    return [f"{key} changed since step {step}: {change}" for key, change in describe(saved, cfg).items()]


def _value(tree: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None where it is unset and left to something else, such as the recipe."""
    *sections, name = key.split(".")
    return reduce(dict.__getitem__, sections, tree).get(name)


def _text(cfg: TrainConfig, key: str) -> str:
    value = _value(cfg.model_dump(), key)
    return "unset" if value is None else toml_value(value)
