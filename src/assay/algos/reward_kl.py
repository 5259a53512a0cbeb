"""Divergence from the reference as a penalty within the reward, applied before credit is assigned.

Of an answer it is the sum over its tokens of log(policy / reference), k1 in `kl`: its mean is KL(policy || reference),
and as part of a reward its gradient is that of this KL, because there the sampling is differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from assay.algos.component import Component, Needs, RunFacts, Scorers
from assay.config.algorithm import RewardKLConfig
from assay.types import Group, Rollout, UserError


@dataclass(frozen=True)
class KLPenalties:
    """log(policy / reference) of each trained token of each rollout, which costs it `coef` times as much reward."""

    log_ratios: Sequence[Sequence[float]]
    coef: float

    def of(self, groups: Sequence[Group]) -> list[tuple[Rollout, Sequence[float]]]:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        return list(zip(rollouts, self.log_ratios, strict=True))

    def costs(self) -> list[list[float]]:
        """What each token takes off the reward."""
        return [[self.coef * ratio for ratio in own] for own in self.log_ratios]


class RewardKL(Component):
    """Subtracts the penalty of all tokens from the reward of their answer."""

    def __init__(self, settings: RewardKLConfig) -> None:
        self.settings = settings

    @property
    def needs(self) -> Needs:
        return Needs(ref_logprobs_in_credit=self.settings.reward_kl_coef > 0)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not self.settings.reward_kl_coef:
            yield "algo.reward_kl_coef is 0", ["algo.reward_kl_per"]

    def apply(self, groups: Sequence[Group], scorers: Scorers) -> tuple[KLPenalties | None, dict[str, float]]:
        """Returns the penalties, where tokens are to be credited separately, and metrics."""
        coef = self.settings.reward_kl_coef
        if not coef:
            return None, {}
        assert scorers.ref_logprobs is not None, "needs.ref_logprobs_in_credit"
        penalties = KLPenalties(log_ratios(groups, scorers.ref_logprobs(groups)), coef)
        apply_kl_penalty(groups, penalties)
        ratios = penalties.log_ratios
        metrics = {"reward/kl": sum(map(sum, ratios)) / max(len(ratios), 1)}
        return penalties if self.settings.reward_kl_per == "token" else None, metrics


def log_ratios(groups: Sequence[Group], ref_logprobs: Sequence[Sequence[float]]) -> list[list[float]]:
    """For each rollout, log(policy / reference) of each trained token; the policy is the one that sampled."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, ref in zip(rollouts, ref_logprobs, strict=True):
        if -math.inf in ref:
            raise UserError(
                f"the reference gives a token in the answer to {rollout.prompt.id} (sample {rollout.sample}) "
                "probability 0, so the KL in the reward is infinite: choose a reference that blocks no tokens, "
                "or use kl_coef with k3."
            )
    turns = [[turn.completion for turn in rollout.turns if not turn.masked] for rollout in rollouts]
    sampled = [[logprob for completion in own for logprob in completion.engine_logprobs] for own in turns]
    return [
        [own - reference for own, reference in zip(logprobs, ref, strict=True)]
        for logprobs, ref in zip(sampled, ref_logprobs, strict=True)
    ]


def apply_kl_penalty(groups: Sequence[Group], penalties: KLPenalties) -> None:
    """Every answer pays for all of its tokens: reduces `rollout.reward`, which must have been set before."""
    for rollout, ratios_T in penalties.of(groups):
        rollout.reward -= penalties.coef * sum(ratios_T)


def kl_reward_to_go(whole: float, ratios: Sequence[float], coef: float) -> list[float]:
    """For each token, the return (or advantage) of the whole answer without the penalty of the tokens before it."""
    return [whole + coef * paid for paid, _ in zip(accumulate(ratios, initial=0.0), ratios, strict=False)]
