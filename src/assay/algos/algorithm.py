"""An algorithm: filters, a credit rule and loss terms, made from settings. The trainer looks at `needs` only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

import assay.algos.terms  # noqa: F401  (registers the built-in loss terms)
from assay.algos.batch import AGGREGATES, LossBatch, LossOut, sums_of, token_weights
from assay.algos.component import (
    TERMS,
    Component,
    LengthLimits,
    Loader,
    Needs,
    RunFacts,
    Scorers,
    TokenInput,
    checked_output,
    own_terms,
    require_name,
)
from assay.algos.credit import AdvantageCredit, CreditRule, CriticCredit, RewardKL
from assay.algos.filters import OverlongFilter, PassRateFilter, ZeroVarianceFilter, verdict_reward
from assay.config import AlgoConfig, CriticConfig
from assay.types import Group, UserError


def no_paths(path: str) -> Any:
    raise UserError(f"{path!r} names code, which cannot be loaded here: pass the function itself")


class Algorithm:
    """Made by `make_algorithm` from a recipe, or directly from settings that are complete.

    `load` imports functions and loss terms that settings name by path.
    """

    def __init__(
        self,
        settings: AlgoConfig,
        critic: CriticConfig | None = None,
        limits: LengthLimits | None = None,
        load: Loader = no_paths,
    ) -> None:
        self.settings, self.critic = settings, critic or CriticConfig()
        self.limits, self.load = limits or LengthLimits(), load
        require_name("aggregate", settings.aggregate, AGGREGATES)
        self.overlong = OverlongFilter(settings)
        self.zero_variance = ZeroVarianceFilter(settings)
        self.pass_rates = PassRateFilter(settings)
        self.reward_kl = RewardKL(settings)
        self.credit_rule: CreditRule = (
            CriticCredit(settings, self.critic) if settings.critic else AdvantageCredit(settings, load)
        )
        every_term = [cls(settings, load) for cls in sorted(TERMS, key=lambda cls: cls.order)]
        every_term += own_terms(settings.terms, settings.term_args, load)
        self.terms = [term for term in every_term if term.active]
        self.inactive = [term for term in every_term if not term.active]
        self.check()

    @property
    def components(self) -> Iterator[Component]:
        yield from (self.overlong, self.zero_variance, self.pass_rates, self.reward_kl, self.credit_rule, *self.terms)

    @property
    def needs(self) -> Needs:
        """What the trainer has to provide; may change after `end_step`."""
        return reduce(or_, (component.needs for component in self.components))

    @property
    def inputs(self) -> list[TokenInput]:
        return [one for component in self.components for one in component.inputs]

    # Settings

    def check(self) -> None:
        for component in self.components:
            component.check()
        for kind, names in (("loss terms", [t.name for t in self.terms]), ("inputs", [i.name for i in self.inputs])):
            if doubled := [name for name in names if not name or names.count(name) > 1]:
                raise UserError(f"{kind} need different names: {doubled[0]!r} is missing or used twice.")
        moves = self.settings.refresh_reference > 0 or self.settings.reference_ema > 0
        if moves and not self.needs.reference:
            raise UserError(
                "algo.refresh_reference and algo.reference_ema move a reference: set algo.kl_coef or reward_kl_coef too"
            )
        if self.settings.refresh_reference and self.settings.reference_ema:
            raise UserError("algo.refresh_reference and algo.reference_ema are both set: keep one of them")

    def check_samples(self, samples: int) -> None:
        """Fail before a run starts, not at its first step, if a group baseline gets one sample per prompt."""
        self.credit_rule.check_samples(samples)

    def check_replay(self) -> None:
        """Raise a UserError if groups of earlier steps cannot be learnt from."""
        for component in self.components:
            component.check_replay()

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        """Why settings have no effect in this run, and which ones."""
        if not self.needs.reference:
            yield "algo.kl_coef and algo.reward_kl_coef are 0", ["algo.reference"]
        for component in (*self.components, *self.inactive):
            yield from component.unused(run)

    def warnings(self, run: RunFacts) -> Iterator[str]:
        for component in self.components:
            yield from component.warnings(run)

    def replace(self, **changes: Any) -> Algorithm:
        """A new algorithm with other settings, and without the state of this one."""
        settings = AlgoConfig.model_validate(dict(self.settings) | changes)
        return Algorithm(settings, self.critic, self.limits, self.load)

    # Rollouts

    def accepts_prompt(self, prompt_id: str, step: int) -> bool:
        """Whether to sample answers to this prompt."""
        return self.pass_rates.accepts(prompt_id, step)

    @property
    def sampling_rounds(self) -> int:
        """Largest number of rounds of sampling in a step, each to replace groups that were dropped before."""
        return self.zero_variance.rounds

    def has_zero_variance(self, group: Group) -> bool:
        """Whether all rollouts of a group were judged alike: see `filters.has_zero_variance`."""
        return self.zero_variance.matches(group)

    def keep(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """(kept, dropped) of newly judged groups. Rewards are shaped for all: dropped groups are logged as well."""
        self._shape_rewards(groups)
        self.overlong.mask(groups)
        return self.zero_variance.split(groups)

    def set_baselines(self, groups: Sequence[Group], greedy: list[Group]) -> None:
        """`greedy` holds one greedy answer to the prompt of each group: its reward is that group's baseline."""
        self._shape_rewards(greedy)
        for group, alone in zip(groups, greedy, strict=True):
            group.baseline = alone.rewards[0]

    def credit(self, groups: list[Group], scorers: Scorers | None = None) -> dict[str, float]:
        """Set every rollout's reward (its verdict's, shaped) and advantage, compared over all groups; returns metrics.

        `scorers`: functions of the trainer, as far as `needs` asks for them.
        """
        scorers = scorers or Scorers()
        self._shape_rewards(groups)
        penalties, metrics = self.reward_kl.apply(groups, scorers)
        return metrics | self.credit_rule.assign(groups, penalties, scorers)

    def _shape_rewards(self, groups: list[Group]) -> None:
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.reward = verdict_reward(rollout)
            if not math.isfinite(rollout.reward):
                raise UserError(
                    f"the reward of {rollout.prompt.id} (sample {rollout.sample}) is {rollout.reward}: "
                    "a reward function must return a finite number."
                )
        self.overlong.shape_rewards(groups, self.limits)

    # Updates

    def update_count(self, groups: int) -> int:
        """Number of optimizer steps in one pass over a batch of `groups`; a filter may have dropped all of them."""
        size = self.settings.minibatch_size
        return max(min(-(-groups // size) if size else self.settings.updates, groups), 1)

    def token_weights(self, lengths: Tensor) -> Tensor:
        """The weight of each token of each sequence of a global batch (see aggregate.token_weights)."""
        mode, limit = self.settings.aggregate, self.limits.max_new_tokens
        if mode == "constant" and limit < 1:
            raise UserError('aggregate="constant" divides by max_new_tokens: set it.')
        return token_weights(lengths, mode, limit)

    def loss(self, batch: LossBatch) -> LossOut:
        """Sum over terms of coefficient * sum over tokens of weight * loss, and metrics."""
        losses: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for term in self.terms:
            out = checked_output(term, term.per_token(batch), len(batch.logprobs))
            coef = term.coef
            weighted = (batch.weights * out.losses).sum() if coef else batch.weights.new_zeros(())
            losses[f"loss/{term.name}"] = coef * weighted
            means |= out.means
            maxima |= out.maxima
        total = torch.stack(list(losses.values())).sum()
        return LossOut(total, sums_of(batch, {"loss/total": total} | losses, means, maxima))

    # State

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt to what a step has sampled and measured; `step` counts it. Returns metrics of the adaptation."""
        return reduce(or_, (component.end_step(step, groups, metrics) for component in self.components))

    def state_dict(self) -> dict[str, Any]:
        states = {component.name: component.state_dict() for component in self.components}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for component in self.components:
            if component.name in state:
                component.load_state_dict(state[component.name])

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: code of the user's is imported there by its path."""
        return _rebuilt, (self.settings, self.critic, self.limits, self.load, self.state_dict())


def _rebuilt(
    settings: AlgoConfig, critic: CriticConfig, limits: LengthLimits, load: Loader, state: dict[str, Any]
) -> Algorithm:
    algo = Algorithm(settings, critic, limits, load)
    algo.load_state_dict(state)
    return algo
