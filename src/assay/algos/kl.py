"""Estimators of KL(policy || reference), one value a token, from the log-probabilities of tokens the policy sampled.

All have the right expectation or nearly so (k2 is biased by third-order terms), but as a *loss* only the gradient
counts, and autograd differentiates the estimate, not the sampling. With tokens of the current policy its mean is

- k1: zero. It only adds noise: useful as a metric or inside a reward, useless in a loss.
- k2: exactly that of KL(policy || reference), which is what one usually wants.
- k3: that of KL(reference || policy), the same to first order near the reference. Low variance; GRPO's choice.

So take k3 or k2 in a loss.
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
    """log(pi / ref)^2 / 2: low variance, a little biased."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """ref / pi - 1 - log(ref / pi): unbiased, low variance, never negative. The log-ratio is limited to +-10."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}
