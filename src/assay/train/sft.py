"""A supervised warm start on worked solutions: reinforcement's own packing, loss and optimizer, with advantage 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from assay.algos import Algorithm
from assay.config import AlgoConfig, SftConfig
from assay.text import Renderer
from assay.train.faults import diagnosis, hopeless
from assay.train.learner.optim import lr_factor, make_adamw
from assay.train.learner.pack import Row
from assay.train.learner.update import Updater
from assay.train.sources import PromptStream
from assay.types import Prompt, UserError

# Minus the mean log-probability of the solution's tokens is REINFORCE with an advantage of 1.
IMITATION = Algorithm(AlgoConfig(advantage="none", policy_loss="reinforce", aggregate="token"))


def warm_start(
    updater: Updater, renderer: Renderer, prompts: Sequence[Prompt], cfg: SftConfig, seed: int, max_skipped: int = 0
) -> Iterator[dict[str, float]]:
    """Train on `cfg.steps` batches of solutions; yields each step's metrics. Gives up like the loop (see `faults`)."""
    stream = PromptStream(prompts, seed)
    optimizer = make_adamw(updater.policy, cfg.lr, weight_decay=cfg.weight_decay)
    imitator = replace(updater, optimizer=optimizer, temperature=1.0, expects_more=False)
    in_a_row = 0
    with imitator.working():
        for step in range(cfg.steps):
            rows = solution_rows(stream.next(cfg.batch), renderer, updater.policy.max_length)
            lr = cfg.lr * lr_factor("linear", step, cfg.steps, cfg.warmup)
            sums, norm, skipped = imitator.step(rows, IMITATION, lr)
            in_a_row = in_a_row + 1 if skipped else 0
            yield {
                "sft/loss": float(sums.losses["loss/policy"]),
                "sft/grad_norm": norm,
                "sft/lr": lr,
                "sft/skipped": float(skipped),
            }
            if skipped and hopeless(imitator.faults, in_a_row, max_skipped):
                raise diagnosis(imitator.faults[-1], in_a_row)
    updater.token_budget = imitator.token_budget


def solution_rows(prompts: Sequence[Prompt], renderer: Renderer, max_length: int) -> list[Row]:
    rows = []
    for prompt in prompts:
        if prompt.solution is None:
            raise UserError(f"prompt {prompt.id} has no worked solution to learn from: set sft.steps = 0, or add them")
        ids, mask = renderer.example(prompt, prompt.solution)
        if not any(mask[:max_length]):
            raise UserError(
                f"prompt {prompt.id} leaves no room for its solution in a context of {max_length} tokens: "
                "leave it out, shorten it (fewer few-shot examples?), or raise model.max_length"
            )
        rows.append(Row(ids[:max_length], mask[:max_length], [0.0] * min(len(ids), max_length), 1.0, 0.0))
    weights = IMITATION.token_weights(torch.tensor([sum(row.trained) for row in rows])).tolist()
    return [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
