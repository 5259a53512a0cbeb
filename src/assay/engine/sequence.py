"""What the device keeps for each running sequence: one row of integers, one of floats. No tensors here.

What the engine is working on, as the host sees it: jobs, the prefixes they start from, their samples. No tensors.

What an engine counts while it serves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from assay.engine.base import Request
from assay.types import UserError

BLOCK_SIZE = 8  # tokens in one block of the cache
STOP_SLOTS = 16  # stop tokens a row can hold
FORBIDDEN_SLOTS = 64  # forbidden tokens a row can hold


class Column(IntEnum):
    """Of the integers; STOP_SLOTS stop tokens follow (-1 where unused)."""

    TOKEN = 0  # to be fed next
    POSITION = 1  # of that token in its sequence
    STORED = 2  # tokens of the sequence that the cache holds already; these are not written again
    COUNT = 3  # tokens drawn
    LIMIT = 4  # tokens that may be drawn
    MIN_NEW = 5  # stop tokens are forbidden while fewer than this were drawn
    KEY = 6  # of the noise
    TOP_K = 7  # 0: off
    STATE = 8
    FORBIDDEN = 9  # entries of the row in the table of forbidden tokens
    STOPS = 10  # the first of the stop tokens


class RowState(IntEnum):
    """Of those that end a sequence the larger wins where several hold at once."""

    RUNNING = 0
    LENGTH = 1
    STOP = 2
    BROKEN = 3  # the logits were not numbers
    IDLE = 4  # nobody's row


WIDTH = Column.STOPS + STOP_SLOTS


NEVER = 1 << 60  # steps


@dataclass(slots=True)
class Job:
    """One request that is being served."""

    id: int
    request: Request
    tokens: Sequence[int]  # everything before the first new token
    limit: int  # maximum number of new tokens per sample
    samples: list[Sample] = field(default_factory=list, compare=False)
    unfinished: int = 0  # samples that are neither finished nor aborted
    modes: tuple[bool, bool, bool, bool] = (False,) * 4  # greedy, random, truncates, forbids tokens

    def __post_init__(self) -> None:
        params = self.request.params
        forbids = bool(params.forbidden_token_ids or (params.min_new_tokens and params.stop_token_ids))
        self.modes = params.temperature == 0, params.temperature > 0, params.truncates, forbids
        self.unfinished = params.n
        self.samples = [Sample(self, index) for index in range(self.unfinished)]

    @property
    def name(self) -> str:
        return name_of(self.request, self.id)


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence being written."""

    job: Job
    index: int  # within its request
    drawn: list[int] = field(default_factory=list)  # tokens drawn before it last entered: after a preemption
    blocks: list[int] = field(default_factory=list)
    noted: int = 0  # blocks that its row knows of
    row: int = -1  # while it runs
    entered: int = 0  # the step of its first token since it last entered
    last: int = 0  # `end` and
    dry: int = 0  # `lasts_until`, as of when it last entered or grew: they are asked for often
    spans: list[tuple[int, int]] = field(default_factory=list)  # (row, first step there) since it last entered
    scores: list[np.ndarray] = field(default_factory=list)  # of `drawn`, one [4, tokens] for each stay
    versions: list[tuple[int, int]] = field(default_factory=list)  # of `drawn`: (weights version, tokens)
    mixed: bool = False  # its KV cache comes from several weights versions
    done: bool = False  # finished or aborted

    @property
    def start(self) -> int:
        """Tokens of its sequence when it last entered; the cache holds them all."""
        return len(self.job.tokens) + len(self.drawn)

    @property
    def end(self) -> int:
        """The step by which it has drawn all it may."""
        return self.entered + self.job.limit - len(self.drawn)

    def lasts_until(self, block_size: int) -> int:
        """The step up to which its blocks suffice, or never."""
        dry = self.entered + len(self.blocks) * block_size - self.start + 1
        return dry if dry < self.end else NEVER

    def stored(self, steps: int) -> int:
        """Tokens in the cache after `steps` steps. The first feeds a stored token; the last sampled one is not fed."""
        drawn = len(self.drawn)
        fed = min(steps, self.job.limit - drawn) - 1
        return len(self.job.tokens) + drawn + (fed if fed > 0 else 0)


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens to be computed, once, and the samples that then start from them."""

    tokens: Sequence[int]
    samples: deque[Sample]  # yet to start
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose computation has been scheduled
    mixed: bool = False  # some of its blocks were computed with earlier weights: other sequences must not use them

    def drop_blocks(self) -> list[int]:
        """Forget what was computed; returns the blocks to release."""
        blocks, self.blocks, self.computed, self.mixed = self.blocks, [], 0, False
        return blocks

    @property
    def ready(self) -> bool:
        return self.computed == len(self.tokens)


@dataclass(slots=True)
class Kept:
    """A finished sequence that may be continued. Its blocks can be taken away: then it is computed again."""

    tokens: list[int]
    blocks: list[int]
    mixed: bool = False  # some of its blocks were computed with earlier weights than the current ones

    @property
    def stored(self) -> int:
        """Tokens that the blocks hold: not the last one, which was drawn and never fed."""
        return len(self.tokens) - 1 if self.blocks else 0


def close_gaps(running: list[Sample], gone: Sequence[Sample], step: int) -> list[tuple[int, int]]:
    """Take samples out of the rows; returns the moves (from, to) of others, each from behind every gap."""
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
    """Give a sample the next row."""
    sample.row, sample.entered, sample.noted = len(running), step, 0
    sample.spans = [(sample.row, step)]
    running.append(sample)


def name_of(request: Request, request_id: int) -> str:
    return f"request '{request.name}'" if request.name else f"request {request_id}"


def nothing_kept(request: Request, request_id: int) -> UserError:
    return UserError(
        f"{name_of(request, request_id)}: there is nothing to continue under handle {request.continues}: "
        "it was not kept, or it was continued or released before"
    )


def job_for(
    request: Request,
    request_id: int,
    before: Sequence[int],
    *,
    max_length: int,
    vocabulary: int,
    can_decode: bool,
) -> Job:
    """Check what was asked for, before anything is computed. `before`: the sequence that is continued."""
    name, params = name_of(request, request_id), request.params
    if complaint := params.complaint():
        raise UserError(f"{name}: {complaint}")
    tokens = [*before, *request.prompt_ids]
    length = len(tokens)
    if length == 0:
        raise UserError(
            f"{name}: the prompt is empty (0 tokens; the context holds {max_length}): give at least one token"
        )
    if length >= max_length:
        raise UserError(
            f"{name}: the prompt has {length} tokens but the context holds {max_length}, answer included: "
            "shorten the prompt, or raise model.max_length or engine.memory, whichever is the limit"
        )
    if request.prompt_ids and (min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary):
        raise UserError(f"{name}: the prompt has token ids outside the vocabulary of {vocabulary}: wrong tokenizer?")
    if params.stop and not can_decode:
        raise UserError(f"{name}: stop strings need an engine that was given `decode`; use stop tokens or pass it")
    check_token_lists(request, name, vocabulary)
    return Job(request_id, request, tokens, min(params.max_new_tokens, max_length - length))


def check_token_lists(request: Request, name: str, vocabulary: int) -> None:
    stops, forbidden = set(request.params.stop_token_ids), set(request.params.forbidden_token_ids)
    for kind, ids, most in (("stop", stops - forbidden, STOP_SLOTS), ("forbidden", forbidden, FORBIDDEN_SLOTS)):
        if len(ids) > most:
            raise UserError(f"{name}: {len(ids)} {kind} tokens, the engine takes up to {most}: name fewer")
    if any(not 0 <= token < vocabulary for token in forbidden):
        raise UserError(f"{name}: a forbidden token is outside the vocabulary of {vocabulary}: wrong tokenizer?")
    early = stops if request.params.min_new_tokens else set()  # forbidden too, at first
    if any(not 0 <= token < vocabulary for token in early):
        raise UserError(f"{name}: a stop token is outside the vocabulary of {vocabulary}: wrong tokenizer?")
    if len(forbidden | early) >= vocabulary:
        raise UserError(f"{name}: every token of the vocabulary is forbidden: nothing could be drawn")


def check_scored(sequences: Sequence[Sequence[int]], temperature: float, max_length: int, vocabulary: int) -> None:
    """Check the arguments of `Engine.score`."""
    if not temperature > 0:
        raise UserError(f"score: the temperature must be above 0, not {temperature}")
    for place, sequence in enumerate(sequences):
        if not 0 < len(sequence) <= max_length:
            raise UserError(f"score: sequence {place} has {len(sequence)} tokens: it must have 1 to {max_length}")
        if min(sequence) < 0 or max(sequence) >= vocabulary:
            raise UserError(
                f"score: sequence {place} has token ids outside the vocabulary of {vocabulary}: wrong tokenizer?"
            )


@dataclass(slots=True)
class Stats:
    """What the engine did since it was asked to count anew."""

    prefill_tokens: int = 0
    decode_steps: int = 0
    decoded_tokens: int = 0
    preemptions: int = 0
    windows: int = 0  # stretches of steps between two looks of the host
    places: int = 0  # places for tokens in blocks that were in use, added up over windows that were counted
    empty_places: int = 0  # of these, places that held no token
    peak_places: int = 0
    kv_waste_peak: float = 0.0  # share of the places that held no token, when most were in use

    @property
    def kv_waste(self) -> float:
        """Mean share of the places in use that held no token."""
        return self.empty_places / max(self.places, 1)
