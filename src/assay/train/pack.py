"""Rollouts -> micro-batches: packed tokens with what the loss needs of each; weights are settled before any split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.algos import Algorithm
from assay.models.device import upload
from assay.types import Group, Rollout

WORTH_SHARING = 0.1  # of all tokens: attention in two parts takes a little longer
PIECES = 4  # that a data-parallel rank gets at least, where there are rows enough


@dataclass(frozen=True)
class Row:
    """One sequence to train on."""

    ids: list[int]
    trained: list[int]  # 1 for tokens in the loss
    behaviour_logprobs: list[float]  # of the sampler, aligned with ids
    advantage: float
    weight: float  # of each of its trained tokens in the loss of the whole batch
    # Of the trained tokens only, where an algorithm asks for them:
    trainer_logprobs: list[float] | None = None  # of the trainer before its first update
    advantages: list[float] | None = None  # in place of the one for all: of steps or tokens with credit of their own
    marked: list[bool] | None = None  # what the loss holds back
    values: list[float] | None = None  # of the states before them, by a critic when it gave credit
    returns: list[float] | None = None  # what that critic is to learn of these states

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first that is trained."""
        return tuple(self.ids[: self.trained.index(1)] if self.count else self.ids)

    @cached_property
    def count(self) -> int:
        """Tokens in the loss."""
        return sum(self.trained)

    @property
    def token_advantages(self) -> list[float]:
        return [self.advantage] * self.count if self.advantages is None else self.advantages

    @property
    def sampled_logprobs(self) -> list[float]:
        """Of the trained tokens: the trainer's where they are known, else the sampler's."""
        if self.trainer_logprobs is not None:
            return self.trainer_logprobs
        return [logprob for logprob, trained in zip(self.behaviour_logprobs, self.trained, strict=True) if trained]

    @classmethod
    def of(cls, rollout: Rollout, weight: float = 0.0) -> Row:
        known = rollout.token_ids, rollout.loss_mask, rollout.engine_logprobs, rollout.advantage
        return cls(*known, weight, advantages=rollout.token_advantages)


@dataclass
class MicroBatch:
    """N packed tokens; the [M] tensors hold the trained ones among them only."""

    ids: Tensor  # [N]
    lengths: list[int]  # of the sequences
    shared: list[int]  # tokens that each has in common with the nearest before it that has 0 here
    trained: Tensor  # [N] bool, on the CPU
    behaviour_logprobs: Tensor  # [M]
    advantages: Tensor  # [M]
    weights: Tensor  # [M]
    trained_lengths: list[int]  # trained tokens of the sequences, none of which is split over micro-batches
    trainer_logprobs: Tensor | None = None  # [M]
    marked: Tensor | None = None  # [M] bool
    values: Tensor | None = None  # [M]
    returns: Tensor | None = None  # [M]


def rows_of(groups: Sequence[Group], algo: Algorithm, known: Mapping[int, Row] | None = None) -> list[Row]:
    """One row for each rollout that has a gradient, weighted over all of them.

    Masked rollouts, and those with nothing but masked turns, have none. Neither have those with advantage 0 where the
    loss is made of advantages alone (ours are, a user's own may not be): leaving them out changes nothing but the time.
    In a step where half the groups are solved by all or by none, that is half of it.
    `known`: rows that are there already, by the identity of their rollouts.
    """
    known = known or {}
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([0 if rollout.masked else rollout.trained for rollout in rollouts])
    rows = []
    for rollout, length, weight in zip(rollouts, lengths.tolist(), algo.token_weights(lengths).tolist(), strict=True):
        if length and (rollout.learns or algo.needs_every_answer):
            row = known.get(id(rollout))
            rows.append(replace(row, weight=weight) if row else Row.of(rollout, weight))
    return rows


def split_rows(rows: Sequence[Row], token_budget: int, sharing: bool = False) -> Iterator[list[Row]]:
    """Parts of at most `token_budget` tokens (a longer sequence is a part of its own).

    Rows with the same prompt are neighbours; with `sharing` their prompt is computed, and so counts, once.
    """
    part: list[Row] = []
    size = 0
    for row in by_prompt(rows):
        new = len(row.ids)
        if sharing and part and row.prompt == part[-1].prompt:
            new -= len(row.prompt)
        if part and size + new > token_budget:
            yield part
            part, size, new = [], 0, len(row.ids)
        part.append(row)
        size += new
    if part:
        yield part


def by_prompt(rows: Sequence[Row]) -> list[Row]:
    """Prompts in the order in which they come first, and the shortest answers to each first."""
    first: dict[tuple[int, ...], int] = {}
    places = [(first.setdefault(row.prompt, len(first)), len(row.ids)) for row in rows]
    return [row for _, row in sorted(zip(places, rows, strict=True), key=lambda placed: placed[0])]


def share_rows(
    rows: Sequence[Row], dp_size: int, dp_rank: int, token_budget: int, sharing: bool = False
) -> list[list[Row]]:
    """The micro-batches of one data-parallel rank; every rank gets as many, of about as many tokens together.

    Where one rank needs more of them than another, that one gets some with a single token and nothing to learn: ranks
    have to keep pace, for they exchange weights and gradients on the way.
    """
    if dp_size == 1:
        return list(split_rows(rows, token_budget, sharing))
    # Pieces small enough that ranks come out even; rows with the same prompt stay together within them.
    pieces = list(split_rows(rows, max(sum(len(row.ids) for row in rows) // (PIECES * dp_size), 1)))
    shares: list[list[Row]] = [[] for _ in range(dp_size)]
    sizes = [0] * dp_size
    for piece in sorted(pieces, key=lambda piece: -sum(len(row.ids) for row in piece)):  # largest first,
        least = sizes.index(min(sizes))  # to whoever has least
        shares[least] += piece
        sizes[least] += sum(len(row.ids) for row in piece)
    parts = [list(split_rows(share, token_budget, sharing)) for share in shares]
    most = max(len(own) for own in parts)
    blank = [blank_like(rows[0])] if rows else []
    return parts[dp_rank] + [blank] * (most - len(parts[dp_rank]))


def blank_like(row: Row) -> Row:
    """A single token and nothing to learn; it knows as much as other rows do, for ranks have to ask for the same."""
    known = ("trainer_logprobs", "advantages", "marked", "values", "returns")
    nothing: dict[str, Any] = {name: None if getattr(row, name) is None else [] for name in known}
    return Row(row.ids[:1], [0], [0.0], 0.0, 0.0, **nothing)


def marked(rows: list[Row], algo: Algorithm) -> list[Row]:
    """The rows of an optimizer step with which of their tokens the loss holds back, given all of them."""
    if algo.cov is None:
        return rows
    logprobs = chain.from_iterable(row.sampled_logprobs for row in rows)
    advantages = chain.from_iterable(row.token_advantages for row in rows)
    marks = iter(algo.marks(list(logprobs), list(advantages)))
    return [replace(row, marked=list(islice(marks, row.count))) for row in rows]


def shared_tokens(rows: Sequence[Row]) -> list[int]:
    """For each row the tokens of its prompt, if the row before it has the same one; all 0 where it saves too little."""
    shared = [
        len(row.prompt) if index and row.prompt == rows[index - 1].prompt else 0 for index, row in enumerate(rows)
    ]
    return shared if sum(shared) >= WORTH_SHARING * sum(len(row.ids) for row in rows) else [0] * len(rows)


def pack(rows: Sequence[Row], device: torch.device | str, dtype: torch.dtype = torch.float32) -> MicroBatch:
    device = torch.device(device)
    marks = b"".join(bytes(row.trained) for row in rows)  # a third of the time that numbers take
    trained = np.frombuffer(marks, np.uint8).astype(bool)
    counts = [row.count for row in rows]
    behaviour = torch.from_numpy(joined([row.behaviour_logprobs for row in rows], np.float64)[trained])

    def each_token(values: list[float]) -> Tensor:  # by numpy: torch would wake all its threads for it
        return upload(torch.from_numpy(np.repeat(np.array(values), counts)).to(dtype), device)

    def own(values: Sequence[Sequence[float] | None], dtype: torch.dtype = dtype) -> Tensor | None:
        """None where the algorithm did not ask; rows that ranks are filled up with have no tokens."""
        known = [one for one in values if one is not None]
        return upload(torch.from_numpy(joined(known, np.float64)).to(dtype), device) if known else None

    by_token = any(row.advantages is not None for row in rows)
    advantages = own([row.token_advantages for row in rows]) if by_token else None
    return MicroBatch(
        ids=upload(torch.from_numpy(joined([row.ids for row in rows], np.int64)), device),
        lengths=[len(row.ids) for row in rows],
        shared=shared_tokens(rows),
        trained=torch.from_numpy(trained),
        behaviour_logprobs=upload(behaviour.to(dtype), device),
        advantages=each_token([row.advantage for row in rows]) if advantages is None else advantages,
        weights=each_token([row.weight for row in rows]),
        trained_lengths=counts,
        trainer_logprobs=own([row.trainer_logprobs for row in rows]),
        marked=own([row.marked for row in rows], torch.bool),
        values=own([row.values for row in rows]),
        returns=own([row.returns for row in rows]),
    )


def joined(lists: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), dtype, sum(len(values) for values in lists))
