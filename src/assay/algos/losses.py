"""Policy losses, one value a token, on packed 1-D tensors [N] that hold trained tokens only.

`behaviour_logprobs` belong to the policy that sampled: the engine's own, or the trainer's recomputation before its
first update. Each function returns the losses and a dict of per-token statistics; their mean over tokens is logged as
`policy/<name>`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PolicyLoss = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, dict[str, Tensor]]]

MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range, and float32 overflows at 88


def importance_ratio(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """pi(token) / mu(token), the log-ratio held within +-20 so that one absurd token cannot make the loss infinite."""
    return (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def reinforce(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-advantage * log pi: the textbook gradient. It assumes samples of the current policy: no ratio, no clip."""
    return -advantages * logprobs, {}


def ppo_clip(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A). Infinite bounds leave a plain importance ratio.

    A token counts as clipped when the clipped branch is the smaller one, i.e. when it gets no gradient.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    stats = {"clip_fraction": too_low | too_high, "clip_low_fraction": too_low, "clip_high_fraction": too_high}
    return loss, stats


ON_POLICY = ("reinforce",)  # losses that take every sample for one of the current policy
LOSSES: dict[str, PolicyLoss] = {"reinforce": reinforce, "ppo_clip": ppo_clip}
