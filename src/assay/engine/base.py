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
    min_p: float = 0.0  # 0: off; else tokens less likely than this share of the likeliest one are not drawn
    max_new_tokens: int = 256
    min_new_tokens: int = 0  # stop tokens are not drawn before there are as many
    stop_token_ids: tuple[int, ...] = ()  # the stop token is kept as the completion's last token
    stop: tuple[str, ...] = ()  # stop strings; the token that completes one is kept
    forbidden_token_ids: tuple[int, ...] = ()  # never drawn

    @property
    def truncates(self) -> bool:
        """Whether some tokens that the model would draw cannot be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def complaint(self) -> str:
        """What is wrong with these values, in one line; empty if nothing is."""
        checks = [
            (self.n >= 1, f"samples must be at least 1, not {self.n}"),
            (self.temperature >= 0, f"temperature must be 0 (greedy) or more, not {self.temperature}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}"),
            (0 < self.top_p <= 1, f"top_p must be above 0 and at most 1 (off), not {self.top_p}"),
            (0 <= self.min_p <= 1, f"min_p must be between 0 (off) and 1, not {self.min_p}"),
            (self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}"),
            (self.min_new_tokens >= 0, f"min_new_tokens must be 0 or more, not {self.min_new_tokens}"),
            ("" not in self.stop, "a stop string is empty; remove it"),
        ]
        return next((complaint for fine, complaint in checks if not fine), "")


@dataclass(frozen=True, slots=True)
class Request:
    prompt_ids: Sequence[int]  # of a continuation: what comes after the sequence so far
    params: SamplingParams
    seed: int  # 64-bit; noise for a token is keyed by (seed, sample index, position) and nothing else
    name: str = ""  # what error messages call it, e.g. the prompt's id
    keep: bool = False  # keep what was computed, so that the completion's `handle` can be continued
    continues: int | None = None  # handle of a kept completion; continuing uses it up


class RequestError(UserError):
    """Some requests failed; the others are finished, and here."""

    def __init__(self, errors: dict[int, str], completions: list[list[Completion]]) -> None:
        more = f" ({len(errors) - 1} more requests failed)" if len(errors) > 1 else ""
        super().__init__(errors[min(errors)] + more)
        self.errors = errors  # by the request's index
        self.completions = completions  # as `generate` returns them; those of failed requests are missing


# (request index, sample index, token id), called for every token soon after it is drawn, in order
OnToken = Callable[[int, int, int], None]
# (request index, sample index, completion), called for every completion as it is finished
OnFinish = Callable[[int, int, Completion], None]
# (whether there is nothing else to do) -> requests that have come up meanwhile, which join those that are being served
More = Callable[[bool], Sequence["Request"]]


class Engine(Protocol):
    version: int  # of the weights it serves
    max_length: int  # longest prompt + completion, in tokens
    max_batch: int  # sequences decoded at once
    dtype: torch.dtype  # of the weights it serves

    def generate(
        self,
        requests: Sequence[Request],
        on_token: OnToken | None = None,
        on_finish: OnFinish | None = None,
        more: More | None = None,
    ) -> list[list[Completion]]:
        """For each request, in order, its `params.n` completions, in order of sample index.

        A request that cannot be served does not keep the others from finishing: then a `RequestError` names it.
        `more` is asked between stretches of decoding. What it returns is counted on from `requests` and may continue
        what `on_finish` was just given. With nothing else to do it may wait, and the call ends if it returns nothing.
        """
        ...

    def release(self, handles: Iterable[int]) -> None:
        """Let go of kept completions that will not be continued."""
        ...

    def forget(self) -> None:
        """Drop prompts remembered from earlier calls: what comes next depends on nothing that came before."""
        ...

    def rest(self) -> None:
        """Until the next call to `generate` others may need the memory: what can be lent to them is."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights (Hugging Face names, full tensors) into place and drop everything computed with earlier ones."""
        ...

    def fingerprint(self) -> str:
        """Over canonical names in the engine's own dtype: proof of what is being served."""
        ...
