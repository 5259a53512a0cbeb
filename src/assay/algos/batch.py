"""The input and output of a loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.algos.kl import k3
from assay.algos.sums import Sums


@dataclass(frozen=True)
class LossBatch:
    """Packed 1-D tensors of equal length: the trained tokens of a micro-batch, and only those."""

    logprobs: Tensor  # of the policy being trained, with gradient
    behaviour_logprobs: Tensor  # of the policy that sampled
    advantages: Tensor
    weights: Tensor  # from token_weights, over the whole global batch
    entropy: Tensor | None = None  # with gradient where there is an entropy bonus
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None  # given where behaviour_logprobs are the trainer's, to measure the mismatch
    lengths: Sequence[int] | None = None  # trained tokens of each sequence, where `Needs.whole_sequences`
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # the `TokenInput`s of all terms, by name


@dataclass(frozen=True)
class LossOut:
    total: Tensor  # call backward on it; micro-batches accumulate by plain addition
    sums: Sums


def sums_of(
    batch: LossBatch, losses: dict[str, Tensor], means: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
) -> Sums:
    """Metrics that can be added over micro-batches and ranks. The keys depend on the settings only, not on the batch.

    `mismatch/*` compares trainer and engine on the same tokens. Where the behaviour log-probs are the engine's own, the
    trainer's side is the current policy, so only the first update after a rollout measures the mismatch alone.
    """
    with torch.no_grad():
        if batch.engine_logprobs is None:
            trainer, engine = batch.logprobs, batch.behaviour_logprobs
        else:
            trainer, engine = batch.behaviour_logprobs, batch.engine_logprobs
        difference = (trainer - engine).abs()
        per_token = {
            **means,
            "policy/logprob": batch.logprobs,
            "mismatch/logprob_abs_diff": difference,
            "mismatch/kl": k3(engine, trainer),  # KL(engine || trainer): the engine is the sampler
        }
        largest = {**maxima, "mismatch/logprob_abs_diff_max": difference}
        return Sums(
            tokens=_precise(torch.ones_like(difference)).sum(),
            losses={key: _precise(value) for key, value in losses.items()},
            per_token={key: _precise(values).sum() for key, values in per_token.items()},
            largest={key: torch.cat([_precise(values), values.new_zeros(1)]).max() for key, values in largest.items()},
        )


def _precise(values: Tensor) -> Tensor:
    """Float64 where the device has it (mps has not), so that counts and long sums stay exact."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
