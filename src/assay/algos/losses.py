"""Policy losses, one value a token, on packed 1-D tensors [N] that hold trained tokens only.

`behaviour_logprobs` belong to the policy that sampled: the engine's own, or the trainer's recomputation before its
first update. Each function returns the losses and a dict of per-token statistics; their mean over tokens is logged as
`policy/<name>`. With `ratio = "sequence"` they are handed log-probabilities whose ratio is that of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from assay.algos.importance import importance_ratio

PolicyLoss = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, dict[str, Tensor]]]


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


def dual_clip(losses: Tensor, advantages: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Losses of `ppo_clip` with the ratio limited where the advantage is negative, and which tokens that concerns.

    There the clip bounds the ratio from below only, and one token that has become far more likely outweighs all others
    (Ye et al. 2020, arXiv 1912.09729). A limited token has no gradient.
    """
    largest = -limit * advantages
    limited = (advantages < 0) & (losses > largest)
    return torch.where(limited, largest, losses), limited


def cispo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-weight * A * log pi, the weight being the clipped ratio without its gradient: every token keeps a gradient.

    A token counts as clipped when its weight is not its ratio, whatever the sign of its advantage.
    """
    ratio = importance_ratio(logprobs, behaviour_logprobs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    too_low, too_high = ratio < 1 - clip_low, ratio > 1 + clip_high
    stats = {"clip_fraction": too_low | too_high, "clip_low_fraction": too_low, "clip_high_fraction": too_high}
    return -weight * advantages * logprobs, stats


LOSSES: dict[str, PolicyLoss] = {"reinforce": reinforce, "ppo_clip": ppo_clip, "cispo": cispo}
ON_POLICY = ("reinforce",)  # without a ratio: they take every sample for one of the current policy
