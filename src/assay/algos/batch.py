"""Metrics as sums, so that adding them over micro-batches and ranks gives exactly what one big batch would.

Estimators of KL(policy || reference), one value a token, from the log-probabilities of tokens the policy sampled.

As values, k1 and k3 (within its limit) are unbiased. The mean of k2 is another divergence, E[log(policy / reference)^2]
/ 2: it agrees with the KL up to second order near the reference, and may be many times as large far from it.

As a *loss* only the gradient counts, and autograd differentiates the estimate, not the sampling. If tokens are sampled
from the policy that is differentiated, the mean gradient at one token, given those before it, is

- k1: zero. It only adds noise: useful as a metric or inside a reward, useless in a loss.
- k2: that of KL(policy || reference) at this token, although the value of k2 is biased.
- k3: that of KL(reference || policy) at this token, the same to first order near the reference. Low variance; GRPO's
  choice. Beyond the limit of its log-ratio, below, it is zero.

Neither holds for tokens of an earlier policy (later updates on a batch, replay): the estimates carry no importance
ratio. Neither contains what a token changes in the divergence of later ones, so the sum over an answer is not the
gradient of the KL between whole answers; a KL in the reward is (see `reward_kl`). Take k3 or k2 in a loss.

How much each token counts.

Weights are computed once for a whole global batch, before it is split into micro-batches or over ranks, and losses are
then only ever summed: so the loss cannot depend on the split.

The input and output of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Sums:
    """Detached scalars in three kinds, keyed by the metric they become."""

    tokens: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)  # weighted already: their sum is the batch's loss
    per_token: dict[str, Tensor] = field(default_factory=dict)  # to be divided by `tokens`
    largest: dict[str, Tensor] = field(default_factory=dict)  # combined by max; none is negative

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            tokens=self.tokens + other.tokens,
            losses={key: value + other.losses[key] for key, value in self.losses.items()},
            per_token={key: value + other.per_token[key] for key, value in self.per_token.items()},
            largest={key: torch.maximum(value, other.largest[key]) for key, value in self.largest.items()},
        )

    def __radd__(self, start: int) -> Sums:
        """Lets the built-in sum() start from 0."""
        assert start == 0
        return self

    def and_loss(self, key: str, value: Tensor) -> Sums:
        """With one more part of the total."""
        value = value.detach().to(self.tokens.dtype)
        return replace(self, losses=self.losses | {key: value, "loss/total": self.losses["loss/total"] + value})

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Sums:
        """The same over all ranks of `group`; every rank must hold the same keys (an empty batch gives them too)."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        added = torch.stack([self.tokens, *self.losses.values(), *self.per_token.values()])
        dist.all_reduce(added, op=dist.ReduceOp.SUM, group=group)
        tokens, *values = added.unbind()
        losses = dict(zip(self.losses, values[: len(self.losses)], strict=True))
        per_token = dict(zip(self.per_token, values[len(self.losses) :], strict=True))
        if not self.largest:
            return Sums(tokens, losses, per_token)
        largest = torch.stack(list(self.largest.values()))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return Sums(tokens, losses, per_token, dict(zip(self.largest, largest.unbind(), strict=True)))


def metrics(sums: Sums, updates: int = 1) -> dict[str, float]:
    """Final metrics. When `sums` were added over several optimizer steps, `updates` makes the losses their mean."""
    tokens = max(float(sums.tokens), 1.0)
    losses = {key: float(value) / updates for key, value in sums.losses.items()}
    per_token = {key: float(value) / tokens for key, value in sums.per_token.items()}
    largest = {key: float(value) for key, value in sums.largest.items()}
    return losses | per_token | largest


# Limit of the log-ratio in k3, that of TapeAgents: a single token weighs at most exp(10) = 2.2e4, not exp(20) = 4.9e8.
MAX_LOG_RATIO = 10.0

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(pi / ref): unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(pi / ref)^2 / 2: low variance, never negative, biased unless pi is near ref."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """ref / pi - 1 - log(ref / pi): unbiased, low variance, never negative. The log-ratio is limited to +-10."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


AGGREGATES = ("token", "sequence", "constant")


def token_weights(lengths: Tensor, mode: str, constant_length: int = 0) -> Tensor:
    """The weight of each token of sequence i, so that the batch's loss is sum_i w_i * sum_t loss_it. Float64 [B].

    `lengths` are the numbers of trained tokens, 0 for a masked sequence.

    - "token": every token counts the same, 1 / (all tokens).
    - "sequence": the mean over sequences of their token means. Masked sequences are not counted: masking one acts as if
      it had not been sampled, as it does in "token".
    - "constant": 1 / (B * constant_length), whatever the lengths. Here masked sequences are counted: the divisor is
      fixed by design, so masking one must not make the others louder.
    """
    lengths_B = lengths.to(torch.float64)
    if mode == "token":
        # A batch without tokens has no loss: the clamp avoids 0/0, and no weight is ever used.
        return torch.full_like(lengths_B, 1.0) / lengths_B.sum().clamp(min=1)
    if mode == "sequence":
        trained = lengths_B > 0
        return torch.where(trained, 1.0 / (trained.sum().clamp(min=1) * lengths_B.clamp(min=1)), 0.0)
    if mode == "constant":
        assert constant_length > 0, "constant aggregation needs the length to divide by"
        return torch.full_like(lengths_B, 1.0 / (max(len(lengths_B), 1) * constant_length))
    raise ValueError(f"unknown aggregation {mode!r}: choose one of {', '.join(AGGREGATES)}")


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
