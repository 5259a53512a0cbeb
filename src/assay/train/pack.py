"""Rollouts -> micro-batches: packed tokens with what the loss needs of each; weights are settled before any split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from assay.algos import Algorithm
from assay.types import Group, Rollout


@dataclass(frozen=True)
class Row:
    """One sequence to train on."""

    ids: list[int]
    trained: list[int]  # 1 for tokens in the loss
    behaviour_logprobs: list[float]  # of the sampler, aligned with ids
    advantage: float
    weight: float  # of each of its trained tokens in the loss of the whole batch

    @classmethod
    def of(cls, rollout: Rollout) -> Row:
        return cls(rollout.token_ids, rollout.loss_mask, rollout.engine_logprobs, rollout.advantage, 0.0)


@dataclass
class MicroBatch:
    """N packed tokens; the [M] tensors hold the trained ones among them only."""

    ids: Tensor  # [N]
    lengths: list[int]  # of the sequences
    trained: Tensor  # [N] bool
    behaviour_logprobs: Tensor  # [M]
    advantages: Tensor  # [M]
    weights: Tensor  # [M]
    ref_logprobs: Tensor | None = None  # [M]


def rows_of(groups: Sequence[Group], algo: Algorithm) -> list[Row]:
    """One row for each rollout that has a gradient, weighted over all of them.

    Masked rollouts have none, and neither have those with advantage 0 where the loss is made of advantages alone (ours
    are, a user's own may not be): leaving them out changes nothing but the time. In a step where half the groups are
    solved by all or by none, that is half of it.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([0 if rollout.masked else rollout.length for rollout in rollouts])
    weights = algo.token_weights(lengths).tolist()
    regularised = algo.needs_reference or algo.needs_entropy or callable(algo.policy_loss)
    return [
        replace(Row.of(rollout), weight=weight)
        for rollout, weight in zip(rollouts, weights, strict=True)
        if not rollout.masked and (rollout.advantage or regularised)
    ]


def split_rows(rows: Sequence[Row], token_budget: int) -> Iterator[list[Row]]:
    """Parts of at most `token_budget` tokens (a longer sequence is a part of its own), of similar lengths."""
    part: list[Row] = []
    size = 0
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if part and size + len(row.ids) > token_budget:
            yield part
            part, size = [], 0
        part.append(row)
        size += len(row.ids)
    if part:
        yield part


def share_rows(rows: Sequence[Row], dp_size: int, dp_rank: int, token_budget: int) -> list[list[Row]]:
    """The micro-batches of one data-parallel rank; every rank gets as many, of about as many tokens together.

    Where one rank needs more of them than another, that one gets some with a single token and nothing to learn: ranks
    have to keep pace, for they exchange weights and gradients on the way.
    """
    shares: list[list[Row]] = [[] for _ in range(dp_size)]
    sizes = [0] * dp_size
    for row in sorted(rows, key=lambda row: -len(row.ids)):  # longest first, to whoever has least
        least = sizes.index(min(sizes))
        shares[least].append(row)
        sizes[least] += len(row.ids)
    parts = [list(split_rows(share, token_budget)) for share in shares]
    most = max(len(own) for own in parts)
    blank = [Row(rows[0].ids[:1], [0], [0.0], 0.0, 0.0)] if rows else []
    return parts[dp_rank] + [blank] * (most - len(parts[dp_rank]))


def pack(rows: Sequence[Row], device: torch.device | str, dtype: torch.dtype = torch.float32) -> MicroBatch:
    trained = torch.tensor([bit for row in rows for bit in row.trained], dtype=torch.bool)
    counts = torch.tensor([sum(row.trained) for row in rows])
    behaviour = torch.tensor([p for row in rows for p in row.behaviour_logprobs], dtype=dtype)[trained]

    def each_token(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)

    return MicroBatch(
        ids=torch.tensor([t for row in rows for t in row.ids]).to(device),
        lengths=[len(row.ids) for row in rows],
        trained=trained.to(device),
        behaviour_logprobs=behaviour.to(device),
        advantages=each_token([row.advantage for row in rows]),
        weights=each_token([row.weight for row in rows]),
    )
