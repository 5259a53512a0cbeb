"""`run:NAME`, `run:NAME@STEP`, `run:NAME@last`, `run:NAME@best`: a run's checkpoint, wherever a model is named.

Settings that differ between two starts of a run: which ones, from what to what, and which of them are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from assay.config import TrainConfig
from assay.config.settings import keys, load_settings, toml_value
from assay.runs import checkpoints
from assay.runs.directory import list_runs
from assay.types import UserError, unknown_name

PREFIX = "run:"
MODEL = "model"  # in a checkpoint
ATTEMPTS = 10  # to load a checkpoint before a run in progress deletes it
T = TypeVar("T")


def resolve_model(source: str, runs_dir: Path) -> str:
    """The model folder behind a `run:` name (without a tag: the last checkpoint); any other source as it is.

    A folder of a run is verified by checksum: every byte that will be loaded is read once.
    """
    if not source.startswith(PREFIX):
        checkpoints.verify(Path(source).expanduser())
        return source
    name, tag = split_tag(source.removeprefix(PREFIX))
    run_path = find_run(name, runs_dir)
    while True:
        step = _step_of(run_path, source, tag or "last")
        model = checkpoints.folder(run_path, step) / MODEL
        found, has_model = checkpoints.problems(model.parent, MODEL), model.is_dir()
        if model.parent.exists():  # else a run in progress has deleted it just now, and there is a newer one
            break
    if found:
        intact = _nearest_intact(run_path, step)
        remedy = "restore it from a backup" if intact is None else f"use {PREFIX}{name}@{intact}, which is intact"
        raise UserError(f"{source}: {found[0]}; {remedy}")
    if not has_model:
        raise UserError(f"{source}: the checkpoint {model.parent} holds no model folder; choose another step")
    return str(model)


def load_resolved(source: str, runs_dir: Path, load: Callable[[str], T]) -> T:
    """What `load` makes of the model folder behind `source`, from one checkpoint as it was saved.

    A run in progress deletes older checkpoints: where that happens while one of them is loaded, the newer one is taken.
    """
    if not source.startswith(PREFIX):
        return load(resolve_model(source, runs_dir))
    for _ in range(ATTEMPTS):
        path = resolve_model(source, runs_dir)
        before = _identity(path)
        try:
            loaded = load(path)
        except (UserError, OSError):
            if before is not None and _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return loaded  # a checkpoint is renamed before anything in it is deleted: nothing was missing
    raise UserError(f"{source} was deleted while it was read, {ATTEMPTS} times: name a step that is kept, or @best")


def _identity(source: str) -> int | None:
    """Tells a folder from another one of the same name; None where there is none."""
    with suppress(OSError):
        return Path(source).stat().st_ino
    return None


def split_tag(text: str) -> tuple[str, str]:
    """NAME and what follows the last @, if anything does."""
    name, at, tag = text.rpartition("@")
    return (name, tag) if at else (text, "")


def find_run(name: str, runs_dir: Path) -> Path:
    """A run by its name in `runs_dir`, or by its path."""
    for path in (runs_dir / name, Path(name)):
        with suppress(OSError):  # a name that is too long is no run's
            if name and (path / "config.toml").is_file():
                return path
    names = [run.name for run in list_runs(runs_dir)]
    if not names:
        raise UserError(f"unknown run '{name}': {runs_dir} has no runs yet; `assay train` creates one")
    raise unknown_name("run", name, names, where=f"in {runs_dir}", listed=names[-5:])


def _step_of(run_path: Path, source: str, tag: str) -> int:
    there = checkpoints.all_steps(run_path)  # a damaged one is refused, never silently replaced by another
    if not there:
        raise UserError(f"{source}: run {run_path} has no checkpoint yet; let it run on, or set save.every lower")
    listed = ", ".join(map(str, there))
    if tag == "last":
        return there[-1]
    if tag == "best":
        # Twice: between its two looks, at the note and at the checkpoint, a run in progress may change both.
        best = checkpoints.read_best(run_path) or checkpoints.read_best(run_path)
        if best is None:
            raise UserError(
                f"{source}: no best checkpoint is recorded in {run_path}, or it is damaged; "
                f"use @last or a step of {listed}"
            )
        return int(best["step"])
    if not tag.isdecimal():
        raise UserError(f"{source}: after @ comes a step, last or best, not '{tag}'; steps there: {listed}")
    if int(tag) not in there:
        raise UserError(f"{source}: there is no checkpoint of step {tag}; steps there: {listed}")
    return int(tag)


def _nearest_intact(run_path: Path, step: int) -> int | None:
    """The newest earlier checkpoint with an intact model, else the next later one."""
    others = sorted(set(checkpoints.all_steps(run_path)) - {step}, key=lambda other: (other > step, abs(other - step)))
    return next((s for s in others if not checkpoints.problems(checkpoints.folder(run_path, s), MODEL)), None)


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
