"""Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438) and the loss of a critic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def gae(values: Sequence[float], rewards: Sequence[float], gamma: float, lam: float, after: float = 0.0) -> list[float]:
    """The advantage of each token of an answer.

    `values`: of the state before each token; `rewards`: what comes with it. `after`: what the state after the last one
    is worth, nothing unless an episode was cut off there.
    """
    advantages = [0.0] * len(values)
    following, later = after, 0.0  # value of the next state, advantage of the next token
    for place in reversed(range(len(values))):
        surprise = rewards[place] + gamma * following - values[place]
        later = surprise + gamma * lam * later
        advantages[place], following = later, values[place]
    return advantages


def value_loss(values: Tensor, given: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error of each value; with a clip the larger of that and that of a value held near `given`."""
    plain = (values - returns).square()
    if clip:
        plain = torch.maximum(plain, (given + (values - given).clamp(-clip, clip) - returns).square())
    return plain / 2
