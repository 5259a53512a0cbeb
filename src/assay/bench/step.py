"""Seconds of a whole GRPO step, from prompts to an engine with new weights, and where they go."""

from __future__ import annotations

import shlex
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from assay.bench.engine import free_memory, synchronise
from assay.bench.mismatch import parts_of, trainer_logprobs
from assay.bench.shapes import float32_model
from assay.bench.trainer import BenchedRun, StepOptions, benched_run, peaks, row_id, settings_of
from assay.bench.trl_peer import trl_steps, trl_version
from assay.bench.workload import Workload, words_of
from assay.models.device import pick_device, pick_dtype
from assay.train.pack import rows_of
from assay.train.reference import freeze_reference
from assay.train.sync import sync_weights
from assay.types import Group, UserError


@dataclass
class Steps:
    """Seconds of each step; the first is the warm-up."""

    seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        first, *runs = (round(value, 4) for value in self.seconds)
        return {"step_s": round(median(self.seconds[1:]), 4), "runs": runs, "first_step_s": first}

    def parts_row(self) -> dict[str, float]:
        """The median of each by itself, so the sum may differ a little from the median step."""
        return {name: round(median(step[name] for step in self.parts[1:]), 4) for name in self.parts[0]}


def measure_step(work: Workload, options: StepOptions) -> list[dict[str, Any]]:
    """A row for us, and one for the system that we are compared with."""
    check(work, options)
    device = pick_device(options.device)
    free_memory(device)
    policy = float32_model(work.shape, work.model, device, work.seed)
    if work.prompt_tokens + work.new > policy.max_length:
        raise UserError(
            f"{work.prompt_tokens} tokens of prompt and {work.new} new ones are more than the {policy.max_length} "
            f"of {work.label}: ask for fewer with --prompt-tokens or --new"
        )
    ours, theirs = Steps(), Steps()
    with benched_run(policy, work, options) as run:
        learner, facts = run.learner, dict[str, Any]()
        if learner.algo.needs.reference:
            with tempfile.TemporaryDirectory(prefix="assay-reference-") as folder:
                freeze_reference(learner.updater, run.cfg, Path(folder))

        def our_turn() -> None:
            groups = one_step(run, ours)
            facts["trained_tokens"] = sum(sum(row.trained) for row in rows_of(groups, learner.algo))

        our_turn()
        if options.peer:
            memory = peaks(device)  # before the other system takes some
            theirs.seconds = trl_steps(run, options.steps, our_turn)
        else:
            for _ in range(options.steps):
                our_turn()
            memory = peaks(device)
        facts |= memory | {"parts_s": ours.parts_row()}
        chosen = workload_settings(work) | settings_of(run.cfg, options, learner.updater)
    last = {"command": shlex.join(["assay", "bench", "step", *words_of(work), *words_of(options)])}
    shared = {"id": row_id(work.id.replace("gen-", "step-", 1), options)}
    rows = [{**shared, "system": "assay", **ours.row(), **facts, **chosen, **last}]
    if options.peer:
        rows.append({**shared, "system": "trl", "version": trl_version(), **theirs.row(), **chosen, **last})
    return rows


def check(work: Workload, options: StepOptions) -> None:
    """What can be said before anything is built."""
    if work.samples < 2:
        raise UserError("GRPO compares the samples of a prompt: --samples must be at least 2")
    if work.temperature <= 0:
        raise UserError(f"training samples at a --temperature above 0, not {work.temperature:g}")
    if options.peer:
        trl_version()


def one_step(run: BenchedRun, steps: Steps) -> list[Group]:
    """One step of the loop of `assay train`, with the device synchronised between its parts."""
    learner, state, device = run.learner, run.state, run.device
    start = now(device)
    sampled = run.source.next(state)
    learner.credit(sampled.groups)
    scored = now(device)
    metrics = learner.update(sampled.groups, state)
    trained = now(device)
    sync_weights(learner.policy, run.engine, version=state.step)
    synced = now(device)
    assert not metrics["optim/skipped"], "an update was skipped"
    assert all(r.length == run.work.new for group in sampled.groups for r in group.rollouts), "an answer ended early"
    generation = sampled.seconds["generate"]
    reference = reference_seconds(run, sampled.groups) if learner.algo.needs.reference else 0.0
    steps.seconds.append(synced - start)
    steps.parts.append(
        {
            "generation": generation,
            "scoring": scored - start - generation,
            "reference": reference,
            "training": trained - scored - reference,
            "sync": synced - trained,
        }
    )
    return sampled.groups


def reference_seconds(run: BenchedRun, groups: list[Group]) -> float:
    """Seconds of the reference's forward passes, repeated by themselves because the update interleaves them."""
    reference = run.learner.updater.reference
    assert reference is not None
    pairs = [(r.turns[0].context_ids, r.turns[0].completion) for group in groups for r in group.rollouts]
    dtype = pick_dtype(run.cfg.dtype, run.device)
    start = now(run.device)
    for part in parts_of(pairs):
        trainer_logprobs(reference, part, run.work.temperature, dtype)
    return now(run.device) - start


def now(device: torch.device) -> float:
    synchronise(device)
    return time.perf_counter()


def workload_settings(work: Workload) -> dict[str, Any]:
    return {
        "shape": None if work.model else work.shape,
        "model": work.model,
        **{name: getattr(work, name) for name in ("prompts", "samples", "prompt_tokens", "new", "seed", "temperature")},
        "max_batch": work.batch,
    }
