"""Keeping the policy from becoming sure of itself too soon: a bonus that follows a target, and tokens held back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST = 1.0  # that the coefficient of an entropy bonus grows to


@dataclass(frozen=True)
class EntropyControl:
    """The coefficient of an entropy bonus that grows while entropy lies below a target and shrinks above it."""

    coef: float
    entropy: float | None = None  # as last measured

    def applied(self, target: float) -> float:
        """Nothing is added while there is more than enough."""
        return self.coef if self.entropy is None or self.entropy <= target else 0.0

    def after(self, entropy: float, target: float, delta: float) -> EntropyControl:
        coef = self.coef + delta if entropy <= target else self.coef - delta
        return EntropyControl(min(max(coef, 0.0), MOST), entropy)


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """What each token adds to the covariance of log-probability and advantage, which is what entropy is lost by."""
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def kl_cov(logprobs: Tensor, advantages: Tensor, fraction: float, low: float, high: float) -> Tensor:
    """The `fraction` of tokens (at least one) with the largest covariance, as a mask. The bounds are Clip-Cov's."""
    marked = torch.zeros(len(logprobs), dtype=torch.bool)
    if len(logprobs):
        count = max(int(fraction * len(logprobs)), 1)
        marked[covariances(logprobs, advantages).topk(count).indices] = True
    return marked


def clip_cov(logprobs: Tensor, advantages: Tensor, fraction: float, low: float, high: float) -> Tensor:
    """A `fraction` of all tokens (at least one), drawn from those with a covariance within [low, high], as a mask.

    The draw depends on how many tokens there are, not on their order: a run that is resumed makes it again.
    """
    marked = torch.zeros(len(logprobs), dtype=torch.bool)
    found = covariances(logprobs, advantages) if len(logprobs) else logprobs
    within = ((found >= low) & (found <= high)).nonzero().squeeze(1)
    within = within[found[within].argsort()]
    order = torch.randperm(len(within), generator=torch.Generator().manual_seed(len(logprobs)))
    marked[within[order[: max(int(fraction * len(logprobs)), 1)]]] = True
    return marked


MARKS = {"kl_cov": kl_cov, "clip_cov": clip_cov}
