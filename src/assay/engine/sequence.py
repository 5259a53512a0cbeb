"""What the engine is working on, seen from the host: jobs, the prefixes they start from, their samples. No tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from assay.engine.base import Request
from assay.engine.columns import FORBIDDEN_SLOTS, STOP_SLOTS
from assay.types import UserError

NEVER = 1 << 60  # steps


@dataclass(slots=True)
class Job:
    """One request."""

    index: int  # in this call
    request: Request
    tokens: Sequence[int]  # all that comes before the first new token
    limit: int  # new tokens that each sample may have

    @property
    def name(self) -> str:
        return name_of(self.request, self.index)


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
    done: bool = False

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
        """Tokens in the cache after so many steps: the first feeds one that is there, the last draw is not fed."""
        return self.start + max(0, min(steps, self.job.limit - len(self.drawn)) - 1)


@dataclass(slots=True, eq=False)
class Prefix:
    """Tokens to be computed, once, and the samples that then start from them."""

    tokens: Sequence[int]
    samples: deque[Sample]  # yet to start
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose computation has been scheduled

    @property
    def ready(self) -> bool:
        return self.computed == len(self.tokens)


@dataclass(slots=True)
class Kept:
    """A finished sequence that may be continued. Its blocks can be taken away: then it is computed again."""

    tokens: list[int]
    blocks: list[int]

    @property
    def stored(self) -> int:
        """Tokens that the blocks hold: not the last one, which was drawn and never fed."""
        return len(self.tokens) - 1 if self.blocks else 0


def name_of(request: Request, index: int) -> str:
    return f"request '{request.name}'" if request.name else f"request {index}"


def nothing_kept(request: Request, index: int) -> UserError:
    return UserError(
        f"{name_of(request, index)}: there is nothing to continue under handle {request.continues}: "
        "it was not kept, or it was continued or released before"
    )


def job_for(
    request: Request,
    index: int,
    before: Sequence[int],
    *,
    max_length: int,
    vocabulary: int,
    can_decode: bool,
) -> Job:
    """Check what was asked for, before anything is computed. `before`: the sequence that is continued."""
    name, params = name_of(request, index), request.params
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
    return Job(index, request, tokens, min(params.max_new_tokens, max_length - length))


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
