"""Metrics as sums, so that adding them over micro-batches and ranks gives exactly what one big batch would."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Sums:
    """Detached scalars in three kinds, keyed by the metric they become."""

    tokens: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)  # weighted already: their sum is the batch's loss
    per_token: dict[str, Tensor] = field(default_factory=dict)  # to be divided by `tokens`
    largest: dict[str, Tensor] = field(default_factory=dict)  # combined by max; none is negative

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            tokens=self.tokens + other.tokens,
            losses={key: value + other.losses[key] for key, value in self.losses.items()},
            per_token={key: value + other.per_token[key] for key, value in self.per_token.items()},
            largest={key: torch.maximum(value, other.largest[key]) for key, value in self.largest.items()},
        )

    def __radd__(self, start: int) -> Sums:
        """Lets the built-in sum() start from 0."""
        assert start == 0
        return self

    def and_loss(self, key: str, value: Tensor) -> Sums:
        """With one more part of the total."""
        value = value.detach().to(self.tokens.dtype)
        return replace(self, losses=self.losses | {key: value, "loss/total": self.losses["loss/total"] + value})

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Sums:
        """The same over all ranks of `group`; every rank must hold the same keys (an empty batch gives them too)."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        added = torch.stack([self.tokens, *self.losses.values(), *self.per_token.values()])
        dist.all_reduce(added, op=dist.ReduceOp.SUM, group=group)
        tokens, *values = added.unbind()
        losses = dict(zip(self.losses, values[: len(self.losses)], strict=True))
        per_token = dict(zip(self.per_token, values[len(self.losses) :], strict=True))
        if not self.largest:
            return Sums(tokens, losses, per_token)
        largest = torch.stack(list(self.largest.values()))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return Sums(tokens, losses, per_token, dict(zip(self.largest, largest.unbind(), strict=True)))


def metrics(sums: Sums, updates: int = 1) -> dict[str, float]:
    """Final metrics. When `sums` were added over several optimizer steps, `updates` makes the losses their mean."""
    tokens = max(float(sums.tokens), 1.0)
    losses = {key: float(value) / updates for key, value in sums.losses.items()}
    per_token = {key: float(value) / tokens for key, value in sums.per_token.items()}
    largest = {key: float(value) for key, value in sums.largest.items()}
    return losses | per_token | largest
