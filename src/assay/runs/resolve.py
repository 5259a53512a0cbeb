"""`run:NAME`, `run:NAME@STEP`, `run:NAME@last`, `run:NAME@best`: a run's checkpoint, wherever a model is named."""

from __future__ import annotations

import difflib
from pathlib import Path

from assay.runs import checkpoints
from assay.runs.directory import list_runs
from assay.types import UserError

PREFIX = "run:"


def resolve_model(source: str, runs_dir: Path) -> str:
    """The model folder behind a `run:` name (without a tag: the last checkpoint); any other source as it is."""
    if not source.startswith(PREFIX):
        return source
    name, tag = split_tag(source.removeprefix(PREFIX))
    run_path = find_run(name, runs_dir)
    model = checkpoints.folder(run_path, _step_of(run_path, source, tag or "last")) / "model"
    if not model.is_dir():
        raise UserError(f"{source}: the checkpoint {model.parent} holds no model folder; choose another step")
    return str(model)


def split_tag(text: str) -> tuple[str, str]:
    """NAME and what follows the last @, if anything does."""
    name, at, tag = text.rpartition("@")
    return (name, tag) if at else (text, "")


def find_run(name: str, runs_dir: Path) -> Path:
    """A run by its name in `runs_dir`, or by its path."""
    for path in (runs_dir / name, Path(name)):
        if name and (path / "config.toml").is_file():
            return path
    there = [run.name for run in list_runs(runs_dir)]
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.5) or there[-5:]
    hint = f"did you mean {', '.join(near)}?" if near else "there are none yet, `assay train` makes one"
    raise UserError(f"no run '{name}' in {runs_dir}: {hint}")


def _step_of(run_path: Path, source: str, tag: str) -> int:
    there = checkpoints.steps(run_path)
    if not there:
        raise UserError(f"{source}: run {run_path} has no checkpoint yet; let it run on, or set save.every lower")
    listed = ", ".join(map(str, there))
    if tag == "last":
        return there[-1]
    if tag == "best":
        best = checkpoints.read_best(run_path)
        if best is None:
            raise UserError(f"{source}: no best checkpoint is recorded in {run_path}; use @last or a step of {listed}")
        return int(best["step"])
    if not tag.isdecimal():
        raise UserError(f"{source}: after @ comes a step, last or best, not '{tag}'; steps there: {listed}")
    if int(tag) not in there:
        raise UserError(f"{source}: there is no checkpoint of step {tag}; steps there: {listed}")
    return int(tag)
