"""What a loss is asked about, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    lengths: Sequence[int] | None = None  # trained tokens of each sequence: given where whole ones are looked at
    marked: Tensor | None = None  # bool: tokens to hold back, from Algorithm.marks


@dataclass(frozen=True)
class LossOut:
    total: Tensor  # call backward on it; micro-batches accumulate by plain addition
    sums: Sums


def sums_of(
    batch: LossBatch, ratio: Tensor, total: Tensor, terms: dict[str, Tensor], per_token: dict[str, Tensor]
) -> Sums:
    """What can be added over micro-batches and ranks. The keys depend on the settings only, so empty batches fit too.

    `mismatch/*` compares trainer and engine on the same tokens. Where the behaviour log-probs are the engine's own, the
    trainer's side is the policy as it is now, so it is pure mismatch at the first update after a rollout only.
    """
    with torch.no_grad():
        if batch.engine_logprobs is None:
            trainer, engine = batch.logprobs, batch.behaviour_logprobs
        else:
            trainer, engine = batch.behaviour_logprobs, batch.engine_logprobs
        difference = (trainer - engine).abs()
        per_token = per_token | {
            "policy/logprob": batch.logprobs,
            "policy/ratio_mean": ratio,
            "mismatch/logprob_abs_diff": difference,
            "mismatch/kl": k3(engine, trainer),  # KL(engine || trainer): the engine is who sampled
        }
        largest = {"policy/ratio_max": ratio, "mismatch/logprob_abs_diff_max": difference}
        return Sums(
            tokens=_precise(torch.ones_like(ratio)).sum(),
            losses={key: _precise(value) for key, value in ({"loss/total": total} | terms).items()},
            per_token={key: _precise(values).sum() for key, values in per_token.items()},
            largest={key: torch.cat([_precise(values), values.new_zeros(1)]).max() for key, values in largest.items()},
        )


def _precise(values: Tensor) -> Tensor:
    """Float64 where the device has it (mps has not), so that counts and long sums stay exact."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
