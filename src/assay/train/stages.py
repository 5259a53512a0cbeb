"""The stages of a run that the loop calls: sampling, measuring, logging, saving, beginning and finishing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from assay.algos import Algorithm
from assay.config import TrainConfig
from assay.engine.base import SamplingParams
from assay.evals.evaluate import evaluate
from assay.evals.report import Report, compare
from assay.mesh import Mesh
from assay.models.collectives import gather_back
from assay.rollout import Collector
from assay.runs import Run, checkpoints, rollouts
from assay.runs.console import Console
from assay.runs.curves import draw_curves
from assay.runs.directory import read_metrics
from assay.runs.trackers import Tracker
from assay.settings import to_toml
from assay.text import Tokenizer
from assay.train import checkpoint, faults
from assay.train.adapt import draw
from assay.train.checkpoint import State
from assay.train.critic import Critic
from assay.train.data import PromptStream
from assay.train.first_evaluation import first_report, read_report, was_measured
from assay.train.reference import freeze_reference
from assay.train.replay import ReplayBuffer
from assay.train.setup import eval_params, moves
from assay.train.sft import warm_start
from assay.train.stopping import Stopped, Stopping
from assay.train.sync import sync_weights
from assay.train.update import Updater
from assay.types import Group, Prompt


@dataclass
class Parts:
    """Everything a run is made of; `assay.train.start` builds it."""

    cfg: TrainConfig
    run: Run
    tokenizer: Tokenizer
    collector: Collector
    updater: Updater
    algo: Algorithm
    stream: PromptStream
    demonstrations: Sequence[Prompt]  # for the warm start
    evaluations: dict[str, Sequence[Prompt]]  # the problems of each split that is measured
    total_steps: int
    state: State
    console: Console
    clock: float  # when the run began, less what earlier sittings took
    stopping: Stopping
    resumed: bool = False
    replay: ReplayBuffer | None = None
    critic: Critic | None = None
    warned: bool = False  # of a judge, or an environment, that fails now and then
    trackers: list[Tracker] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        """The main one of its ranks writes everything; all others only compute."""
        return self.updater.mesh


@contextmanager
def stoppable(parts: Parts) -> Iterator[None]:
    """While this lasts, a signal ends the run with a checkpoint of all that is done."""
    state, path = parts.state, parts.run.path
    with parts.stopping.watching():
        try:
            yield
        except Stopped as stopped:
            if stopped.at_once:
                raise
            saved = parts.mesh.broadcast_object(checkpoints.last(path))
            begun = saved is not None or state.unmeasured is not None  # before that there is nothing to keep
            if begun and saved != state.step:
                save(parts, {})
            raise


def begin(parts: Parts) -> None:
    """The warm start, if there is one, and the measurement of what reinforcement starts from.

    A model that knew something before its warm start is measured there too; a run that is nothing but a warm start is
    measured before it alone.
    """
    cfg, state = parts.cfg, parts.state
    if parts.updater.policy.lora is not None and state.unmeasured is None:  # else a checkpoint counts on it already
        checkpoint.save_base(parts.run.path, parts.updater.policy, parts.tokenizer, parts.mesh.is_main)
    if parts.total_steps and cfg.sft.steps and "sft" not in state.facts:  # it is, where the measurement was left
        if "start:" + cfg.eval.final_split in parts.evaluations:
            log(parts, measure(parts, cfg.eval.final_split, "start"))
        imitate(parts)
    state.unmeasured = {} if parts.total_steps else None
    log(parts, measure(parts, cfg.eval.final_split, "before"))
    if not parts.total_steps:
        imitate(parts)
    elif parts.algo.needs_reference:
        freeze_reference(parts.updater, cfg, parts.run.path)
    if parts.critic is not None:
        parts.critic.start_from(parts.updater.policy)
    state.unmeasured = None
    save(parts, {})


def imitate(parts: Parts) -> None:
    cfg, console = parts.cfg, parts.console
    started = time.perf_counter()
    metrics: dict[str, float] = {}
    console.start(cfg.sft.steps, f"{parts.run.name}: warm start")
    steps = warm_start(
        parts.updater, parts.collector.renderer, parts.demonstrations, cfg.sft, cfg.seed, cfg.train.max_skipped
    )
    for step, metrics in enumerate(steps, 1):
        parts.stopping.check()
        if parts.mesh.is_main:
            parts.run.log(0, {"sft/step": step, **metrics})
        console.step(step, metrics)
        for tracker in parts.trackers:
            tracker.log(step, metrics)  # under names of their own, so they do not run into reinforcement's steps
    console.stop()
    sync_weights(parts.updater.policy, parts.collector.engine, version=0)
    parts.state.facts["sft"] = {
        "steps": cfg.sft.steps,
        "loss": metrics.get("sft/loss"),
        "wall_s": round(time.perf_counter() - started, 2),
    }


def sampling_params(cfg: TrainConfig, samples: int) -> SamplingParams:
    return SamplingParams(
        n=samples,
        temperature=cfg.sampling.temperature,
        top_k=cfg.sampling.top_k,
        top_p=cfg.sampling.top_p,
        min_p=cfg.sampling.min_p,
        max_new_tokens=cfg.sampling.max_new_tokens,
        min_new_tokens=cfg.sampling.min_new_tokens,
        stop=tuple(cfg.sampling.stop),
    )


def sample(parts: Parts) -> tuple[list[Group], list[Group]]:
    """One step's groups, and those the algorithm dropped; new prompts replace dropped ones for as long as it allows."""
    cfg, state = parts.cfg, parts.state
    parts.stopping.check()
    parts.collector.engine.reset_prefix_cache()  # a resumed run has no cached prompts either
    params = sampling_params(cfg, cfg.train.samples)
    kept: list[Group] = []
    dropped: list[Group] = []
    seen: Counter[str] = Counter()
    parts.collector.seconds.clear()
    for _ in range(1 + parts.algo.resample):
        prompts = draw(parts.stream, cfg.train.prompts - len(kept), parts.algo, state)
        judged = parts.collector.collect(prompts, params, (cfg.seed, state.step), seen=seen)
        groups, rejected = parts.algo.keep(judged)
        if parts.algo.greedy_baseline and groups:
            ask_greedily(parts, groups, params)
        kept += groups
        dropped += rejected
        if len(kept) == cfg.train.prompts or done(parts, [*kept, *dropped]):
            break
    parts.collector.engine.sleep()
    state.cursor = parts.stream.cursor
    count(parts, [*kept, *dropped])
    return kept, dropped


def ask_greedily(parts: Parts, groups: Sequence[Group], params: SamplingParams) -> None:
    """One greedy answer to each prompt, for its reward only."""
    alone = replace(params, n=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    answers = parts.collector.collect([g.prompt for g in groups], alone, (parts.cfg.seed, parts.state.step))
    parts.algo.take_baselines(groups, answers)
    count(parts, answers)


def count(parts: Parts, groups: Sequence[Group]) -> None:
    rollouts_of = [rollout for group in groups for rollout in group.rollouts]
    parts.state.tokens += sum(rollout.length for rollout in rollouts_of)
    parts.state.answers += len(rollouts_of)


def describe(groups: Sequence[Group], dropped: Sequence[Group], algo: Algorithm) -> dict[str, float]:
    """What the rollouts of a step look like."""
    every = [*groups, *dropped]
    answers = [rollout for group in every for rollout in group.rollouts]
    count = len(answers)
    statuses = Counter(str(r.verdict.status) for r in answers if r.verdict)
    mean = sum(r.reward for r in answers) / count
    written = [turn.completion for r in answers for turn in r.turns]
    lengths = [r.length for r in answers]
    masked = sum(turn.masked for r in answers for turn in r.turns)
    greedy = [group.baseline for group in groups if group.baseline is not None]
    return {
        "reward/mean": mean,
        "reward/std": (sum((r.reward - mean) ** 2 for r in answers) / count) ** 0.5,
        "reward/correct": statuses["ok"] / count,
        "groups/zero_variance": sum(map(algo.has_zero_variance, every)) / len(every),
        "groups/dropped": float(len(dropped)),
        "turns/mean": sum(len(r.turns) for r in answers) / count,
        "length/mean": sum(lengths) / count,
        "length/max": float(max(lengths)),
        "length/truncated": sum(r.truncated for r in answers) / count,
        "sampling/kept_mass": sum(c.kept_mass for c in written) / len(written),
        "sampling/logprob": sum(sum(c.engine_logprobs) for c in written) / sum(lengths),
        "sampling/entropy": sum(c.entropy * len(c.token_ids) for c in written) / sum(lengths),
        **{f"status/{status}": number / count for status, number in sorted(statuses.items())},
        **({"reward/greedy": sum(greedy) / len(greedy)} if greedy else {}),
        **({"turns/masked": masked / len(written)} if masked else {}),
    }


def progress(parts: Parts) -> int:
    """Steps made before this one; with a budget of answers, what those sampled so far come to in steps."""
    loop, state = parts.cfg.train, parts.state
    if not loop.budget:
        return state.step
    return min((state.answers - 1) // (loop.prompts * loop.samples), parts.total_steps - 1)


def done(parts: Parts, sampled: Sequence[Group] = (), ahead: int = 0) -> bool:
    """Whether the run's length is reached, or will be in `ahead` steps; `sampled` counts as well."""
    budget, state = parts.cfg.train.budget, parts.state
    answers = state.answers + sum(len(group.rollouts) for group in sampled)
    return state.step + ahead >= parts.total_steps or 0 < budget <= answers


def due(every: int, parts: Parts) -> bool:
    """Every so many steps and at the end; never, where `every` is 0 and it is not the end."""
    return done(parts) or (every > 0 and parts.state.step % every == 0)


def measure(parts: Parts, split: str, label: str = "eval", step: int | None = None) -> dict[str, float]:
    """Evaluate the weights in the engine, and keep the answers, under the current step unless another is given."""
    cfg = parts.cfg
    params = eval_params(cfg.eval, cfg.sampling)
    started = time.perf_counter()
    report, groups = evaluate(parts.collector, parts.evaluations[f"{label}:{split}"], params, cfg.seed)
    if parts.mesh.is_main:
        of_step = parts.state.step if step is None else step
        rollouts.write_rollouts(parts.run.path, of_step, groups, "eval", split=f"{label}-{split}")
    found = report.summary()
    return {
        f"{label}/accuracy": report.accuracy,
        f"{label}/low": found["ci95"][0],
        f"{label}/high": found["ci95"][1],
        f"{label}/length": found["mean_length"],
        f"{label}/truncated": found["truncated"],
        f"{label}/format": found["format"],
        "time/eval": time.perf_counter() - started,
        **{f"{label}/pass@{k}": value for k, value in found.get("pass_at_k", {}).items()},
        **{f"{label}/majority@{k}": value for k, value in found.get("majority_at_k", {}).items()},
    }


def keep_rollouts(parts: Parts, groups: Sequence[Group]) -> None:
    count = parts.cfg.save.rollouts
    if count and parts.mesh.is_main:
        rollouts.write_rollouts(parts.run.path, parts.state.step, groups)
        rollouts.keep_rollouts(parts.run.path, "all" if count < 0 else count)


def count_faults(parts: Parts, groups: Sequence[Group]) -> None:
    """Steps in a row that had an update with a loss or gradient that was not finite; their batches are set aside."""
    found, state = parts.updater.faults, parts.state
    state.skipped = state.skipped + 1 if found else 0
    if found and parts.mesh.is_main:
        faults.set_aside(parts.run.path, state.step, groups, found)


def close(parts: Parts, metrics: dict[str, float], started: float) -> None:
    """The end of a step: measured where that is due, logged, saved. Left while it is measured, it is made up for."""
    cfg, state = parts.cfg, parts.state
    state.unmeasured = metrics
    if due(cfg.eval.every, parts):
        metrics = metrics | measure(parts, cfg.eval.split)
    state.unmeasured = None
    log(parts, metrics | {"time/step": time.perf_counter() - started})
    found = parts.updater.faults
    if faults.hopeless(found, state.skipped, cfg.train.max_skipped):
        raise faults.diagnosis(found[-1], state.skipped, parts.run.path, cfg.optim.lr)
    if due(cfg.save.every, parts) or (cfg.save.best and is_best(parts, metrics)):
        save(parts, metrics)


def log(parts: Parts, metrics: dict[str, float]) -> None:
    parts.state.wall_s = time.perf_counter() - parts.clock
    metrics = metrics | {"time/wall": parts.state.wall_s, "sampling/answers": float(parts.state.answers)}
    if parts.mesh.is_main:
        parts.run.log(parts.state.step, metrics)
    parts.console.step(parts.state.step, metrics)
    if metrics.get("status/error") and not parts.warned:
        parts.warned = True
        who, what = parts.collector.giver, "answers" if parts.collector.env is None else "steps"
        parts.console.warn(f"{who} failed on some {what} (status/error), which count as 0: see the rollouts")
    for tracker in parts.trackers:
        tracker.log(parts.state.step, metrics)


def is_best(parts: Parts, metrics: Mapping[str, float]) -> bool:
    """Whether a periodic evaluation was just made and came out best; the test split is never asked."""
    if "eval/accuracy" not in metrics or parts.cfg.eval.split == "test":
        return False
    best = parts.mesh.broadcast_object(checkpoints.read_best(parts.run.path))
    return best is None or metrics["eval/accuracy"] > best["value"]


def save(parts: Parts, metrics: Mapping[str, float]) -> None:
    """A checkpoint, noted as the best one where it is."""
    path, best = parts.run.path, is_best(parts, metrics)
    parts.state.wall_s = time.perf_counter() - parts.clock
    if best:
        parts.state.best = {"step": parts.state.step, "value": metrics["eval/accuracy"]}
    updater = parts.updater
    gather_back(updater.policy)
    weights = chain(updater.policy.named_parameters(), parts.critic.tensors() if parts.critic else ())
    faults.check_finite(weights, parts.mesh, parts.state.step, path, parts.cfg.optim.lr)
    reference = updater.reference if moves(parts.cfg.algo) else None
    checkpoint.save(
        path,
        parts.state,
        updater.policy,
        updater.optimizer,
        parts.tokenizer,
        parts.mesh,
        reference,
        parts.replay,
        parts.critic,
        to_toml(parts.cfg),
    )
    if best and parts.mesh.is_main:
        checkpoints.set_best(path, parts.state.step, metrics["eval/accuracy"])
    if parts.mesh.is_main:
        checkpoints.prune(path, parts.cfg.save.keep)


def training_time(path: Path) -> float:
    """Seconds of all steps, without their evaluations."""
    rows = [row for row in read_metrics(path) if "time/step" in row]
    return sum(row["time/step"] - row.get("time/eval", 0.0) for row in rows)


def finish(parts: Parts) -> dict[str, Any]:
    """The last measurement, the paired test, the summary and the curves; the summary is the main rank's to know."""
    cfg, run, state = parts.cfg, parts.run, parts.state
    split = cfg.eval.final_split
    log(parts, measure(parts, split, "after"))
    saved = parts.mesh.on_main(lambda: rollouts.read_lines(run.path, state.step, "eval", f"after-{split}"))
    after = Report.read(saved)
    before = first_report(parts, after, lambda: measure(parts, split, "before", step=0))
    if not parts.mesh.is_main:
        return {}
    if before and was_measured(run.path, f"start-{split}"):
        start, problem = read_report(run.path, f"start-{split}", before.ids)
        if problem:
            parts.console.warn(f"{problem}: finishing without the comparison with the model before its warm start")
        if start:
            state.facts["sft"] |= {"before": start.summary(), "paired": asdict(compare(start, before))}
    summary = {
        "run": run.name,
        "task": " ".join(filter(None, (cfg.env.name, cfg.task.name))),
        "model": cfg.model.source,
        "algorithm": cfg.algo.recipe if parts.total_steps else "sft",
        "steps": state.step,
        "wall_s": round(time.perf_counter() - parts.clock, 2),
        "train_s": round(training_time(run.path), 2),
        "split": split,
        "before": before.summary() if before else None,
        "after": after.summary(),
        "paired": asdict(compare(before, after)) if before else None,
        "tokens": state.tokens,
        "answers": state.answers,
        "seed": cfg.seed,
        **state.facts,
    }
    run.write_summary(summary)
    draw_curves(run.path)
    for tracker in parts.trackers:
        tracker.close()
    return summary
