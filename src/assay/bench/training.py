"""Tokens a second of training alone: forward, backward and optimizer, on packed sequences of one length."""

from __future__ import annotations

import math
import random
import shlex
from dataclasses import dataclass
from typing import Any

from assay.bench.engine import Speeds, free_memory
from assay.bench.shapes import SHAPES, float32_model, label
from assay.bench.step import now
from assay.bench.trainer import StepOptions, config, make_learner, peaks, row_id, settings_of
from assay.bench.workload import words_of
from assay.models.device import pick_device
from assay.train.state import RunState
from assay.types import Completion, Finish, Group, Prompt, Rollout, Turn, UserError


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
            raise UserError(f"unknown shape '{self.shape}': choose one of {', '.join(SHAPES)}")
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
