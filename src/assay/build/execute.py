"""How a run ends: errors as one line with the call that resumes it, stop requests, updates that were all skipped."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from assay.build.run import resume_run
from assay.build.trust import extend_trust
from assay.config import TrainConfig
from assay.config.settings import to_toml
from assay.runs import Run, checkpoints
from assay.runs.console import Console, is_distributed, is_main
from assay.runs.directory import read_metrics
from assay.runs.files import disk_error, read_json, write_text
from assay.runs.metrics import non_finite_terms
from assay.training.run import TrainingRun
from assay.types import UserError

# Messages of gloo and NCCL after another process has ended.
LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|timed out|NCCL|remote process", re.I)


@contextmanager
def reopened(path: Path, before: TrainConfig, cfg: TrainConfig, console: Console) -> Iterator[TrainingRun]:
    """Resume a run with the settings `cfg`, and store them in its config.toml. `before`: its previous settings."""
    with Run.open(path, write=is_main()) as opened:
        resumed = resume_run(cfg, opened, console)
        if is_main():
            write_text(path / "config.toml", to_toml(resumed.cfg))
            extend_trust(before, resumed.cfg)
        yield resumed


@contextmanager
def carried_out(training: TrainingRun, console: Console, resume: Callable[[TrainingRun], str]) -> Iterator[None]:
    """Hold the resources of a run during the block, and explain how it ended if that was not as planned.

    `resume`: what the user writes to resume the run.
    """
    try:
        with training.active():
            yield
    except KeyboardInterrupt as stop:
        console.stop()
        console.note(describe_stop(training, resume(training)))
        if is_distributed() and not getattr(stop, "at_once", True):
            # The launcher ends all processes when the first one exits: wait, so that they keep their exit codes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            training.mesh.close()
        raise
    except Exception as error:
        if is_lost_peer(error):
            raise UserError(
                f"rank {os.environ['RANK']} lost another process, which has ended or hangs ({str(error)[:200]}): "
                f"see the output of that process; resume with: {resume(training)}"
            ) from error
        problem = disk_error(error)
        if problem is None and isinstance(error, OSError):
            problem = f"reading or writing failed ({error})", "fix this"
        if isinstance(error, UserError) or problem is None:
            raise
        what, remedy = problem
        raise UserError(f"{what}: {remedy} and resume with: {resume(training)} (checkpoints are intact)") from error
    finally:
        console.stop()


def check_updates(training: TrainingRun) -> None:
    """Raise if a complete run has changed no weights because of values that were not finite."""
    path = training.path
    rows = read_metrics(path)
    if every_update_skipped(rows):
        remedy = "lower optim.lr, set dtype = 'float32', or check custom weights, rewards, advantages or losses"
        if terms := non_finite_terms(next(row for row in reversed(rows) if "optim/updates" in row)):
            remedy = "fix it"
        raise UserError(
            f"the run is complete, but every update was skipped, because {terms or 'the loss or the gradient'} was not "
            f"finite; its batches are saved in {path / 'skipped'}: {remedy}, and start a new run"
        )


def every_update_skipped(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run has changed no weights because of values that were not finite. `rows`: its metrics."""
    updates, skipped, faults = (
        sum(row.get(f"optim/{name}", 0.0) for row in rows if "optim/updates" in row)
        for name in ("updates", "skipped", "non_finite")
    )
    return faults > 0 and skipped == updates


def describe_stop(training: TrainingRun, resume: str) -> str:
    """What a stopped run has saved, and how to resume it."""
    path, total = training.path, training.schedule.total_steps
    saved = checkpoints.last(path)
    if saved is None:
        return f"stopped before the first checkpoint; to start this run again from the beginning: {resume}"
    sft_step = read_json(checkpoints.folder(path, saved) / "state.json").get("sft_step")
    where = f"step {sft_step} of {training.cfg.sft.steps} of the warm start" if sft_step else f"step {saved} of {total}"
    return f"stopped; saved after {where}; to resume from there: {resume}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another process has ended."""
    return is_distributed() and isinstance(error, RuntimeError) and bool(LOST.search(str(error)))
