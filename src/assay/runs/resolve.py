"""Names of checkpoints (`run:NAME`, `run:NAME@STEP`, `run:NAME@last`, `run:NAME@best`), and settings of runs.

A resumed run may change most settings: `check_fixed` refuses the others, `changes_since_checkpoint` reports the rest.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from assay.config import LoopConfig, TrainConfig
from assay.config.settings import keys, load_settings, toml_value
from assay.runs import checkpoints
from assay.runs.directory import Run, access_problem, is_run, list_runs, setting
from assay.types import UserError, hide_credentials, plural, unknown_name

PREFIX = "run:"
MODEL = "model"  # in a checkpoint
ATTEMPTS = 10  # to load a checkpoint of a run in progress, which deletes older checkpoints
T = TypeVar("T")


def resolve_model(source: str, runs_dir: Path) -> str:
    """The model folder of a `run:` name (without a tag: of the last checkpoint); other sources are returned unchanged.

    Folders of a run are verified by checksum.
    """
    if not source.startswith(PREFIX):
        checkpoints.verify(Path(source).expanduser())
        return source
    name, tag = split_tag(source.removeprefix(PREFIX))
    run_path = find_run(name, runs_dir)
    while True:
        step = _step_of(run_path, source, tag or "last")
        model = checkpoints.folder(run_path, step) / MODEL
        damage, has_model = checkpoints.problems(model.parent, MODEL), model.is_dir()
        if model.parent.exists():  # else a run in progress has just deleted it, and there is a newer one
            break
    if damage:
        intact = _nearest_intact(run_path, step)
        remedy = "restore it from a backup" if intact is None else f"use {PREFIX}{name}@{intact}, which is intact"
        raise UserError(f"{source}: {damage[0]}; {remedy}")
    if not has_model:
        raise UserError(f"{source}: the checkpoint {model.parent} has no model folder; choose another step")
    return str(model)


def load_resolved(source: str, runs_dir: Path, load: Callable[[str], T]) -> T:
    """Return `load(folder)` for the model folder of `source`, loaded from a single complete checkpoint.

    A run in progress deletes older checkpoints. If that happens while one of them is loaded, the newer one is loaded.
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
                return loaded  # a checkpoint is renamed before its files are deleted: nothing was missing
    raise UserError(f"{source} was deleted while it was read, {ATTEMPTS} times: name a step that is kept, or @best")


def _identity(source: str) -> int | None:
    """Inode of a folder, which distinguishes it from a later one of the same name; None if there is none."""
    with suppress(OSError):
        return Path(source).stat().st_ino
    return None


def split_tag(text: str) -> tuple[str, str]:
    """Split NAME@TAG at the last @; the tag is empty without one."""
    name, at, tag = text.rpartition("@")
    return (name, tag) if at else (text, "")


def find_run(name: str, runs_dir: Path) -> Path:
    """A run by its name in `runs_dir`, or by its path."""
    for path in (runs_dir / name, Path(name)):
        if name and is_run(path):
            return path
        if problem := access_problem(path) or access_problem(runs_dir):
            raise UserError(problem)
        if name and (copy := saved_copy(path)):
            raise UserError(
                f"{path} has no {SETTINGS}: copy {copy} to {path / SETTINGS}, the settings of its last checkpoint"
            )
    names = [run.name for run in list_runs(runs_dir)]
    if not names:
        raise UserError(f"unknown run '{name}': {runs_dir} has no runs yet; `assay train` creates one")
    raise unknown_name("run", name, names, where=f"in {runs_dir}", listed=names[-5:])


def run_argument(path: Path) -> str:
    """The name of a run in the default folder, or its path, as an argument for a shell."""
    return path.name if path.parent == Path("runs") else shlex.quote(str(path))


def resume_command(path: Path) -> str:
    return f"assay train --resume {run_argument(path)}"


def saved_copy(path: Path) -> Path | None:
    """The settings in the last checkpoint of a run whose config.toml is missing; None if there are none."""
    last = checkpoints.last(path)
    copy = None if last is None else checkpoints.folder(path, last) / SETTINGS
    return copy if copy is not None and copy.is_file() else None


def _step_of(run_path: Path, source: str, tag: str) -> int:
    available = checkpoints.all_steps(run_path)  # including damaged ones, which are refused and not silently replaced
    if not available:
        raise UserError(f"{source}: run {run_path} has no checkpoint yet; wait for one, or lower save.every")
    listed = ", ".join(map(str, available))
    if tag == "last":
        return available[-1]
    if tag == "best":
        # Twice: a run in progress may change both while best.json and the checkpoint are read.
        best = checkpoints.read_best(run_path) or checkpoints.read_best(run_path)
        if best is None:
            raise UserError(
                f"{source}: no best checkpoint is recorded in {run_path} (eval.every = 0 during training), or it is "
                f"damaged; use @last or a step of {listed}"
            )
        return int(best["step"])
    if not tag.isdecimal():
        raise UserError(f"{source}: after @ comes a step, last or best, not '{tag}'; available steps: {listed}")
    if int(tag) not in available:
        raise UserError(f"{source}: there is no checkpoint of step {tag}; available steps: {listed}")
    return int(tag)


def _nearest_intact(run_path: Path, step: int) -> int | None:
    """The newest earlier checkpoint with an intact model, else the next later one."""
    others = sorted(set(checkpoints.all_steps(run_path)) - {step}, key=lambda other: (other > step, abs(other - step)))
    return next((s for s in others if not checkpoints.problems(checkpoints.folder(run_path, s), MODEL)), None)


SETTINGS = "config.toml"  # in a run, and a copy in each of its checkpoints
SECTIONS = ("task.", "env.", "lora.")  # cannot be changed on resume, like the model
FIXED = (
    *("eval.final_split", "eval.final_examples", "optim.name"),
    *("algo.refresh_reference", "algo.reference_ema", "algo.critic", "critic.trunk"),
)


def differences(first: TrainConfig, second: TrainConfig) -> list[str]:
    """The settings in which two configs differ, except for name and folder of the run.

    An automatic token budget (0) equals any other: the settings of a run contain the one that was chosen.
    """
    same = {"name", "runs_dir"}
    if not (first.train.token_budget and second.train.token_budget):
        same.add("train.token_budget")
    trees = first.model_dump(), second.model_dump()
    pairs = [(key, *(setting(tree, key) for tree in trees)) for key, _ in keys(TrainConfig)]
    return [key for key, left, right in pairs if left != right and key not in same]


def describe_changes(before: TrainConfig, after: TrainConfig) -> dict[str, str]:
    """`old -> new` for each setting that differs."""
    return {key: f"{_text(before, key)} -> {_text(after, key)}" for key in differences(before, after)}


def check_fixed(before: TrainConfig, after: TrainConfig, name: str) -> None:
    """Raise if settings have changed that cannot be changed on resume."""
    if after.model != before.model:
        raise UserError(
            f"run {name} trains {before.model.source or 'another model'}, not {after.model.source or 'this one'}: "
            "resume without changing the model, or start a new run"
        )
    for key, change in describe_changes(before, after).items():
        if key.startswith(SECTIONS) or key in FIXED:
            raise UserError(f"run {name} was started with another {key} ({change}): start a new run to change it")


def is_complete(path: Path, before: LoopConfig, now: LoopConfig) -> bool:
    """Whether a run is finished and has no more steps to train. False if its last checkpoint is damaged: resuming
    repeats its steps.

    `before`, `now`: its settings as they were, and as they are now.
    """
    run = Run.open(path)
    summary = run.read_summary()
    if not summary or run.state != "finished" or checkpoints.last_intact(path) != (summary.get("steps"), []):
        return False
    if 0 < now.stop_early <= summary.get("stop_early", {}).get("evaluations", 0):
        return True
    if now.epochs and not now.budget:  # whether there are more steps depends on the number of problems
        return now == before
    done = summary.get("answers" if now.budget else "steps", 0)
    return bool(done >= (now.budget or now.steps))


def describe_finished(path: Path, before: LoopConfig, now: LoopConfig) -> str:
    """For a run that has no more steps to train: what it has done, and how to extend it. Empty for other runs, and if
    the last checkpoint is damaged: resuming repeats its steps.

    `before`, `now`: its settings as they were, and as they are with the options of this command.
    """
    if not is_complete(path, before, now):
        return ""
    name, summary = run_argument(path), Run.open(path).read_summary()
    steps = int(summary.get("steps", 0))
    if now.stop_early and "stopped_early" in summary:
        return (
            f"run {path.name} is finished ({plural(steps, 'step')}; {summary['stopped_early']}), and there is nothing "
            f"to resume; to train longer: assay train --resume {name} --train.stop_early 0"
        )
    if not (now.steps or now.epochs or now.budget):
        return f"run {path.name} is finished: to train the model further, start a run with --model run:{name}@last"
    key = "budget" if now.budget else "epochs" if now.epochs else "steps"
    planned = getattr(now, key)
    return (
        f"run {path.name} is finished ({plural(steps, 'step')}), and there is nothing to resume; "
        f"to train longer: assay train --resume {name} --train.{key} {planned * 2:g}"
    )


def run_settings(run_path: Path) -> TrainConfig:
    """The settings of a run. If they cannot be read, the error names the copy in the last checkpoint."""
    try:
        return load_settings(TrainConfig, run_path / SETTINGS, {})
    except UserError as error:
        last = checkpoints.last(run_path)
        if last is None or saved_settings(run_path, last) is None:
            raise
        copy = checkpoints.folder(run_path, last) / SETTINGS
        raise UserError(f"{error}; to restore the settings of step {last}, copy {copy} over it") from error


def saved_settings(run_path: Path, step: int) -> TrainConfig | None:
    """The settings that a checkpoint was saved with; None if they are damaged or missing."""
    folder = checkpoints.folder(run_path, step)
    if not (folder / SETTINGS).is_file() or checkpoints.problems(folder, SETTINGS):
        return None
    try:
        return load_settings(TrainConfig, folder / SETTINGS, {})
    except UserError:  # of a version with other settings
        return None


def changes_since_checkpoint(cfg: TrainConfig, run_path: Path, step: int) -> list[str]:
    """One line for each setting that differs from the checkpoint. Raises if it cannot be changed on resume."""
    saved = saved_settings(run_path, step)
    if saved is None:
        return []
    try:
        check_fixed(saved, cfg, run_path.name)
    except UserError as error:
        copy = checkpoints.folder(run_path, step) / SETTINGS
        raise UserError(f"{error}; if {SETTINGS} was changed by accident, restore it from {copy}") from error
    return [f"{key} changed since step {step}: {change}" for key, change in describe_changes(saved, cfg).items()]


def _text(cfg: TrainConfig, key: str) -> str:
    value = setting(cfg.model_dump(), key)  # None if it is determined by something else, such as the recipe
    return "unset" if value is None else hide_credentials(toml_value(value))
