"""Whose probabilities are compared, and over what: ratios of whole sequences, and engine against trainer.

Sequences lie one after the other in the packed tensors [N]; `lengths` are the trained tokens of each. All of them have
to be there in whole, so whatever uses these functions is never asked about a slice of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from assay.algos.batch import LossBatch
from assay.algos.component import Component, Needs, RunFacts, check_order
from assay.config.algorithm import ImportanceConfig

MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range, and float32 overflows at 88


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """pi(token) / mu(token), the log-ratio held within +-20 so that one absurd token cannot make the loss infinite."""
    return (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def over_sequences(values: Tensor, lengths: Sequence[int], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """One value a sequence, at each of its tokens. In a fixed order, so that it is the same in every run."""
    assert sum(lengths) == len(values), "sequences must be whole"
    parts = [reduce(part).expand(len(part)) for part in values.split(list(lengths)) if len(part)]
    return torch.cat(parts) if parts else values


def sequence_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, lengths: Sequence[int]) -> Tensor:
    """Log-probabilities whose ratio to `behaviour_logprobs` is the geometric mean over the token's sequence (GSPO).

    Each has the gradient of its own token's (GSPO-token). Summed over a sequence with one advantage and one weight,
    that is the gradient of GSPO itself, and with an advantage of its own for each turn it still makes sense.
    """
    log_ratio = over_sequences((logprobs - behaviour_logprobs).detach(), lengths, torch.mean)
    return behaviour_logprobs + log_ratio + (logprobs - logprobs.detach())


def correction(
    mode: str, trainer_logprobs: Tensor, engine_logprobs: Tensor, low: float, high: float, lengths: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    """(weight, whether it was held back) of each token: how likely the trainer found it when the engine sampled it.

    - "token_*": the ratio of each token; "sequence_*": of the whole sequence, the product of its tokens'.
    - "*_truncate": held within [low, high], min(ratio, high) with low = 0; "*_mask": 0 outside of it.
    """
    log_ratio = (trainer_logprobs - engine_logprobs).detach()
    if mode.startswith("sequence"):
        assert lengths is not None, "a correction by sequences has to know them"
        log_ratio = over_sequences(log_ratio, lengths, torch.sum)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    outside = (ratio < low) | (ratio > high)
    held = ratio.clamp(low, high) if mode.endswith("truncate") else ratio.masked_fill(outside, 0.0)
    return held, outside


class ImportanceCorrection(Component):
    """Weights tokens by how much likelier the trainer finds them than the engine that sampled them."""

    def __init__(self, settings: ImportanceConfig) -> None:
        self.settings = settings

    @property
    def needs(self) -> Needs:
        mode = self.settings.correction
        return Needs(
            trainer_logprobs=self.settings.rescore or mode is not None,
            whole_sequences=mode is not None and mode.startswith("sequence"),
        )

    def check(self) -> None:
        check_order("correction_low", self.settings.correction_low, "correction_high", self.settings.correction_high)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.correction is None:
            yield "algo.correction is not set", ["algo.correction_low", "algo.correction_high"]

    def apply(self, losses_N: Tensor, batch: LossBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mode = self.settings.correction
        if mode is None:
            return losses_N, {}
        assert batch.engine_logprobs is not None, "needs.trainer_logprobs"
        bounds = self.settings.correction_low, self.settings.correction_high
        weight, held = correction(mode, batch.behaviour_logprobs, batch.engine_logprobs, *bounds, batch.lengths)
        return weight * losses_N, {"mismatch/weight": weight, "mismatch/held_fraction": held}
