"""The evaluations of step 0, which the end of a run compares with: read from disk, or measured again.

Their files can get lost or damaged while a run trains for days. That must not keep it from finishing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from assay.evals.report import Report
from assay.models import load_model
from assay.runs import checkpoints, rollouts
from assay.runs.resolve import MODEL
from assay.train.sync import sync_weights
from assay.types import UserError

if TYPE_CHECKING:
    from assay.train.stages import Parts


def first_report(parts: Parts, after: Report, measure: Callable[[], object]) -> Report | None:
    """The evaluation "before", on the problems of `after`. None, with a warning, where it is lost for good.

    `measure` evaluates and writes the file anew. It is called with the weights of step 0 in the engine, on all ranks.
    """
    split = f"before-{parts.cfg.eval.final_split}"
    report, problem = parts.mesh.on_main(lambda: read_report(parts.run.path, split, after.ids))
    if not problem:
        return report
    start = checkpoints.folder(parts.run.path, 0)
    # Without reinforcement, the checkpoint of step 0 is the end of the warm start.
    if not parts.total_steps or parts.mesh.on_main(lambda: checkpoints.problems(start, MODEL)):
        parts.console.warn(f"{problem} and cannot be measured again: finishing without the paired test")
        return None
    parts.console.warn(f"{problem}: measuring it again with the weights of step 0")
    engine, cfg = parts.collector.engine, parts.cfg.model
    model = load_model(str(start / MODEL), device="cpu", trust_remote_code=cfg.trust_remote_code)
    sync_weights(model, engine, version=0)
    measure()
    sync_weights(parts.updater.policy, engine, version=parts.state.step)
    return parts.mesh.on_main(lambda: read_report(parts.run.path, split, after.ids))[0]


def read_report(run_path: Path, split: str, ids: list[str]) -> tuple[Report | None, str]:
    """The report of an evaluation of step 0, or what is wrong with its file."""
    path = rollouts.rollout_path(run_path, 0, "eval", split)
    if not path.is_file():
        return None, f"{path} is missing"
    if not checkpoints.evaluation_intact(run_path, path):
        return None, f"{path} is damaged"
    try:
        report = Report.read(rollouts.read_lines(run_path, 0, "eval", split))
    except (UserError, ValueError, KeyError, TypeError):
        return None, f"{path} is damaged"
    return (report, "") if report.ids == ids else (None, f"{path} is of other problems")


def was_measured(run_path: Path, split: str) -> bool:
    """Whether there is, or was, such an evaluation of step 0."""
    path = rollouts.rollout_path(run_path, 0, "eval", split)
    return path.is_file() or path.name in checkpoints.first_evaluations(run_path)
