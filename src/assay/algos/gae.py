"""Credit by a critic: generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438), and its loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from assay.algos.advantages import centred
from assay.algos.component import Needs, RunFacts, Scorers, TokenInput
from assay.algos.credit import CreditRule
from assay.algos.returns import token_rewards
from assay.algos.reward_kl import KLPenalties
from assay.config import AlgoConfig, CriticConfig
from assay.types import Group, Rollout, UserError

# Values of the states before each trained token when credit was assigned, and what the critic is to learn of them.
VALUES = TokenInput("values", from_rollout=lambda rollout: rollout.inputs["values"])
RETURNS = TokenInput("returns", from_rollout=lambda rollout: rollout.inputs["returns"])


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


class CriticCredit(CreditRule):
    """Advantages of single tokens, from the values of a critic."""

    def __init__(self, settings: AlgoConfig, critic: CriticConfig) -> None:
        self.settings, self.critic = settings, critic

    @property
    def needs(self) -> Needs:
        return Needs(values=True, every_rollout=True)

    @property
    def inputs(self) -> Sequence[TokenInput]:
        return [VALUES, RETURNS]

    def check(self) -> None:
        if self.settings.step_credit or self.settings.discount != 1 or self.settings.greedy_baseline:
            raise UserError("a critic gives credit by itself: leave out step_credit, discount and greedy_baseline.")

    def check_replay(self) -> None:
        raise UserError("a critic gives credit to new answers only: set replay.groups = 0, or algo.critic = false")

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        yield "the critic gives credit (algo.critic)", ["algo.advantage"]
        if not run.episodes:
            yield "no environment is set (env.name)", ["critic.bootstrap"]

    def assign(self, groups: list[Group], penalties: KLPenalties | None, scorers: Scorers) -> dict[str, float]:
        """Sets `rollout.inputs` for the critic's loss, too."""
        assert scorers.values is not None, "needs.values"
        every = [rollout for group in groups for rollout in group.rollouts]
        costs = [None] * len(every) if penalties is None else penalties.costs()
        kept = [(one, cost) for one, cost in zip(every, costs, strict=True) if one.trained and not one.masked]
        rollouts = [rollout for rollout, _ in kept]
        for (rollout, cost), values in zip(kept, scorers.values(rollouts), strict=True):
            after = values.pop() if len(values) > rollout.trained else 0.0
            rewards = token_rewards(rollout, cost)
            rollout.token_advantages = gae(values, rewards, self.critic.gamma, self.critic.gae_lambda, after)
            returns = [value + more for value, more in zip(values, rollout.token_advantages, strict=True)]
            rollout.inputs |= {VALUES.name: values, RETURNS.name: returns}
        if self.critic.normalise:
            whiten(rollouts)
        for rollout in rollouts:
            own = rollout.token_advantages or [0.0]
            rollout.advantage = sum(own) / len(own)
        return value_quality(rollouts)


def whiten(rollouts: Sequence[Rollout]) -> None:
    """Normalise advantages over all tokens: mean 0 and standard deviation 1."""
    every = torch.tensor([v for r in rollouts for v in r.token_advantages or ()], dtype=torch.float64)
    if len(every) < 2:
        return
    whitened = iter((centred(every) / (every.std() + 1e-8)).tolist())
    for rollout in rollouts:
        rollout.token_advantages = [next(whitened) for _ in rollout.token_advantages or ()]


def value_quality(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """How well values predict returns, before anything is learnt from these: 1 is perfectly, 0 not at all."""
    values = torch.tensor([v for rollout in rollouts for v in rollout.inputs[VALUES.name]], dtype=torch.float64)
    returns = torch.tensor([v for rollout in rollouts for v in rollout.inputs[RETURNS.name]], dtype=torch.float64)
    if not len(values):
        return {}
    variance = float(returns.var(correction=0))
    explained = 1.0 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
    return {"critic/value_mean": float(values.mean()), "critic/explained_variance": explained}
