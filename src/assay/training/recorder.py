"""Output of a run: evaluations, metrics, rollout files, batches of skipped updates, console and trackers.

If the file of a first evaluation is lost or damaged, the run still finishes: the evaluation is repeated with the
weights of step 0, or left out of the summary with a warning.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from assay.algos import Algorithm
from assay.checks import Diagnosis, diagnose, remember
from assay.checks.diagnosis import diagnose_files, record_speed, with_examples
from assay.checks.steps import truncated_evaluation
from assay.config import TrainConfig
from assay.engine.base import Capabilities
from assay.evals import Report, compare, evaluate
from assay.mesh import Mesh
from assay.models import PolicyModel, load_model
from assay.models.device import gpu_memory_use
from assay.rollout import Collector, sampling_params
from assay.runs import Run, checkpoints, rollouts
from assay.runs.console import Console
from assay.runs.directory import RunFiles, read_metrics
from assay.runs.resolve import MODEL
from assay.runs.trackers import Trackers
from assay.system.memory import host_memory_use
from assay.training.learner.update import Fault, dump_batch
from assay.training.progress import RunState
from assay.training.sources import SampledGroups
from assay.training.sync import sync_weights
from assay.types import TASK_LABEL, Group, Prompt, Rollout, UserError

CURVES_PAUSE_S = 30.0  # minimum seconds between two drawings of curves.png at evaluations


@dataclass
class Recorder:
    """Writes the files of a run directory. With several ranks, all call the methods, and the main rank writes."""

    cfg: TrainConfig
    directory: Run
    console: Console
    mesh: Mesh
    judge_warnings: dict[str, Callable[[], str]]  # by metric: shown once, when judging fails or times out
    started: float  # `time.perf_counter` at the start of the run, minus the seconds of earlier sessions
    trackers: Trackers = field(default_factory=Trackers)
    step_started: float = field(default_factory=time.perf_counter)
    curves_due: float = field(default_factory=lambda: time.perf_counter() + CURVES_PAUSE_S)  # at the next evaluation
    history: list[Mapping[str, Any]] = field(default_factory=list)  # metrics of the steps that `diagnose` needs
    reported: set[str] = field(default_factory=set)  # names of causes that were shown, also by earlier sessions

    @property
    def path(self) -> Path:
        return self.directory.path

    def open(self) -> None:
        """Record the number of threads, and open the trackers: when the run directory exists."""
        if self.mesh.is_main:
            self.directory.record_threads(torch.get_num_threads())
            self.trackers = Trackers.start(self.cfg.log, self.directory, self.console.warn)

    def log(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl, and the same metrics to console and trackers."""
        state.wall_s = time.perf_counter() - self.started
        metrics = {**metrics, "time/wall": state.wall_s, "sampling/answers": float(state.answers)}
        if self.mesh.is_main:
            self.directory.log(state.step, metrics)
        self.console.step(state.step, metrics)
        for name in [name for name in self.judge_warnings if metrics.get(name)]:
            self.console.warn(self.judge_warnings.pop(name)())
        self.trackers.log(state.step, metrics)
        if self.mesh.is_main and "reward/mean" in metrics:
            self._warn_if_it_cannot_learn(state.step, metrics)

    def _warn_if_it_cannot_learn(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show each cause once, as soon as there is enough evidence."""
        if not self.history and step > 1:  # resumed; the file already contains this step
            for row in read_metrics(self.path):
                if row["step"] == step:  # causes of the steps before were shown by the session before
                    self.reported = {cause.name for cause in diagnose(self.history, self.settings)}
                remember(self.history, row)
        else:
            remember(self.history, {"step": step, **metrics})
        for cause in diagnose(self.history, self.settings):
            if cause.name not in self.reported:
                self.reported.add(cause.name)
                self.console.warn(str(cause))
                for text in with_examples(cause, RunFiles(self.path)).examples:
                    self.console.note(f"  e.g. {text}")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings as the rules of diagnosis read them."""
        return self.cfg.model_dump()

    def diagnose(self, summary: Mapping[str, Any]) -> list[Diagnosis]:
        """What has kept the finished run from learning or harmed it. The overlap of splits was checked at the start."""
        rows = read_metrics(self.path)
        files = RunFiles(self.path)
        causes = diagnose_files(files, rows, self.settings, summary, leakage=False)
        record_speed(files, rows, self.settings)
        return causes

    def log_warm_start(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.mesh.is_main:
            self.directory.log(0, {"sft/step": step, **metrics})
        self.console.step(step, metrics)
        self.trackers.log(step, metrics)  # metrics of the warm start have names of their own: steps do not collide

    def write_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.trackers.log_rollouts(step, groups)
        count = self.cfg.save.rollouts
        if count and self.mesh.is_main:
            rollouts.write_rollouts(self.path, step, groups)
            if count > 0:
                rollouts.prune(self.path, count)

    def dump_faults(self, state: RunState, batch: Sequence[Group], step_faults: Sequence[Fault]) -> None:
        """Count consecutive steps with an update that was not finite, and keep their batches for inspection."""
        state.skipped = state.skipped + 1 if step_faults else 0
        if step_faults and self.mesh.is_main:
            dump_batch(self.path, state.step, batch, step_faults)

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Whether `metrics` contain a periodic evaluation that is the best so far. The test split is never used."""
        if "eval/accuracy" not in metrics or self.cfg.eval.split == "test":
            return False
        best = self.mesh.broadcast_object(checkpoints.read_best(self.path))
        return best is None or metrics["eval/accuracy"] > best["value"]

    def training_seconds(self) -> float:
        """Seconds of all steps, excluding evaluations."""
        rows = [row for row in read_metrics(self.path) if "time/step" in row]
        return sum(row["time/step"] - row.get("time/eval", 0.0) for row in rows)


def rollout_metrics(sampled: SampledGroups, algo: Algorithm, engine: Capabilities) -> dict[str, float]:
    """Metrics of the rollouts of a step: rewards, lengths, verdicts, sampling. Metrics that the engine does not report
    are left out.
    """
    groups = sampled.all_groups
    answers = [rollout for group in groups for rollout in group.rollouts]
    count = len(answers)
    statuses = Counter(str(r.verdict.status) for r in answers if r.verdict)
    known = [r.reward for r in answers if not r.failed] or [0.0]  # rewards of answers that were judged
    mean = sum(known) / len(known)
    completions = [turn.completion for r in answers for turn in r.turns]
    lengths = [r.length for r in answers]
    masked = sum(turn.masked for r in answers for turn in r.turns)
    kept_mass = sum(c.kept_mass or 0.0 for c in completions) / len(completions)
    truncation_kl = sum(sum(c.sampling_logprobs) - sum(c.engine_logprobs) for c in completions) / sum(lengths)
    entropy = sum((c.entropy or 0.0) * len(c.token_ids) for c in completions) / sum(lengths)
    judged = [r.verdict.reward for r in answers if r.verdict and not r.failed] or [0.0]
    greedy = [group.baseline for group in sampled.groups if group.baseline is not None]
    return {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in known) / len(known)) ** 0.5,
        "reward/range": max(judged) - min(judged),
        "reward/correct": statuses["ok"] / count,
        "advantage/zero": sum(not r.learns for r in answers) / count,
        "groups/zero_variance": sum(map(algo.zero_variance.matches, groups)) / len(groups),
        "groups/dropped": float(len(sampled.dropped)),
        **({"prompts/too_long": float(sampled.long_prompts)} if sampled.long_prompts else {}),
        "turns/mean": sum(len(r.turns) for r in answers) / count,
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths)),
        "length/truncated": sum(r.truncated for r in answers) / count,
        **({"sampling/kept_mass": kept_mass} if engine.kept_mass else {}),
        **({"sampling/truncation_kl": truncation_kl} if truncation_kl else {}),
        "sampling/logprob": sum(sum(c.engine_logprobs) for c in completions) / sum(lengths),
        **({"sampling/entropy": entropy} if engine.entropy else {}),
        **{f"status/{status}": number / count for status, number in sorted(statuses.items())},
        **reward_parts(answers),
        **task_metrics(answers),
        **({"reward/greedy": sum(greedy) / len(greedy)} if greedy else {}),
        **({"turns/masked": masked / len(completions)} if masked else {}),
        **sampled.metrics,
        **{f"time/{part}": seconds for part, seconds in sampled.seconds.items()},
        **({"time/tokens_per_s": sum(lengths) / generate_s} if (generate_s := sampled.seconds.get("generate")) else {}),
    }


def reward_parts(answers: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each component of the reward before weighting, over the answers that have it."""
    parts: dict[str, list[float]] = {}
    for rollout in answers:
        for name, value in rollout.verdict.parts.items() if rollout.verdict else ():
            parts.setdefault(name, []).append(value)
    return {f"parts/{name}": sum(values) / len(values) for name, values in sorted(parts.items())}


def task_metrics(answers: Sequence[Rollout]) -> dict[str, float]:
    """Mean reward and accuracy of each task, if several tasks are mixed."""
    tasks: dict[str, list[Rollout]] = {}
    for rollout in answers:
        if label := rollout.prompt.fields.get(TASK_LABEL):
            tasks.setdefault(label, []).append(rollout)
    metrics: dict[str, float] = {}
    for label, task_rollouts in sorted(tasks.items()):
        known = [rollout.reward for rollout in task_rollouts if not rollout.failed] or [0.0]
        metrics[f"task/{label}/reward"] = sum(known) / len(known)
        correct = [r.verdict is not None and r.verdict.correct for r in task_rollouts]
        metrics[f"task/{label}/correct"] = sum(correct) / len(correct)
    return metrics


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Fractions of the memory in use: of the GPU, at the peak of this process so far; of main memory, now."""
    used = {"memory/gpu": gpu_memory_use(device), "memory/host": host_memory_use()}
    return {name: fraction for name, fraction in used.items() if fraction is not None}


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
        if self.cfg.train.deterministic:
            self.collector.engine.reset_prefix_cache()  # as in a resumed run
        report, groups = evaluate(self.collector, self.prompts[label], params, self.cfg.seed)
        if self.collector.mesh.is_main:
            rollouts.write_rollouts(self.directory.path, step, groups, "eval", split=f"{label}-{split}")
        summary = report.summary()
        cause = truncated_evaluation(summary["truncated"], params.max_new_tokens)
        if cause and label in ("start", "before"):  # later, it is reported with the steps
            self.console.warn(f"evaluation {label} training: {cause}")
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

        `repeatable`: whether the evaluation "before" used the weights in the checkpoint of step 0.
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
        name = f"start-{split}"
        file = rollouts.rollout_path(path, 0, "eval", name)
        measured = self.collector.mesh.is_main and (file.is_file() or file.name in checkpoints.first_evaluations(path))
        if before and measured:
            start, problem = read_report(path, name, before.ids)
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
