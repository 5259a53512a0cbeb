"""Evaluations of a run: periodic ones, those before and after training, and their comparison.

If the file of a first evaluation is lost or damaged, the run still finishes: the evaluation is repeated with the
weights of step 0, or left out of the summary with a warning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.config import TrainConfig
from assay.evals.report import Report, compare, evaluate
from assay.models import PolicyModel, load_model
from assay.rollout import Collector, sampling_params
from assay.runs import Run, checkpoints, rollouts
from assay.runs.console import Console
from assay.runs.resolve import MODEL
from assay.training.sync import sync_weights
from assay.types import Prompt, UserError


@dataclass
class RunEvaluator:
    """Evaluates the weights that the engine serves, and writes the answers to the run directory.

    The label of an evaluation says when it takes place: `eval` during training, on `eval.split`; `start` before a warm
    start, `before` and `after` training, on `eval.final_split`.
    """

    cfg: TrainConfig
    collector: Collector
    prompts: Mapping[str, Sequence[Prompt]]  # by label
    directory: Run
    console: Console

    def measure(self, label: str, step: int) -> dict[str, float]:
        """Evaluate, write the answers to the files of `step`, and return metrics."""
        split, started = self.cfg.eval.split_of(label), time.perf_counter()
        params = sampling_params(self.cfg.eval, self.cfg.eval.samples, self.cfg.sampling)
        report, groups = evaluate(self.collector, self.prompts[label], params, self.cfg.seed)
        if self.collector.mesh.is_main:
            rollouts.write_rollouts(self.directory.path, step, groups, "eval", split=f"{label}-{split}")
        summary = report.summary()
        return {
            f"{label}/accuracy": report.accuracy,
            f"{label}/low": summary["ci95"][0],
            f"{label}/high": summary["ci95"][1],
            f"{label}/length": summary["mean_length"],
            f"{label}/truncated": summary["truncated"],
            f"{label}/format": summary["format"],
            "time/eval": time.perf_counter() - started,
            **{f"{label}/accuracy/{task}": part["accuracy"] for task, part in summary.get("by_task", {}).items()},
            **{f"{label}/pass@{k}": value for k, value in summary.get("pass_at_k", {}).items()},
            **{f"{label}/majority@{k}": value for k, value in summary.get("majority_at_k", {}).items()},
        }

    def results(self, policy: PolicyModel, step: int, repeatable: bool) -> dict[str, Any]:
        """Compare the evaluation after `step` steps with the first ones, for the summary.

        `repeatable`: whether the weights of the evaluation "before" are those of the checkpoint of step 0.
        """
        path, split = self.directory.path, self.cfg.eval.final_split
        lines = self.collector.mesh.on_main(lambda: rollouts.read_lines(path, step, "eval", f"after-{split}"))
        after = Report.read(lines)
        before = self._first_report(after.ids, policy, step, repeatable)
        results: dict[str, Any] = {
            "before": before.summary() if before else None,
            "after": after.summary(),
            "paired": asdict(compare(before, after)) if before else None,
        }
        if before and self.collector.mesh.is_main and was_measured(path, f"start-{split}"):
            start, problem = read_report(path, f"start-{split}", before.ids)
            if problem:
                self.console.warn(f"{problem}: finishing without the comparison with the model before its warm start")
            if start:
                results["warm_start"] = {"before": start.summary(), "paired": asdict(compare(start, before))}
        return results

    def _first_report(self, ids: list[str], policy: PolicyModel, step: int, repeatable: bool) -> Report | None:
        """The evaluation "before" on the problems `ids`, repeated if its file is lost. None if that is impossible."""
        path, name = self.directory.path, f"before-{self.cfg.eval.final_split}"
        report, problem = self.collector.mesh.on_main(lambda: read_report(path, name, ids))
        if not problem:
            return report
        start = checkpoints.folder(path, 0)
        if not repeatable or self.collector.mesh.on_main(lambda: checkpoints.problems(start, MODEL)):
            self.console.warn(f"{problem} and cannot be repeated: finishing without the paired test")
            return None
        self.console.warn(f"{problem}: repeating the evaluation with the weights of step 0")
        trust = self.cfg.model.trust_remote_code
        first = load_model(str(start / MODEL), device="cpu", trust_remote_code=trust)
        sync_weights(first, self.collector.engine, 0, self.collector.mesh)
        self.measure("before", step=0)
        sync_weights(policy, self.collector.engine, step, self.collector.mesh)
        return self.collector.mesh.on_main(lambda: read_report(path, name, ids))[0]


def read_report(run_path: Path, split: str, ids: list[str]) -> tuple[Report | None, str]:
    """The report of an evaluation at step 0, or what is wrong with its file."""
    path = rollouts.rollout_path(run_path, 0, "eval", split)
    if not path.is_file():
        return None, f"{path} is missing"
    if not checkpoints.evaluation_intact(run_path, path):
        return None, f"{path} is damaged"
    try:
        report = Report.read(rollouts.read_lines(run_path, 0, "eval", split))
    except (UserError, ValueError, KeyError, TypeError):
        return None, f"{path} is damaged"
    return (report, "") if report.ids == ids else (None, f"{path} has other problems")


def was_measured(run_path: Path, split: str) -> bool:
    """Whether there is, or was, such an evaluation at step 0."""
    path = rollouts.rollout_path(run_path, 0, "eval", split)
    return path.is_file() or path.name in checkpoints.first_evaluations(run_path)
