"""Credit assignment: KL penalties in the reward, and advantages per answer, per step of an episode, or per token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, compress
from typing import Any

import torch
from torch import Tensor

from assay.algos.advantages import (
    ADVANTAGES,
    TRAITS,
    any_excluded,
    centred,
    credited_returns,
    credited_tokens,
    group_size_error,
    set_advantages,
    token_rewards,
)
from assay.algos.component import Component, Loader, Needs, RunFacts, Scorers, TokenInput, call_user_code, find_function
from assay.config import AlgoConfig, CriticConfig
from assay.config.algorithm import RewardKLConfig
from assay.types import Group, Rollout, UserError, describe_error, plural

LogRatios = Sequence[Sequence[float]]  # log(policy / reference) of each trained token of each rollout


class RewardKL(Component[RewardKLConfig]):
    """Subtracts the KL penalty from the reward."""

    @property
    def needs(self) -> Needs:
        return Needs(ref_logprobs_in_credit=self.settings.reward_kl_coef > 0)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not self.settings.reward_kl_coef:
            yield "algo.reward_kl_coef is 0", ["algo.reward_kl_per"]

    def apply(self, groups: Sequence[Group], scorers: Scorers) -> tuple[LogRatios | None, dict[str, float]]:
        """Subtract the penalties of all tokens from `rollout.reward`, which must have been set.

        Returns the log-ratios, if tokens get separate credit (reward_kl_per = "token"), and metrics.
        """
        coef = self.settings.reward_kl_coef
        if not coef:
            return None, {}
        assert scorers.ref_logprobs is not None, "needs.ref_logprobs_in_credit"
        ratios = log_ratios(groups, scorers.ref_logprobs(groups))
        for rollout, ratios_T in zip(all_rollouts(groups), ratios, strict=True):
            rollout.reward -= coef * sum(ratios_T)
        metrics = {"reward/kl": sum(map(sum, ratios)) / max(len(ratios), 1)}
        return ratios if self.settings.reward_kl_per == "token" else None, metrics


def all_rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def log_ratios(groups: Sequence[Group], ref_logprobs: Sequence[Sequence[float]]) -> LogRatios:
    """For each rollout, log(policy / reference) of each trained token; the policy is the one that sampled."""
    ratios = []
    for rollout, ref in zip(all_rollouts(groups), ref_logprobs, strict=True):
        if -math.inf in ref:
            raise UserError(
                f"the reference gives a token in the answer to {rollout.prompt.id} (sample {rollout.sample}) "
                "probability 0, so the KL in the reward is infinite: choose a reference that blocks no tokens, "
                "or use algo.kl_coef with algo.kl = 'k3'."
            )
        turns = [turn.completion.engine_logprobs for turn in rollout.turns if not turn.masked]
        ratios.append([logprob - reference for logprob, reference in zip(chain.from_iterable(turns), ref, strict=True)])
    return ratios


def kl_reward_to_go(whole: float, ratios: Sequence[float], coef: float) -> list[float]:
    """Return (or advantage) of each token: the return of the answer without the penalties of earlier tokens."""
    return [whole + coef * paid for paid, _ in zip(accumulate(ratios, initial=0.0), ratios, strict=False)]


class CreditRule(Component[AlgoConfig]):
    """Sets the advantages of rollouts whose rewards have been set."""

    def check_samples(self, samples: int) -> None:
        """Raise a UserError if the rule cannot work with this number of samples per prompt."""

    def assign(self, groups: list[Group], ratios: LogRatios | None, scorers: Scorers) -> dict[str, float]:
        """Returns metrics. `ratios`: for the KL penalties of single tokens, if tokens get separate credit."""
        raise NotImplementedError


class AdvantageCredit(CreditRule):
    """Advantages from a function that compares rewards (or returns) within groups or over the batch."""

    def __init__(self, settings: AlgoConfig, load: Loader) -> None:
        super().__init__(settings)
        self.function = find_function("advantage", settings.advantage, ADVANTAGES, load)
        self.traits = TRAITS.get(self.function, ())

    @property
    def needs(self) -> Needs:
        return Needs(greedy_rollouts=self.settings.greedy_baseline)

    def check(self) -> None:
        settings = self.settings
        by_token = settings.reward_kl_coef > 0 and settings.reward_kl_per == "token"
        suited = [name for name, rule in ADVANTAGES.items() if {"accepts_tokens", "unscaled"} & set(TRAITS[rule])]
        if by_token and settings.advantage not in suited:
            raise UserError(
                f'algo.reward_kl_per = "token" needs an advantage function for single tokens: use {", ".join(suited)}, '
                'or algo.reward_kl_per = "sequence".'
            )
        if by_token and (settings.step_credit or settings.discount != 1):
            raise UserError(
                'algo.reward_kl_per = "token" cannot be combined with algo.step_credit or algo.discount: remove them, '
                'or use algo.reward_kl_per = "sequence".'
            )
        if settings.advantage != "beta_norm":
            return
        penalised = settings.soft_overlong_buffer > 0 and settings.soft_overlong_weight > 0
        for added, instead in (
            (settings.reward_kl_coef > 0, "algo.reward_kl_coef = 0, or algo.kl_coef instead of it"),
            (penalised, "algo.soft_overlong_buffer = 0, or algo.mask_overlong = true instead of it"),
            (settings.greedy_baseline, "algo.greedy_baseline = false"),
        ):
            if added:  # the mean reward of a group would not be a success probability
                raise UserError(f'algo.advantage = "beta_norm" interprets rewards as success rates: set {instead}.')

    def check_samples(self, samples: int) -> None:
        if samples < 2 and "compares_group" in self.traits:
            raise group_size_error(str(self.settings.advantage))

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not run.episodes:
            yield "no environment is set (env.name)", ["algo.discount", "algo.step_credit"]
        yield "algo.critic is off", [f"critic.{name}" for name in CriticConfig.model_fields]

    def assign(self, groups: list[Group], ratios: LogRatios | None, scorers: Scorers) -> dict[str, float]:
        if ratios is not None and "accepts_tokens" in self.traits:
            self._credit_tokens(groups, ratios)
            return {}
        self._credit_answers(groups)
        coef = self.settings.reward_kl_coef
        for rollout, ratios_T in zip(all_rollouts(groups), ratios, strict=True) if ratios is not None else ():
            if not rollout.failed:
                rollout.token_advantages = kl_reward_to_go(rollout.advantage, ratios_T, coef)
        return {}

    def _credit_answers(self, groups: list[Group]) -> None:
        """Compare whole answers, or steps of episodes."""
        discount, by_step = self.settings.discount, self.settings.step_credit
        rewards = [
            torch.tensor(credited_returns(group, discount, by_step), dtype=torch.float64) - (group.baseline or 0.0)
            for group in groups
        ]
        for group, rewards_G, advantages_G in zip(groups, rewards, self._advantages(groups, rewards), strict=True):
            if advantages_G.shape != rewards_G.shape or not advantages_G.isfinite().all():
                raise UserError(
                    f"the advantage function returned {advantages_G.tolist()} for the rewards {rewards_G.tolist()} of "
                    f"{group.prompt.id}: return one finite number per reward."
                )
            set_advantages(group, advantages_G.tolist(), by_step)

    def _advantages(self, groups: list[Group], rewards: list[Tensor]) -> list[Tensor]:
        """Advantages of each group; 0 if excluded steps or rollouts leave nothing to compare with.

        A group whose greedy baseline is unknown is not compared: its rewards are not in the units of the others.
        """
        by_step = self.settings.step_credit
        least = 2 if "compares_group" in self.traits else 1
        greedy = any(group.baseline is not None for group in groups)
        excluded = [any_excluded(group, by_step) for group in groups]
        comparable = [
            (group.baseline is not None or not greedy) and (len(values) >= least or not some)
            for group, values, some in zip(groups, rewards, excluded, strict=True)
        ]
        given = list(compress(rewards, comparable))
        if "compares_batch" in self.traits and sum(map(len, given)) < 2 and (any(excluded) or not all(comparable)):
            return [values * 0 for values in rewards]
        args = [given]
        if "token_counts" in self.traits:
            counts = [torch.tensor(credited_tokens(group, by_step), dtype=torch.float64) for group in groups]
            args.append(list(compress(counts, comparable)))
        called = given or not groups
        advantages = call_user_code("the advantage function", self.function, *args) if called else []
        rest = iter(per_group(advantages, len(given)))
        return [next(rest) if known else values * 0 for values, known in zip(rewards, comparable, strict=True)]

    def _credit_tokens(self, groups: list[Group], ratios: LogRatios) -> None:
        """Compare the returns of all trained tokens: the reward minus the penalties from the token onwards."""
        baselines = [group.baseline or 0.0 for group in groups for _ in group.rollouts]
        compared, returns, coef = list[Rollout](), list[Tensor](), self.settings.reward_kl_coef
        for rollout, ratios_T, baseline in zip(all_rollouts(groups), ratios, baselines, strict=True):
            rollout.advantage, rollout.token_advantages = 0.0, [0.0] * rollout.trained
            if not rollout.masked:
                compared.append(rollout)
                whole = kl_reward_to_go(rollout.reward - baseline, ratios_T, coef)
                returns.append(torch.tensor(whole, dtype=torch.float64))
        for rollout, advantages_T in zip(compared, self.function(returns), strict=True):
            rollout.token_advantages = advantages_T.tolist()
            rollout.advantage = (rollout.token_advantages or [0.0])[0]


def per_group(advantages: Any, groups: int) -> list[Tensor]:
    """What an advantage function, possibly user-defined, returned: one tensor, or list of numbers, per group."""
    form = "return a list with one tensor per group"
    if not isinstance(advantages, Sequence | Tensor) or isinstance(advantages, str):
        raise UserError(f"the advantage function returned {type(advantages).__name__}: {form}.")
    if isinstance(advantages, Tensor) and not advantages.dim():
        raise UserError(f"the advantage function returned a single number: {form}.")
    if len(advantages) != groups:
        raise UserError(f"the advantage function returned {plural(len(advantages), 'group')} for {groups}: {form}.")
    try:
        return [torch.as_tensor(advantages_G, dtype=torch.float64) for advantages_G in advantages]
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"the advantage function returned no numbers ({describe_error(error)}): {form}.") from error


# Values of the states before each trained token at credit assignment, and the targets of the critic.
VALUES = TokenInput("values", from_rollout=lambda rollout: rollout.inputs["values"])
RETURNS = TokenInput("returns", from_rollout=lambda rollout: rollout.inputs["returns"])


def gae(
    values: Sequence[float], rewards: Sequence[float], gamma: float, lam: float, bootstrap: float = 0.0
) -> list[float]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438) for the tokens of an answer.

    `values`: of the state before each token; `rewards`: of each token. `bootstrap`: value of the state after the last
    token, 0 unless the episode was truncated there.
    """
    advantages = [0.0] * len(values)
    next_value, advantage = bootstrap, 0.0
    for t in reversed(range(len(values))):
        td_error = rewards[t] + gamma * next_value - values[t]
        advantage = td_error + gamma * lam * advantage
        advantages[t], next_value = advantage, values[t]
    return advantages


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error of each value, with PPO's clipping of the change since credit assignment (0: none)."""
    error = (values - returns).square()
    if clip:
        error = torch.maximum(error, (old_values + (values - old_values).clamp(-clip, clip) - returns).square())
    return error / 2


class CriticCredit(CreditRule):
    """Advantages per token from the values of a critic (GAE)."""

    def __init__(self, settings: AlgoConfig, critic: CriticConfig) -> None:
        super().__init__(settings)
        self.critic = critic

    @property
    def needs(self) -> Needs:
        return Needs(values=True, every_rollout=True)

    @property
    def inputs(self) -> Sequence[TokenInput]:
        return [VALUES, RETURNS]

    def check(self) -> None:
        if self.settings.step_credit or self.settings.discount != 1 or self.settings.greedy_baseline:
            raise UserError(
                "algo.critic cannot be combined with algo.step_credit, algo.discount or algo.greedy_baseline: "
                "remove them."
            )

    def check_replay(self) -> None:
        raise UserError("algo.critic cannot be combined with replay: set replay.groups = 0, or algo.critic = false")

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        yield "the critic determines advantages (algo.critic)", ["algo.advantage"]
        if not run.episodes:
            yield "no environment is set (env.name)", ["critic.bootstrap"]

    def assign(self, groups: list[Group], ratios: LogRatios | None, scorers: Scorers) -> dict[str, float]:
        """Also sets `rollout.inputs` for the loss of the critic."""
        assert scorers.values is not None, "needs.values"
        every, coef = all_rollouts(groups), self.settings.reward_kl_coef
        costs = [None] * len(every) if ratios is None else [[coef * ratio for ratio in row] for row in ratios]
        kept = [(r, cost) for r, cost in zip(every, costs, strict=True) if r.trained and not r.masked]
        rollouts = [rollout for rollout, _ in kept]
        for (rollout, cost), values in zip(kept, scorers.values(rollouts), strict=True):
            bootstrap = values.pop() if len(values) > rollout.trained else 0.0
            rewards = token_rewards(rollout, cost)
            rollout.token_advantages = gae(values, rewards, self.critic.gamma, self.critic.gae_lambda, bootstrap)
            returns = [value + more for value, more in zip(values, rollout.token_advantages, strict=True)]
            rollout.inputs |= {VALUES.name: values, RETURNS.name: returns}
        if self.critic.normalise:
            whiten(rollouts)
        for rollout in rollouts:
            advantages = rollout.token_advantages or [0.0]
            rollout.advantage = sum(advantages) / len(advantages)
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
    """Mean value, and explained variance of the returns before the critic is trained on them."""
    values = torch.tensor([v for rollout in rollouts for v in rollout.inputs[VALUES.name]], dtype=torch.float64)
    returns = torch.tensor([v for rollout in rollouts for v in rollout.inputs[RETURNS.name]], dtype=torch.float64)
    if not len(values):
        return {}
    variance = float(returns.var(correction=0))
    explained = 1.0 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0
    return {"critic/value_mean": float(values.mean()), "critic/explained_variance": explained}
