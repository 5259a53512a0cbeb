"""What the engine is working on, seen from the host: requests as jobs, and the samples drawn for them. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from assay.engine.base import Request
from assay.types import UserError


@dataclass(slots=True)
class PromptJob:
    """One request: its prompt is computed once, then its samples enter as there is room."""

    index: int  # of the request in this call
    request: Request
    limit: int  # new tokens that each sample may have
    started: int = 0  # samples that have entered

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def left(self) -> int:
        return self.request.params.n - self.started

    @property
    def name(self) -> str:
        return name_of(self.request, self.index)


@dataclass(slots=True)
class Sample:
    """One running sequence. Its slot is its place in the scheduler's list."""

    job: PromptJob
    index: int  # within its request
    entered: int  # the step it came in
    watched: list[int] = field(default_factory=list)  # its tokens, where stop strings are to be found in them

    def length(self, step: int) -> int:
        """Tokens that the cache holds for it before `step` is computed."""
        return self.job.length + step - self.entered


def name_of(request: Request, index: int) -> str:
    return f"request '{request.name}'" if request.name else f"request {index}"


def jobs_for(requests: Sequence[Request], max_length: int, vocab_size: int, can_decode: bool) -> list[PromptJob]:
    """Check what was asked for, before anything is computed."""
    jobs = []
    for index, request in enumerate(requests):
        name, length = name_of(request, index), len(request.prompt_ids)
        if length == 0:
            raise UserError(
                f"{name}: the prompt is empty (0 tokens; the context holds {max_length}): give at least one token"
            )
        if length >= max_length:
            raise UserError(
                f"{name}: the prompt has {length} tokens but the context holds {max_length}, answer included: "
                "shorten the prompt or raise the maximum length"
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
            raise UserError(
                f"{name}: the prompt has token ids outside the vocabulary of {vocab_size}: wrong tokenizer?"
            )
        if request.params.stop and not can_decode:
            raise UserError(f"{name}: stop strings need an engine that was given `decode`; use stop tokens or pass it")
        if "" in request.params.stop:
            raise UserError(f"{name}: a stop string is empty; remove it")
        jobs.append(PromptJob(index, request, min(request.params.max_new_tokens, max_length - length)))
    return jobs
