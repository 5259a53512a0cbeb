"""Estimators of KL(policy || reference), one value a token, from the log-probabilities of tokens the policy sampled.

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
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

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
