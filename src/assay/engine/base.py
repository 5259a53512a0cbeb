"""The one interface to generation: token ids in; tokens, log-probabilities and finish reasons out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from assay.types import Completion, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    n: int = 1  # samples a prompt
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()  # the stop token is kept as the completion's last token
    stop: tuple[str, ...] = ()  # stop strings; the token that completes one is kept

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UserError(f"samples must be at least 1, not {self.n}")
        if self.temperature < 0:
            raise UserError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1 (off), not {self.top_p}")
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: Sequence[int]
    params: SamplingParams
    seed: int  # 64-bit; noise for a token is keyed by (seed, sample index, position) and nothing else
    name: str = ""  # what error messages call it, e.g. the prompt's id


# (request index, sample index, token id), called for every token as it is drawn
OnToken = Callable[[int, int, int], None]


class Engine(Protocol):
    version: int  # of the weights it serves
    max_length: int  # longest prompt + completion, in tokens
    dtype: torch.dtype  # of the weights it serves

    def generate(self, requests: Sequence[Request], on_token: OnToken | None = None) -> list[list[Completion]]:
        """For each request, in order, its `params.n` completions, in order of sample index."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights (Hugging Face names, full tensors) into place and drop everything computed with earlier ones."""
        ...

    def fingerprint(self) -> str:
        """Over canonical names in the engine's own dtype: proof of what is being served."""
        ...
