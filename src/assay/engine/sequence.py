"""Requests that are being served, as the host sees them: jobs, samples, prefixes, kept sequences. No tensors.

Also the layout of the rows that the device holds for running samples, the validation of requests, and statistics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from assay.engine.base import EngineInfo, Request
from assay.types import UserError

BLOCK_SIZE = 8  # tokens per block of the KV cache
STOP_SLOTS = 16  # maximum number of stop tokens per row
FORBIDDEN_SLOTS = 64  # maximum number of forbidden tokens per row
NEVER = 1 << 60  # a step that is not reached


class Column(IntEnum):
    """Columns of the integers of a row. STOP_SLOTS stop tokens follow (-1: unused)."""

    TOKEN = 0  # input of the next step
    POSITION = 1  # of that token in its sequence
    STORED = 2  # tokens of the sequence that are already in the KV cache and are not written again
    COUNT = 3  # tokens sampled so far
    LIMIT = 4  # maximum number of sampled tokens
    MIN_NEW = 5  # stop tokens are forbidden until this number of tokens is sampled
    KEY = 6  # of the sampling noise
    TOP_K = 7  # 0: off
    STATE = 8
    FORBIDDEN = 9  # number of forbidden tokens
    STOPS = 10  # the first stop token


class RowState(IntEnum):
    """State of a row. If several conditions end a sequence in the same step, the larger value is reported."""

    RUNNING = 0
    LENGTH = 1
    STOP = 2
    BROKEN = 3  # the logits contain NaN
    IDLE = 4  # unused


WIDTH = Column.STOPS + STOP_SLOTS


class Modes(NamedTuple):
    """What the sampler must support for a request, or for the running rows."""

    greedy: bool = False
    random: bool = False
    truncate: bool = False
    forbids: bool = False  # some rows have forbidden tokens or a minimum length


@dataclass(slots=True)
class Job:
    """One request that is being served."""

    id: int
    request: Request
    tokens: Sequence[int]  # all tokens before the first new one
    limit: int  # maximum number of new tokens per sample
    samples: list[Sample] = field(default_factory=list, compare=False)
    unfinished: int = 0  # samples that are neither finished nor aborted
    modes: Modes = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.params
        forbids = bool(params.forbidden_token_ids or (params.min_new_tokens and params.stop_token_ids))
        self.modes = Modes(params.temperature == 0, params.temperature > 0, params.truncates, forbids)
        self.unfinished = params.n
        self.samples = [Sample(self, index) for index in range(self.unfinished)]

    @property
    def name(self) -> str:
        return display_name(self.request, self.id)

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sample, with its prompt."""
        return len(self.tokens) + self.limit


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence being sampled. It enters a row when it is admitted, and again after each preemption."""

    job: Job
    index: int  # within its request
    drawn: Sequence[int] = ()  # tokens sampled before preemptions
    blocks: list[int] = field(default_factory=list)
    shared_blocks: int = 0  # number of leading blocks that other sequences may use, or find in the prefix index
    blocks_in_table: int = 0  # number of blocks in the block table of its row
    row: int = -1  # -1: not running
    entered: int = 0  # step of its first token since it last entered
    last_step: int = 0  # `end` and
    blocks_exhausted_at: int = 0  # `exhausts_blocks_at`, cached when it enters or gets blocks
    spans: list[tuple[int, int]] = field(default_factory=list)  # (row, first step in it) since it last entered
    scores: Sequence[np.ndarray] = ()  # of `drawn`: kept mass and entropy [2, tokens] per period between preemptions
    versions: Sequence[tuple[int, int]] = ()  # of `drawn`: (weights version, number of tokens)
    mixed: bool = False  # its KV cache comes from several weights versions
    done: bool = False  # finished or aborted
    # Of all tokens that are converted so far: for its completion.
    token_ids: list[int] = field(default_factory=list)
    engine_logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Number of tokens of its sequence when it last entered; all of them are in the KV cache."""
        return len(self.job.tokens) + len(self.drawn)

    @property
    def end(self) -> int:
        """The step by which it has reached its token limit."""
        return self.entered + self.job.limit - len(self.drawn)

    def exhausts_blocks_at(self, block_size: int) -> int:
        """The step up to which its blocks suffice; `NEVER` if they suffice to its end."""
        step = self.entered + len(self.blocks) * block_size - self.start + 1
        return step if step < self.end else NEVER

    def stored(self, steps: int) -> int:
        """Tokens in the KV cache after `steps` steps: the first input is stored already, the last token is not fed."""
        drawn = len(self.drawn)
        fed = min(steps, self.job.limit - drawn) - 1
        return len(self.job.tokens) + drawn + (fed if fed > 0 else 0)


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens that are computed once, and the samples that start from them."""

    tokens: Sequence[int]
    samples: deque[Sample]  # not started yet
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose computation has been scheduled
    mixed: bool = False  # some of its blocks were computed with earlier weights: other sequences must not use them

    def drop_blocks(self) -> list[int]:
        """Start over; return the blocks to release."""
        blocks, self.blocks, self.computed, self.mixed = self.blocks, [], 0, False
        return blocks

    @property
    def ready(self) -> bool:
        return self.computed == len(self.tokens)


@dataclass(slots=True)
class Kept:
    """A finished sequence that can be continued. If its blocks are evicted, it is computed again."""

    tokens: list[int]
    blocks: list[int]
    mixed: bool = False  # some of its blocks were computed with earlier weights than the current ones

    def drop_blocks(self) -> list[int]:
        """Return the blocks to release."""
        blocks, self.blocks, self.mixed = self.blocks, [], False
        return blocks

    @property
    def stored(self) -> int:
        """Number of tokens in the blocks: all but the last one, which was sampled and never an input."""
        return len(self.tokens) - 1 if self.blocks else 0


def close_gaps(running: list[Sample], gone: Sequence[Sample], step: int) -> list[tuple[int, int]]:
    """Remove samples from the rows; return the moves (from, to) of rows that fill the gaps."""
    rows = {sample.row for sample in gone}
    kept = len(running) - len(rows)
    gaps = sorted(row for row in rows if row < kept)
    movers = [row for row in range(kept, len(running)) if row not in rows]
    for sample in gone:
        sample.row = -1
    moves = list(zip(movers, gaps, strict=True))
    for source, destination in moves:
        sample = running[destination] = running[source]
        sample.row = destination
        sample.spans.append((destination, step))
    del running[kept:]
    return moves


def assign_slot(sample: Sample, running: list[Sample], step: int) -> None:
    """Assign the next row to a sample."""
    sample.row, sample.entered, sample.blocks_in_table = len(running), step, 0
    sample.spans = [(sample.row, step)]
    running.append(sample)


def display_name(request: Request, request_id: int) -> str:
    return f"request '{request.name}'" if request.name else f"request {request_id}"


def unknown_handle(request: Request, request_id: int) -> UserError:
    return UserError(
        f"{display_name(request, request_id)}: handle {request.continues} cannot be continued: "
        "it is unknown, or it was continued or released before"
    )


def job_for(request: Request, request_id: int, before: Sequence[int], info: EngineInfo, can_decode: bool) -> Job:
    """Validate a request before anything is computed. `before`: tokens of the sequence that it continues."""
    name, params = display_name(request, request_id), request.params
    max_length, vocabulary = info.max_length, info.vocab_size
    if problem := params.problem():
        raise UserError(f"{name}: {problem}")
    tokens = [*before, *request.prompt_ids]
    length = len(tokens)
    if length == 0:
        raise UserError(
            f"{name}: the prompt is empty (0 tokens; the context has {max_length}): provide at least one token"
        )
    if length >= max_length:
        raise UserError(
            f"{name}: the prompt has {length} tokens, and the context has {max_length} for prompt and completion: "
            "shorten the prompt, or raise model.max_length or engine.kv_cache_gib, whichever is the limit"
        )
    if request.prompt_ids and (min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary):
        raise UserError(f"{name}: the prompt has token ids outside the vocabulary of {vocabulary}: wrong tokenizer?")
    if params.stop and not can_decode:
        raise UserError(f"{name}: stop strings need an engine with a `decode` function: pass one, or use stop tokens")
    check_token_lists(request, name, vocabulary)
    return Job(request_id, request, tokens, min(params.max_new_tokens, max_length - length))


def check_token_lists(request: Request, name: str, vocabulary: int) -> None:
    stops, forbidden = set(request.params.stop_token_ids), set(request.params.forbidden_token_ids)
    for kind, ids, most in (("stop", stops - forbidden, STOP_SLOTS), ("forbidden", forbidden, FORBIDDEN_SLOTS)):
        if len(ids) > most:
            raise UserError(f"{name}: {len(ids)} {kind} tokens are more than the maximum of {most}")
    if any(not 0 <= token < vocabulary for token in forbidden):
        raise UserError(f"{name}: a forbidden token is outside the vocabulary of {vocabulary}: wrong tokenizer?")
    early = stops if request.params.min_new_tokens else set()  # forbidden until min_new_tokens
    if any(not 0 <= token < vocabulary for token in early):
        raise UserError(f"{name}: a stop token is outside the vocabulary of {vocabulary}: wrong tokenizer?")
    if len(forbidden | early) >= vocabulary:
        raise UserError(f"{name}: every token of the vocabulary is forbidden: no token could be sampled")


def check_scored(sequences: Sequence[Sequence[int]], temperature: float, info: EngineInfo) -> None:
    """Check the arguments of `Engine.score`."""
    if not temperature > 0:
        raise UserError(f"score: the temperature must be above 0, not {temperature}")
    for index, sequence in enumerate(sequences):
        where, vocabulary = f"score: sequence {index} has", info.vocab_size
        if not 0 < len(sequence) <= info.max_length:
            raise UserError(f"{where} {len(sequence)} tokens: it must have 1 to {info.max_length}")
        if min(sequence) < 0 or max(sequence) >= vocabulary:
            raise UserError(f"{where} token ids outside the vocabulary of {vocabulary}: wrong tokenizer?")


def batches_of(sequences: Sequence[Sequence[int]], budget: int) -> Iterator[slice]:
    """Consecutive sequences with at most `budget` tokens together, or one sequence."""
    first = tokens = 0
    for index, sequence in enumerate(sequences):
        if index > first and tokens + len(sequence) > budget:
            yield slice(first, index)
            first, tokens = index, 0
        tokens += len(sequence)
    if sequences:
        yield slice(first, len(sequences))


@dataclass(slots=True)
class Stats:
    """Counters of the native engine since they were last reset."""

    prefill_tokens: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    preemptions: int = 0
    windows: int = 0  # groups of steps between two reads of results
    kv_slots: int = 0  # token slots of the blocks in use, summed over the windows that were measured
    empty_kv_slots: int = 0  # of these, slots without a token
    peak_kv_slots: int = 0
    kv_waste_peak: float = 0.0  # fraction of empty slots when most were in use

    @property
    def kv_waste(self) -> float:
        """Mean fraction of the slots in use that have no token."""
        return self.empty_kv_slots / max(self.kv_slots, 1)
