"""Credit by comparing rewards: an advantage for each answer, each step of an episode, or each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress

import torch
from torch import Tensor

from assay.algos.advantages import ADVANTAGES, BY_TOKEN, GROUP_BASELINES, POOLED, UNSCALED, group_size_error
from assay.algos.component import Component, Loader, Needs, RunFacts, Scorers, find_function
from assay.algos.returns import any_masked, credited_returns, credited_tokens, give_advantages
from assay.algos.reward_kl import KLPenalties, kl_reward_to_go
from assay.config import AlgoConfig, CriticConfig
from assay.types import Group, UserError


class CreditRule(Component):
    """Sets the advantages of rollouts whose rewards have been set."""

    def check_samples(self, samples: int) -> None:
        """Raise a UserError if the rule cannot work with this number of samples per prompt."""

    def assign(self, groups: list[Group], penalties: KLPenalties | None, scorers: Scorers) -> dict[str, float]:
        """Returns metrics. `penalties`: of single tokens, where these are credited separately."""
        raise NotImplementedError


class AdvantageCredit(CreditRule):
    """Advantages from a function that compares rewards (or returns) within groups or over the batch."""

    def __init__(self, settings: AlgoConfig, load: Loader) -> None:
        self.settings = settings
        self.function = find_function("advantage", settings.advantage, ADVANTAGES, load)

    @property
    def needs(self) -> Needs:
        return Needs(greedy_rollouts=self.settings.greedy_baseline)

    def check(self) -> None:
        by_token = self.settings.reward_kl_coef > 0 and self.settings.reward_kl_per == "token"
        suited = [name for name, function in ADVANTAGES.items() if function in (*POOLED, *UNSCALED)]
        if by_token and self.settings.advantage not in suited:
            raise UserError(
                f'reward_kl_per = "token" needs an advantage that suits single tokens: take {", ".join(suited)}, '
                'or reward_kl_per = "sequence".'
            )
        if by_token and (self.settings.step_credit or self.settings.discount != 1):
            raise UserError(
                'reward_kl_per = "token" gives credit by whole answers: leave out step_credit and discount, '
                'or take reward_kl_per = "sequence".'
            )
        if self.settings.advantage == "beta_norm":
            self._check_probabilities()

    def _check_probabilities(self) -> None:
        """beta_norm takes the mean reward of a group for its probability of success: nothing may be added to it."""
        settings = self.settings
        penalised = settings.soft_overlong_buffer > 0 and settings.soft_overlong_weight > 0
        for added, instead in (
            (settings.reward_kl_coef > 0, "reward_kl_coef = 0, or kl_coef instead of it"),
            (penalised, "soft_overlong_buffer = 0, or mask_overlong = true instead of it"),
            (settings.greedy_baseline, "greedy_baseline = false"),
        ):
            if added:
                raise UserError(f'advantage="beta_norm" takes rewards for probabilities: set {instead}.')

    def check_samples(self, samples: int) -> None:
        if samples < 2 and self.function in GROUP_BASELINES:
            raise group_size_error(str(self.settings.advantage))

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not run.episodes:
            yield "no environment is set (env.name)", ["algo.discount", "algo.step_credit"]
        yield "algo.critic is off", [f"critic.{name}" for name in CriticConfig.model_fields]

    def assign(self, groups: list[Group], penalties: KLPenalties | None, scorers: Scorers) -> dict[str, float]:
        if penalties is not None and self.function in POOLED:
            self._credit_tokens(groups, penalties)
            return {}
        self._credit_answers(groups)
        if penalties is not None:
            for rollout, log_ratios in penalties.of(groups):
                rollout.token_advantages = kl_reward_to_go(rollout.advantage, log_ratios, penalties.coef)
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
                    f"the advantage function gave {advantages_G.tolist()} for the rewards {rewards_G.tolist()} of "
                    f"{group.prompt.id}: give one finite number for each."
                )
            give_advantages(group, advantages_G.tolist(), by_step)

    def _advantages(self, groups: list[Group], rewards: list[Tensor]) -> list[Tensor]:
        """Advantages of each group: 0 where masked steps have left nothing to compare with."""
        by_step = self.settings.step_credit
        least = 2 if self.function in GROUP_BASELINES else 1
        masked = [by_step and any_masked(group) for group in groups]
        comparable = [len(values) >= least or not left_out for values, left_out in zip(rewards, masked, strict=True)]
        given = list(compress(rewards, comparable))
        if self.settings.advantage in BY_TOKEN:
            counts = [torch.tensor(credited_tokens(group, by_step), dtype=torch.float64) for group in groups]
            advantages = self.function(given, list(compress(counts, comparable)))
        else:
            advantages = self.function(given) if given or not groups else []
        if len(advantages) != len(given):
            raise UserError(
                f"the advantage function gave {len(advantages)} groups for {len(given)}: give one for each."
            )
        rest = iter(advantages)
        return [next(rest) if known else values * 0 for values, known in zip(rewards, comparable, strict=True)]

    def _credit_tokens(self, groups: list[Group], penalties: KLPenalties) -> None:
        """Compare the tokens of all answers, each by its return: the reward minus the penalty from it on."""
        baselines = [group.baseline or 0.0 for group in groups for _ in group.rollouts]
        rollouts = penalties.of(groups)
        returns = [
            torch.tensor(kl_reward_to_go(rollout.reward - baseline, log_ratios, penalties.coef), dtype=torch.float64)
            for (rollout, log_ratios), baseline in zip(rollouts, baselines, strict=True)
        ]
        for (rollout, _), advantages_T in zip(rollouts, self.function(returns), strict=True):
            rollout.token_advantages = advantages_T.tolist()
            rollout.advantage = (rollout.token_advantages or [0.0])[0]
