"""Divergence from the reference as a price within the reward, paid before credit is given.

Of an answer it is the sum over its tokens of log(policy / reference), k1 in `kl`: its mean is KL(policy || reference),
and as part of a reward its gradient is that of this KL, for there it is the sampling that is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from assay.types import Group, UserError

PER = ("sequence", "token")


def log_ratios(groups: Sequence[Group], ref_logprobs: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each rollout, log(policy / reference) of each of its tokens in the loss; the policy is who wrote them."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, ref in zip(rollouts, ref_logprobs, strict=True):
        if -math.inf in ref:
            raise UserError(
                f"the reference gives a token in the answer to {rollout.prompt.id} (sample {rollout.sample}) "
                "probability 0, so the KL in the reward is infinite: choose a reference that blocks no tokens, "
                "or use kl_coef with k3."
            )
    turns = [[turn.completion for turn in rollout.turns if not turn.masked] for rollout in rollouts]
    written = [[logprob for completion in own for logprob in completion.engine_logprobs] for own in turns]
    return [
        [own - reference for own, reference in zip(logprobs, ref, strict=True)]
        for logprobs, ref in zip(written, ref_logprobs, strict=True)
    ]


def charge(groups: Sequence[Group], ratios: Sequence[Sequence[float]], coef: float) -> None:
    """Every answer pays for all of its tokens. Takes from `rollout.reward`, which must have been set before."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, ratios_T in zip(rollouts, ratios, strict=True):
        rollout.reward -= coef * sum(ratios_T)


def give_back_the_past(groups: Sequence[Group], ratios: Sequence[Sequence[float]], coef: float) -> None:
    """A token answers for its own price and those after it: what earlier ones cost is no consequence of it."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, ratios_T in zip(rollouts, ratios, strict=True):
        rollout.token_advantages = to_go(rollout.advantage, ratios_T, coef)


def to_go(whole: float, ratios: Sequence[float], coef: float) -> list[float]:
    """For each token, the return (or advantage) of the whole answer without the price of the tokens before it."""
    return [whole + coef * paid for paid, _ in zip(accumulate(ratios, initial=0.0), ratios, strict=False)]
