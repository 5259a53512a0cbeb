"""Seconds of a whole GRPO step, from prompts to an engine with new weights, and where they go.

Tokens a second of training alone: forward, backward and optimizer, on packed sequences of one length.
"""

from __future__ import annotations

import math
import random
import shlex
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from assay.bench.engine import Speeds, free_memory, parts_of, synchronise, trainer_logprobs
from assay.bench.trainer import BenchedRun, StepOptions, benched_run, config, make_learner, peaks, row_id, settings_of
from assay.bench.trl_peer import trl_steps, trl_version
from assay.bench.workload import SHAPES, Workload, float32_model, label, words_of
from assay.models.device import pick_device, pick_dtype
from assay.train.evaluation import sync_weights
from assay.train.learner.pack import rows_of
from assay.train.learner.reference import freeze_reference
from assay.train.state import RunState
from assay.types import Completion, Finish, Group, Prompt, Rollout, Turn, UserError, unknown_name


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


@dataclass(frozen=True)
class Sequences:
    """What is trained on: all tokens of each sequence but its first, which nothing comes before."""

    shape: str = "0.5b"
    model: str | None = None  # a folder, GGUF or hub id in place of the shape
    sequences: int = 16
    tokens: int = 1024  # of each
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise unknown_name("shape", self.shape, SHAPES)
        if self.sequences < 1 or self.tokens < 2:
            raise UserError("--sequences must be at least 1, and --tokens at least 2")

    @property
    def label(self) -> str:
        return label(self.shape, self.model)

    @property
    def id(self) -> str:
        return f"train-{self.label}-{self.sequences}x{self.tokens}"

    def group(self, vocab_size: int, run: int) -> Group:
        """Sequences as if one prompt of a token had been answered: half of them well, half badly."""
        rng = random.Random(f"{self.seed}/{run}")
        prompt = Prompt(f"bench/{run}", ())
        uniform = [-math.log(vocab_size)] * (self.tokens - 1)  # close to what random weights say
        group = Group(prompt, [])
        for index in range(self.sequences):
            first, *rest = rng.choices(range(vocab_size), k=self.tokens)
            turn = Turn([first], Completion(rest, uniform, uniform, Finish.LENGTH), "")
            group.rollouts.append(Rollout(prompt, index, [turn], advantage=1.0 if index % 2 else -1.0))
        return group


def measure_training(work: Sequences, options: StepOptions) -> list[dict[str, Any]]:
    device = pick_device(options.device)
    free_memory(device)
    policy = float32_model(work.shape, work.model, device, work.seed)
    if work.tokens > policy.max_length:
        raise UserError(f"{work.tokens} tokens are more than the {policy.max_length} of {work.label}: lower --tokens")
    cfg = config(options)
    learner, state = make_learner(policy, cfg, options), RunState()
    speeds = Speeds()
    for run in range(1 + options.steps):
        group = work.group(policy.vocab_size, run)
        start = now(device)
        metrics = learner.update([group], state)
        speeds.values.append(work.sequences * work.tokens / (now(device) - start))
        assert not metrics["optim/skipped"], "an update was skipped"
    row = {
        "id": row_id(work.id, options),
        "system": "assay",
        **speeds.row(),
        **peaks(device),
        "trained_tokens": work.sequences * (work.tokens - 1),
        "shape": None if work.model else work.shape,
        "model": work.model,
        "sequences": work.sequences,
        "tokens": work.tokens,
        "seed": work.seed,
        **settings_of(cfg, options, learner.updater),
        "command": shlex.join(["assay", "bench", "step", "--train-only", *words_of(work), *words_of(options)]),
    }
    return [row]


TABLE = (Sequences(), Sequences(shape="1.5b"))
