"""Rollouts -> micro-batches: packed tokens and the inputs of the loss. Weights are computed before any split.

Work by parts that fit into memory: where they do not, once more by smaller ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from assay.algos import Algorithm, TokenInput
from assay.mesh import Mesh
from assay.models import PolicyModel
from assay.models.device import upload
from assay.train.learner.parallel import in_lockstep
from assay.types import Group, Rollout, UserError

WORTH_SHARING = 0.1  # of all tokens: attention in two parts takes a little longer
TRAINER_LOGPROBS = "trainer_logprobs"  # input: of the trainer before its first update, where these are needed
PIECES = 4  # that a data-parallel rank gets at least, where there are rows enough


@dataclass(frozen=True)
class Row:
    """One sequence to train on."""

    ids: list[int]
    trained: list[int]  # 1 for tokens in the loss
    behaviour_logprobs: list[float]  # of the sampler, aligned with ids
    advantage: float
    weight: float  # of each of its trained tokens in the loss of the whole batch
    # Of the trained tokens only:
    advantages: list[float] | None = None  # in place of the one for all: of steps or tokens with their own credit
    inputs: Mapping[str, Sequence[float]] = field(default_factory=dict)  # whatever the algorithm asks for, by name

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
        if TRAINER_LOGPROBS in self.inputs:
            return list(self.inputs[TRAINER_LOGPROBS])
        return [logprob for logprob, trained in zip(self.behaviour_logprobs, self.trained, strict=True) if trained]

    @classmethod
    def of(cls, rollout: Rollout, weight: float = 0.0, inputs: Sequence[TokenInput] = ()) -> Row:
        """With those of the inputs that are computed from a rollout."""
        known = rollout.token_ids, rollout.loss_mask, rollout.engine_logprobs, rollout.advantage
        values = {one.name: one.of_rollout(rollout) for one in inputs if one.from_rollout is not None}
        return cls(*known, weight, advantages=rollout.token_advantages, inputs=values)

    def with_input(self, name: str, values: Sequence[float]) -> Row:
        return replace(self, inputs={**self.inputs, name: values})


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
    inputs: dict[str, Tensor] = field(default_factory=dict)  # [M] each


def rows_of(groups: Sequence[Group], algo: Algorithm) -> list[Row]:
    """One row for each rollout that has a gradient: see `weighted_rollouts`."""
    return [Row.of(rollout, weight, algo.inputs) for rollout, weight in weighted_rollouts(groups, algo)]


def weighted_rollouts(groups: Sequence[Group], algo: Algorithm) -> list[tuple[Rollout, float]]:
    """Rollouts that have a gradient, with the weight of each of their tokens in the loss of all of them.

    Masked rollouts, and those with nothing but masked turns, have none. Neither have those with advantage 0, unless the
    algorithm needs every rollout: leaving them out changes nothing but the time. In a step where half the groups are
    solved by all or by none, that is half of it.
    """
    every_rollout = algo.needs.every_rollout
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([0 if rollout.masked else rollout.trained for rollout in rollouts])
    weighted = zip(rollouts, lengths.tolist(), algo.token_weights(lengths).tolist(), strict=True)
    return [(rollout, weight) for rollout, length, weight in weighted if length and (rollout.learns or every_rollout)]


def with_step_inputs(rows: list[Row], algo: Algorithm) -> list[Row]:
    """The rows of an optimizer step with the inputs that are computed from all of them."""
    for one in algo.inputs:
        if one.from_rows is not None:
            rows = [row.with_input(one.name, own) for row, own in zip(rows, one.of_rows(rows), strict=True)]
    return rows


def split_rows(rows: Sequence[Row], token_budget: int, share_prefixes: bool = False) -> Iterator[list[Row]]:
    """Parts of at most `token_budget` tokens (a longer sequence is a part of its own).

    Rows with the same prompt are neighbours; with `share_prefixes` their prompt is computed, and so counts, once.
    """
    part: list[Row] = []
    size = 0
    for row in by_prompt(rows):
        new = len(row.ids)
        if share_prefixes and part and row.prompt == part[-1].prompt:
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


def partition_rows(
    rows: Sequence[Row], dp_size: int, dp_rank: int, token_budget: int, share_prefixes: bool = False
) -> list[list[Row]]:
    """The micro-batches of one data-parallel rank; every rank gets as many, of about as many tokens together.

    Where one rank needs more of them than another, that one gets some with a single token and nothing to learn: ranks
    have to keep pace, for they exchange weights and gradients on the way.
    """
    if dp_size == 1:
        return list(split_rows(rows, token_budget, share_prefixes))
    # Pieces small enough that ranks come out even; rows with the same prompt stay together within them.
    pieces = list(split_rows(rows, max(sum(len(row.ids) for row in rows) // (PIECES * dp_size), 1)))
    shares: list[list[Row]] = [[] for _ in range(dp_size)]
    sizes = [0] * dp_size
    for piece in sorted(pieces, key=lambda piece: -sum(len(row.ids) for row in piece)):  # largest first,
        least = sizes.index(min(sizes))  # to whoever has least
        shares[least] += piece
        sizes[least] += sum(len(row.ids) for row in piece)
    parts = [list(split_rows(share, token_budget, share_prefixes)) for share in shares]
    most = max(len(own) for own in parts)
    blank = [blank_like(rows[0])] if rows else []
    return parts[dp_rank] + [blank] * (most - len(parts[dp_rank]))


def blank_like(row: Row) -> Row:
    """A single token and nothing to learn; it has the same inputs as other rows, as all ranks compute the same loss."""
    advantages: list[float] | None = None if row.advantages is None else []
    return Row(row.ids[:1], [0], [0.0], 0.0, 0.0, advantages, {name: [] for name in row.inputs})


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

    def own(values: Sequence[Sequence[float]]) -> Tensor:
        return upload(torch.from_numpy(joined(values, np.float64)).to(dtype), device)

    by_token = any(row.advantages is not None for row in rows)
    return MicroBatch(
        ids=upload(torch.from_numpy(joined([row.ids for row in rows], np.int64)), device),
        lengths=[len(row.ids) for row in rows],
        shared=shared_tokens(rows),
        trained=torch.from_numpy(trained),
        behaviour_logprobs=upload(behaviour.to(dtype), device),
        advantages=own([r.token_advantages for r in rows]) if by_token else each_token([r.advantage for r in rows]),
        weights=each_token([row.weight for row in rows]),
        trained_lengths=counts,
        inputs={name: own([row.inputs[name] for row in rows]) for name in rows[0].inputs},
    )


def joined(lists: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), dtype, sum(len(values) for values in lists))


Result = TypeVar("Result")


class Budgeted(Protocol):
    token_budget: int  # of a micro-batch; halved, for good, whenever one does not fit
    mesh: Mesh


def retry_on_oom(owner: Budgeted, model: PolicyModel, rows: Sequence[Row], work: Callable[[], Result]) -> Result:
    """What `work` gives, which goes through the rows by micro-batches of the owner's budget and may be begun anew.

    Where memory does not suffice, on this rank or another, all of them go on with a smaller budget.
    """
    while True:
        failure = None
        try:
            result = work()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if in_lockstep(model, owner.mesh):  # the others wait in the middle of a pass: there is no way back
                raise UserError(
                    f"rank {owner.mesh.rank} ran out of memory: lower train.token_budget, now {owner.token_budget}, "
                    "or spread the model over more devices"
                ) from error
            failure = error.with_traceback(None)  # its frames would hold on to what did not fit
        if not owner.mesh.any(failure is not None):
            return result
        halve_token_budget(owner, rows, failure)


def halve_token_budget(owner: Budgeted, rows: Sequence[Row], failure: BaseException | None) -> None:
    """Halve the budget, unless a single sequence is already all there is in a micro-batch."""
    longest = max(len(row.ids) for row in rows)
    if owner.token_budget <= longest:
        where = "out of memory" if failure else "another rank ran out of memory"
        raise UserError(
            f"{where} with a single sequence, of up to {longest} tokens: set train.recompute = true or "
            "engine.sleep_while_training = true, lower engine.memory, or lower sampling.max_new_tokens"
        ) from failure
    owner.token_budget = max(min(owner.token_budget, sum(len(row.ids) for row in rows)) // 2, longest)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warnings.warn(f"out of memory: going on with train.token_budget = {owner.token_budget}", stacklevel=2)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
