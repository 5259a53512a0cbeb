"""Rollouts -> micro-batches: packed tokens and the inputs of the loss. Token weights are computed before any split.

Work that runs out of memory is repeated with smaller micro-batches.
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
from assay.models.device import is_deterministic, upload
from assay.training.parallel import in_lockstep
from assay.types import Group, Rollout, UserError

MIN_SHARED = 0.1  # share of all tokens from which prefix sharing pays: attention in two parts takes a little longer
TRAINER_LOGPROBS = "trainer_logprobs"  # input: the trainer's log-probabilities before its first update on a batch
PIECES = 4  # per data-parallel rank, if there are enough rows


@dataclass(frozen=True)
class Row:
    """One sequence to train on."""

    ids: list[int]
    trained: list[int]  # 1 for tokens in the loss
    behaviour_logprobs: list[float]  # of the sampler, aligned with ids
    advantage: float
    weight: float  # of each trained token in the loss of the whole batch
    # One value per trained token:
    advantages: list[float] | None = None  # replaces `advantage` if steps or tokens have their own credit
    inputs: Mapping[str, Sequence[float]] = field(default_factory=dict)  # inputs that the algorithm declares, by name

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first trained one."""
        return tuple(self.ids[: self.trained.index(1)] if self.count else self.ids)

    @cached_property
    def count(self) -> int:
        """Number of trained tokens."""
        return sum(self.trained)

    @property
    def token_advantages(self) -> list[float]:
        return [self.advantage] * self.count if self.advantages is None else self.advantages

    @property
    def sampled_logprobs(self) -> list[float]:
        """One per trained token: the trainer's if they were computed, else the sampler's."""
        if TRAINER_LOGPROBS in self.inputs:
            return list(self.inputs[TRAINER_LOGPROBS])
        return [logprob for logprob, trained in zip(self.behaviour_logprobs, self.trained, strict=True) if trained]

    @classmethod
    def of(cls, rollout: Rollout, weight: float = 0.0, inputs: Sequence[TokenInput] = ()) -> Row:
        """Only inputs that are computed from a single rollout are filled in."""
        known = rollout.token_ids, rollout.loss_mask, rollout.engine_logprobs, rollout.advantage
        values = {
            token_input.name: token_input.of_rollout(rollout)
            for token_input in inputs
            if token_input.from_rollout is not None
        }
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
    """Rollouts that have a gradient, with the weight of each of their tokens in the loss of the whole batch.

    Masked rollouts, and those with masked turns only, have none. Rollouts with advantage 0 have none either, unless the
    algorithm needs every rollout. Skipping them only saves time: half of it if half the groups have equal rewards.
    """
    every_rollout = algo.needs.every_rollout
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = torch.tensor([0 if rollout.masked else rollout.trained for rollout in rollouts])
    weighted = zip(rollouts, lengths.tolist(), algo.token_weights(lengths).tolist(), strict=True)
    return [(rollout, weight) for rollout, length, weight in weighted if length and (rollout.learns or every_rollout)]


def with_step_inputs(rows: list[Row], algo: Algorithm) -> list[Row]:
    """Add the inputs that are computed from all rows of an optimizer step."""
    for token_input in algo.inputs:
        if token_input.from_rows is not None:
            rows = [
                row.with_input(token_input.name, values)
                for row, values in zip(rows, token_input.of_rows(rows), strict=True)
            ]
    return rows


def split_rows(rows: Sequence[Row], token_budget: int, share_prefixes: bool = False) -> Iterator[list[Row]]:
    """Micro-batches of at most `token_budget` tokens (a longer sequence is a micro-batch by itself).

    Rows with the same prompt are adjacent; with `share_prefixes` their prompt is computed, and counted, once.
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
    """Sort by first occurrence of the prompt, then by length."""
    first: dict[tuple[int, ...], int] = {}
    keys = [(first.setdefault(row.prompt, len(first)), len(row.ids)) for row in rows]
    return [row for _, row in sorted(zip(keys, rows, strict=True), key=lambda pair: pair[0])]


def partition_rows(
    rows: Sequence[Row], dp_size: int, dp_rank: int, token_budget: int, share_prefixes: bool = False
) -> list[list[Row]]:
    """The micro-batches of one data-parallel rank. All ranks get equally many, and about equally many tokens.

    A rank with fewer micro-batches than others is filled up with blank ones (`blank_like`), because ranks exchange
    weights and gradients during each micro-batch.
    """
    if dp_size == 1:
        return list(split_rows(rows, token_budget, share_prefixes))
    # Small pieces balance the ranks; rows with the same prompt stay together within a piece.
    pieces = list(split_rows(rows, max(sum(len(row.ids) for row in rows) // (PIECES * dp_size), 1)))
    shares: list[list[Row]] = [[] for _ in range(dp_size)]
    sizes = [0] * dp_size
    for piece in sorted(pieces, key=lambda piece: -sum(len(row.ids) for row in piece)):  # largest piece first,
        least = sizes.index(min(sizes))  # to the rank with the fewest tokens
        shares[least] += piece
        sizes[least] += sum(len(row.ids) for row in piece)
    parts = [list(split_rows(share, token_budget, share_prefixes)) for share in shares]
    most = max(len(part) for part in parts)
    blank = [blank_like(rows[0])] if rows else []
    return parts[dp_rank] + [blank] * (most - len(parts[dp_rank]))


def blank_like(row: Row) -> Row:
    """A row with one token that is not trained. It has the same inputs as others: all ranks compute the same loss."""
    advantages: list[float] | None = None if row.advantages is None else []
    return Row(row.ids[:1], [0], [0.0], 0.0, 0.0, advantages, {name: [] for name in row.inputs})


def shared_tokens(rows: Sequence[Row]) -> list[int]:
    """The `shared` argument of `PolicyModel.hidden`; all 0 if sharing saves too little."""
    shared = [
        len(row.prompt) if index and row.prompt == rows[index - 1].prompt else 0 for index, row in enumerate(rows)
    ]
    return shared if sum(shared) >= MIN_SHARED * sum(len(row.ids) for row in rows) else [0] * len(rows)


def pack(rows: Sequence[Row], device: torch.device | str, dtype: torch.dtype = torch.float32) -> MicroBatch:
    device = torch.device(device)
    trained_bytes = b"".join(bytes(row.trained) for row in rows)  # three times as fast as from integers
    trained = np.frombuffer(trained_bytes, np.uint8).astype(bool)
    counts = [row.count for row in rows]
    behaviour = torch.from_numpy(joined([row.behaviour_logprobs for row in rows], np.float64)[trained])

    def per_row(values: list[float]) -> Tensor:  # in numpy: torch would wake its thread pool for this
        return upload(torch.from_numpy(np.repeat(np.array(values), counts)).to(dtype), device)

    def per_token(values: Sequence[Sequence[float]]) -> Tensor:
        return upload(torch.from_numpy(joined(values, np.float64)).to(dtype), device)

    own_advantages = any(row.advantages is not None for row in rows)
    return MicroBatch(
        ids=upload(torch.from_numpy(joined([row.ids for row in rows], np.int64)), device),
        lengths=[len(row.ids) for row in rows],
        shared=shared_tokens(rows),
        trained=torch.from_numpy(trained),
        behaviour_logprobs=upload(behaviour.to(dtype), device),
        advantages=per_token([row.token_advantages for row in rows])
        if own_advantages
        else per_row([row.advantage for row in rows]),
        weights=per_row([row.weight for row in rows]),
        trained_lengths=counts,
        inputs={name: per_token([row.inputs[name] for row in rows]) for name in rows[0].inputs},
    )


def joined(lists: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), dtype, sum(len(values) for values in lists))


Result = TypeVar("Result")


class Budgeted(Protocol):
    token_budget: int  # per micro-batch; halved permanently when one does not fit into memory
    mesh: Mesh


def score_rows(
    owner: Budgeted,
    model: PolicyModel,
    rows: Sequence[Row],
    score: Callable[[MicroBatch], Tensor],
    dtype: torch.dtype,
    share_prefixes: bool,
) -> list[list[float]]:
    """The values [M] that `score` computes for the trained tokens of micro-batches, as one list per row.

    The rows are divided among the data-parallel ranks; every rank gets all results.
    """

    def score_own() -> list[tuple[Row, list[float]]]:
        scores: list[tuple[Row, list[float]]] = []
        for part in partition_rows(rows, mesh.dp_size, mesh.dp_rank, owner.token_budget, share_prefixes):
            batch = pack(part, model.device, dtype)
            values = score(batch).cpu().split(batch.trained_lengths)
            scores += zip(part, map(Tensor.tolist, values), strict=True)
        return scores

    mesh = owner.mesh
    return gather_by_row(rows, retry_on_oom(owner, model, rows, score_own), mesh)


def gather_by_row(rows: Sequence[Row], own: Sequence[tuple[Row, Result]], mesh: Mesh) -> list[Result]:
    """What the ranks have computed for the rows. `own`: the rows of this rank with their results."""
    index = {id(row): number for number, row in enumerate(rows)}
    by_number = {index.get(id(row), -1): result for row, result in own}  # -1: a blank row
    every = {number: result for part in mesh.all_gather_objects(by_number) for number, result in part.items()}
    return [every[number] for number in range(len(rows))]


def retry_on_oom(owner: Budgeted, model: PolicyModel, rows: Sequence[Row], work: Callable[[], Result]) -> Result:
    """The result of `work`, which processes the rows by micro-batches of the owner's budget and can be repeated.

    If memory runs out on any rank, all ranks halve the budget and repeat the work.
    """
    while True:
        failure = None
        try:
            result = work()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if in_lockstep(model, owner.mesh):  # the other ranks wait in a collective: the pass cannot be repeated
                raise UserError(
                    f"rank {owner.mesh.rank} ran out of memory: lower train.token_budget, now {owner.token_budget}, "
                    "or shard the model over more devices"
                ) from error
            failure = error.with_traceback(None)  # its frames keep tensors alive
        if not owner.mesh.any(failure is not None):
            return result
        halve_token_budget(owner, rows, failure)


def halve_token_budget(owner: Budgeted, rows: Sequence[Row], failure: BaseException | None) -> None:
    """Raise a UserError if a micro-batch with a single sequence did not fit."""
    longest = max(len(row.ids) for row in rows)
    if owner.token_budget <= longest:
        where = "out of memory" if failure else "another rank ran out of memory"
        raise UserError(
            f"{where} with a single sequence of up to {longest} tokens: set train.activation_checkpointing = true, "
            "optim.precision = '8bit' or engine.sleep_while_training = true, or lower engine.kv_cache_gib or "
            "sampling.max_new_tokens"
        ) from failure
    used, smaller = owner.token_budget, max(min(owner.token_budget, sum(len(row.ids) for row in rows)) // 2, longest)
    if is_deterministic():
        raise UserError(
            f"out of memory, and train.deterministic = true forbids smaller micro-batches, whose sums differ in the "
            f"last bits: lower train.token_budget, now {used}, e.g. to {smaller}, and start again"
        ) from failure
    owner.token_budget = smaller
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    warnings.warn(f"out of memory: continuing with train.token_budget = {owner.token_budget}", stacklevel=2)


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
