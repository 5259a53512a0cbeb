"""Supervised warm start on worked solutions, with the packing, loss and optimizer of reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from assay.algos import Algorithm
from assay.config import AlgoConfig, SftConfig
from assay.text import Renderer
from assay.train.faults import nonfinite_error, should_abort
from assay.train.learner.optim import lr_factor, make_adamw
from assay.train.learner.pack import Row
from assay.train.learner.update import Updater
from assay.train.sources import PromptStream
from assay.types import Prompt, UserError

# Minus the mean log-probability of the solution's tokens is REINFORCE with an advantage of 1.
SFT = Algorithm(AlgoConfig(advantage="none", policy_loss="reinforce", aggregate="token"))


def warm_start(
    updater: Updater, renderer: Renderer, prompts: Sequence[Prompt], cfg: SftConfig, seed: int, max_skipped: int = 0
) -> Iterator[dict[str, float]]:
    """Train on `cfg.steps` batches of solutions, and yield the metrics of each step.

    `max_skipped`: number of consecutive skipped steps that ends the run, as in the training loop; 0: no limit.
    """
    stream = PromptStream(prompts, seed)
    optimizer = make_adamw(updater.policy, cfg.lr, weight_decay=cfg.weight_decay)
    sft_updater = replace(updater, optimizer=optimizer, temperature=1.0, expects_more=False)
    consecutive = 0
    with sft_updater.working():
        for step in range(cfg.steps):
            rows = solution_rows(stream.next(cfg.batch), renderer, updater.policy.max_length)
            lr = cfg.lr * lr_factor("linear", step, cfg.steps, cfg.warmup)
            sums, norm, skipped = sft_updater.step(rows, SFT, lr)
            consecutive = consecutive + 1 if skipped else 0
            yield {
                "sft/loss": float(sums.losses["loss/policy"]),
                "sft/grad_norm": norm,
                "sft/lr": lr,
                "sft/skipped": float(skipped),
            }
            if skipped and should_abort(sft_updater.faults, consecutive, max_skipped):
                raise nonfinite_error(sft_updater.faults[-1], consecutive)
    updater.token_budget = sft_updater.token_budget


def solution_rows(prompts: Sequence[Prompt], renderer: Renderer, max_length: int) -> list[Row]:
    """One row per prompt, whose trained tokens are those of the solution."""
    rows = []
    for prompt in prompts:
        if prompt.solution is None:
            raise UserError(
                f"prompt {prompt.id} has no worked solution to train on: set sft.steps = 0, or add solutions"
            )
        ids, mask = renderer.example(prompt, prompt.solution)
        if not any(mask[:max_length]):
            raise UserError(
                f"prompt {prompt.id} fills the context of {max_length} tokens, without its solution: remove or shorten "
                "it (fewer few-shot examples?), or raise model.max_length"
            )
        rows.append(Row(ids[:max_length], mask[:max_length], [0.0] * min(len(ids), max_length), 1.0, 0.0))
    weights = SFT.token_weights(torch.tensor([sum(row.trained) for row in rows])).tolist()
    return [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
