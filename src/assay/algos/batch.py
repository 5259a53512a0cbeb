"""Input, output and metrics of a loss; token weights; estimators of the KL divergence from the reference.

Token weights are computed once per global batch, before it is split into micro-batches or over ranks, and losses and
metrics are sums. The result therefore does not depend on the split.

KL estimators compute one value per token from the log-probabilities of sampled tokens. As values, k1 and k3 (within the
limit of its log-ratio) are unbiased estimates of KL(policy || reference). The mean of k2 is a different divergence,
E[log(policy / reference)^2] / 2. It agrees with the KL up to second order near the reference, and may be much larger
far from it.

In a *loss* only the gradient matters, and autograd differentiates the estimate, not the sampling. If tokens are sampled
from the policy that is differentiated, the expected gradient at a token, given the tokens before it, is

- k1: zero. It only adds noise: useful as a metric or in a reward, useless in a loss.
- k2: the gradient of KL(policy || reference) at this token, although the value of k2 is biased.
- k3: the gradient of KL(reference || policy) at this token, which is the same to first order near the reference. It has
  low variance and is used by GRPO. Beyond the limit of its log-ratio the gradient is zero.

This does not hold for tokens of an earlier policy (later updates on a batch, replay), because the estimates contain no
importance ratio. The effect of a token on the divergence of later tokens is not included either, so the sum over an
answer is not the gradient of the KL between whole answers. A KL penalty in the reward is (`credit.RewardKL`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Sums:
    """Metrics of a batch as detached scalars, which can be added over micro-batches and ranks."""

    tokens: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)  # weighted: their sum is the loss of the batch
    per_token: dict[str, Tensor] = field(default_factory=dict)  # to be divided by `tokens`
    largest: dict[str, Tensor] = field(default_factory=dict)  # combined by max; must not be negative

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
        """A copy with one more loss, added to the total."""
        value = value.detach().to(self.tokens.dtype)
        return replace(self, losses=self.losses | {key: value, "loss/total": self.losses["loss/total"] + value})

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Sums:
        """The sums over all ranks of `group`. Every rank must have the same keys, also for an empty batch."""
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
    """Final metrics. Losses are averaged over `updates` optimizer steps."""
    tokens = max(float(sums.tokens), 1.0)
    losses = {key: float(value) / updates for key, value in sums.losses.items()}
    per_token = {key: float(value) / tokens for key, value in sums.per_token.items()}
    largest = {key: float(value) for key, value in sums.largest.items()}
    return losses | per_token | largest


# Limit of the log-ratio in k3, as in TapeAgents: a single token contributes at most exp(10) = 2.2e4.
MAX_LOG_RATIO = 10.0

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / reference): unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / reference)^2 / 2: low variance, never negative, biased far from the reference."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log(r) with r = reference / policy: unbiased, low variance, never negative. log(r) is limited to +-10."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


AGGREGATES = ("token", "sequence", "constant")


def token_weights(lengths: Tensor, mode: str, constant_length: int = 0) -> Tensor:
    """Weight of each token of sequence i, float64 [B]; the loss of the batch is sum_i weight_i * sum_t loss_it.

    `lengths` are the numbers of trained tokens, 0 for a masked sequence.

    - "token": 1 / (number of all tokens).
    - "sequence": mean over sequences of the mean over tokens. Masked sequences are not counted, as in "token".
    - "constant": 1 / (B * constant_length), independent of the lengths. Masked sequences are counted, so that masking
      one does not change the weight of the others.
    """
    lengths_B = lengths.to(torch.float64)
    if mode == "token":
        # The clamp avoids 0/0 in a batch without tokens, whose weights are not used.
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
    behaviour_logprobs: Tensor  # of the policy that sampled the tokens
    advantages: Tensor
    weights: Tensor  # from token_weights, for the global batch
    entropy: Tensor | None = None  # with gradient if there is an entropy bonus
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None  # set if behaviour_logprobs are the trainer's, to measure the mismatch
    lengths: Sequence[int] | None = None  # trained tokens per sequence, if `Needs.whole_sequences`
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # `TokenInput`s of all terms, by name


@dataclass(frozen=True)
class LossOut:
    total: Tensor  # call backward on it; micro-batches accumulate by addition
    sums: Sums


def sums_of(
    batch: LossBatch, losses: dict[str, Tensor], means: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
) -> Sums:
    """Metrics of a batch. The keys depend on the settings only, not on the batch.

    `mismatch/*` compares the log-probabilities of trainer and engine for the same tokens. If the behaviour
    log-probabilities are the engine's, the trainer's are those of the current policy, so only the first update after
    sampling measures the mismatch alone. For tokens that earlier weights have sampled (replay, asynchronous training)
    the difference includes the change of the policy.
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
    """Detached and in float64 if the device supports it (mps does not), so that counts and long sums stay exact."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)
