"""An algorithm: filters, a credit rule and loss terms, built from settings. The trainer depends on `needs` only.

Filters and reward shaping are applied before credit assignment: they select rollouts, groups and prompts to train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from assay.algos.advantages import compared_returns
from assay.algos.component import (
    AGGREGATES,
    Component,
    LengthLimits,
    Loader,
    LossBatch,
    LossOut,
    Needs,
    RunFacts,
    Scorers,
    TokenInput,
    call_user_code,
    check_order,
    checked_output,
    find_function,
    own_terms,
    require_name,
    sums_of,
    token_weights,
)
from assay.algos.credit import AdvantageCredit, CreditRule, CriticCredit, RewardKL, all_rollouts
from assay.algos.terms import TERMS
from assay.config import AlgoConfig, CriticConfig
from assay.config.algorithm import OverlongConfig, PassRateConfig
from assay.types import MAX_REWARD, Group, UserError, is_valid_reward

PASS_RATE_MOMENTUM = 0.5  # weight of the latest group in a running pass rate


class OverlongFilter(Component[OverlongConfig]):
    """Penalises long answers, and masks truncated ones."""

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not self.settings.soft_overlong_buffer:
            yield "algo.soft_overlong_buffer is 0", ["algo.soft_overlong_weight"]

    def shape_rewards(self, groups: list[Group], limits: LengthLimits) -> None:
        """DAPO's soft overlong penalty: grows linearly from 0 to its weight over the last part of the length limit.

        The limit is `max_new_tokens`, or less if the context leaves fewer tokens of a sequence of `max_length`.
        Changes `rollout.reward`, which must have been set from the verdict.
        """
        buffer, weight = self.settings.soft_overlong_buffer, self.settings.soft_overlong_weight
        if not buffer:
            return
        if limits.max_new_tokens < 1:
            raise UserError("algo.soft_overlong_buffer is a fraction of sampling.max_new_tokens: set that.")
        for rollout in all_rollouts(groups):
            limit = limits.max_new_tokens
            if limits.max_length:
                limit = min(limit, limits.max_length - sum(len(turn.context_ids) for turn in rollout.turns))
            last = max(round(buffer * limit), 1)
            rollout.reward -= weight * min(max((rollout.length - (limit - last)) / last, 0.0), 1.0)

    def mask(self, groups: list[Group]) -> None:
        """Exclude truncated rollouts from the loss; their rewards still count in the baseline."""
        if self.settings.mask_overlong:
            for rollout in all_rollouts(groups):
                rollout.masked = rollout.masked or rollout.truncated


class ZeroVarianceFilter(Component[AlgoConfig]):
    """Drops groups whose rewards are all equal; they have no gradient under a group baseline. May resample.

    Also drops groups that the user's own filter does not keep.
    """

    def __init__(self, settings: AlgoConfig, load: Loader) -> None:
        super().__init__(settings)
        self.own_filter = find_function("filter", settings.filter, {}, load) if settings.filter else None

    @property
    def rounds(self) -> int:
        """Maximum number of sampling rounds per step; later rounds replace dropped groups."""
        return 1 + self.settings.resample

    def check(self) -> None:
        resample = self.settings.resample
        if resample > 0 and not (self.settings.drop_zero_variance or self.own_filter):
            raise UserError(
                f"algo.resample = {resample} replaces dropped groups: set algo.resample = 0, or "
                "algo.drop_zero_variance = true."
            )

    def matches(self, group: Group) -> bool:
        """Whether all rewards of a group are equal, before shaping.

        As in DAPO, length penalties alone do not keep a group in which all answers are correct. With a discount or
        credit per step, the compared returns must be equal. Answers that were not judged are not compared.
        """
        judged = [(r, r.reward if r.verdict is None else r.verdict.reward) for r in group.judged]
        how = self.settings.discount, self.settings.step_credit
        values = [value for r, whole in judged for value in compared_returns(r, whole, *how)]
        return not values or max(values) == min(values)

    def split(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """(kept, dropped)"""
        kept: list[Group] = []
        dropped: list[Group] = []
        for group in groups:
            equal = self.settings.drop_zero_variance and self.matches(group)
            (dropped if equal or not self._keeps(group) else kept).append(group)
        return kept, dropped

    def _keeps(self, group: Group) -> bool:
        return self.own_filter is None or bool(call_user_code("the filter", self.own_filter, group))


class PassRateFilter(Component[PassRateConfig]):
    """Skips prompts whose running pass rate is outside of the given range."""

    name = "pass_rate"

    def __init__(self, settings: PassRateConfig) -> None:
        super().__init__(settings)
        self.rates: dict[str, list[float]] = {}  # prompt id -> running pass rate, step of the last attempt

    @property
    def active(self) -> bool:
        return self.settings.pass_rate_low > 0 or self.settings.pass_rate_high < 1

    def check(self) -> None:
        check_order(self.settings, "pass_rate_low", "pass_rate_high")

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not self.active:
            yield "neither algo.pass_rate_low nor algo.pass_rate_high is set", ["algo.pass_rate_retry"]

    def in_range(self, rate: float) -> bool:
        return self.settings.pass_rate_low <= rate <= self.settings.pass_rate_high

    def accepts(self, prompt_id: str, step: int) -> bool:
        """Whether to sample a prompt: it is new, its running pass rate is in range, or it is due for a retry."""
        if prompt_id not in self.rates:
            return True
        rate, last = self.rates[prompt_id]
        return self.in_range(rate) or 0 < self.settings.pass_rate_retry <= step - last

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        if not self.active:
            return {}
        self.rates = dict(self.rates)  # a saved state may still hold the previous one
        for group in groups:
            if not group.judged:
                continue
            solved = sum(rollout.verdict is not None and rollout.verdict.correct for rollout in group.judged)
            new = solved / len(group.judged)
            before = self.rates[group.prompt.id][0] if group.prompt.id in self.rates else new
            self.rates[group.prompt.id] = [before + PASS_RATE_MOMENTUM * (new - before), float(step)]
        accepted = sum(self.in_range(rate) for rate, _ in self.rates.values())
        return {"prompts/known": float(len(self.rates)), "prompts/within_reach": accepted / max(len(self.rates), 1)}

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates} if self.active else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rates = {prompt_id: list(known) for prompt_id, known in state["rates"].items()}


def no_paths(path: str) -> Any:
    raise UserError(f"code cannot be loaded by path here ({path!r}): pass the function itself")


class Algorithm:
    """Created by `make_algorithm` from a recipe, or directly from complete settings.

    `load` imports functions and loss terms that the settings name by path.
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
        self.zero_variance = ZeroVarianceFilter(settings, load)
        self.pass_rates = PassRateFilter(settings)
        self.reward_kl = RewardKL(settings)
        self.credit_rule: CreditRule = (
            CriticCredit(settings, self.critic) if settings.critic else AdvantageCredit(settings, load)
        )
        every_term = [cls(settings, load) for cls in TERMS]
        every_term += own_terms(settings.terms, settings.term_args, load)
        self.terms = [term for term in every_term if term.active]
        self.inactive = [term for term in every_term if not term.active]
        self.check()

    @property
    def components(self) -> list[Component[Any]]:
        filters = self.overlong, self.zero_variance, self.pass_rates
        outer: list[Component[Any]] = [*filters, self.reward_kl, self.credit_rule, *self.terms]
        return [inner for component in outer for inner in (component, *component.parts)]

    @property
    def needs(self) -> Needs:
        """What the trainer must provide. May change after `end_step`."""
        return reduce(or_, (component.needs for component in self.components))

    @property
    def inputs(self) -> list[TokenInput]:
        return [given for component in self.components for given in component.inputs]

    # Settings

    def check(self) -> None:
        for component in self.components:
            component.check()
        for kind, names in (("loss terms", [t.name for t in self.terms]), ("inputs", [i.name for i in self.inputs])):
            if doubled := [name for name in names if not name or names.count(name) > 1]:
                raise UserError(f"{kind} need distinct names: {doubled[0]!r} is empty or used twice.")
        dynamic = self.settings.refresh_reference > 0 or self.settings.reference_ema > 0
        if dynamic and not self.needs.reference:
            raise UserError(
                "algo.refresh_reference and algo.reference_ema need a reference: set algo.kl_coef or "
                "algo.reward_kl_coef"
            )
        if self.settings.refresh_reference and self.settings.reference_ema:
            raise UserError("algo.refresh_reference and algo.reference_ema are both set: keep one of them")

    def check_samples(self, samples: int) -> None:
        """Raise a UserError before the run starts if a group baseline gets only one sample per prompt."""
        self.credit_rule.check_samples(samples)

    def check_replay(self) -> None:
        """Raise a UserError if the algorithm cannot train on groups of earlier steps."""
        for component in self.components:
            component.check_replay()

    def check_staleness(self) -> None:
        """Raise a UserError if the algorithm cannot train on groups that earlier weights have sampled."""
        for component in self.components:
            component.check_staleness()

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        """Pairs of a reason and the settings that have no effect because of it."""
        if not self.needs.reference:
            yield "algo.kl_coef and algo.reward_kl_coef are 0", ["algo.reference", "reference.url"]
        for component in (*self.components, *self.inactive):
            yield from component.unused(run)

    def warnings(self, run: RunFacts) -> Iterator[str]:
        for component in self.components:
            yield from component.warnings(run)

    def replace(self, **changes: Any) -> Algorithm:
        """A new algorithm with changed settings and without the state of this one."""
        settings = AlgoConfig.model_validate(dict(self.settings) | changes)
        return Algorithm(settings, self.critic, self.limits, self.load)

    # Rollouts

    def keep(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """Split judged groups into (kept, dropped). Shapes the rewards of all, because all are logged."""
        self._shape_rewards(groups)
        self.overlong.mask(groups)
        return self.zero_variance.split(groups)

    def set_baselines(self, groups: Sequence[Group], greedy: list[Group]) -> None:
        """Set the baseline of each group to the reward of the greedy answer in the corresponding group of `greedy`.

        A group whose greedy answer was not judged is not trained on: its baseline is unknown.
        """
        self._shape_rewards(greedy)
        for group, greedy_group in zip(groups, greedy, strict=True):
            if greedy_group.judged:
                group.baseline = greedy_group.rewards[0]
                continue
            for rollout in group.rollouts:
                rollout.masked = True

    def credit(self, groups: list[Group], scorers: Scorers | None = None) -> dict[str, float]:
        """Set the shaped reward and the advantage of every rollout; returns metrics.

        `scorers`: functions of the trainer, as far as `needs` asks for them.
        """
        scorers = scorers or Scorers()
        self._shape_rewards(groups)
        ratios, metrics = self.reward_kl.apply(groups, scorers)
        return metrics | self.credit_rule.assign(groups, ratios, scorers)

    def _shape_rewards(self, groups: list[Group]) -> None:
        """Set the reward of each rollout; mask rollouts that the judge or the environment failed to judge."""
        for rollout in all_rollouts(groups):
            assert rollout.verdict is not None, f"rollout {rollout.sample} of {rollout.prompt.id} was not judged"
            rollout.reward = rollout.verdict.reward
            rollout.masked = rollout.masked or rollout.failed
            if not is_valid_reward(rollout.reward):
                raise UserError(
                    f"the reward of {rollout.prompt.id} (sample {rollout.sample}) is {rollout.reward}: "
                    f"a reward function must return a finite number of at most {MAX_REWARD:g}."
                )
        self.overlong.shape_rewards(groups, self.limits)

    # Updates

    def update_count(self, groups: int) -> int:
        """Number of optimizer steps in one pass over a batch of `groups` (possibly 0) groups; at least 1."""
        size = self.settings.minibatch_size
        return max(min(-(-groups // size) if size else self.settings.updates, groups), 1)

    def token_weights(self, lengths: Tensor) -> Tensor:
        """Weight of the tokens of each sequence of a global batch (see `component.token_weights`)."""
        mode, limit = self.settings.aggregate, self.limits.max_new_tokens
        if mode == "constant" and limit < 1:
            raise UserError('algo.aggregate = "constant" divides by sampling.max_new_tokens: set it.')
        return token_weights(lengths, mode, limit)

    def loss(self, batch: LossBatch) -> LossOut:
        """Sum over terms of coefficient * sum over tokens of weight * loss, and metrics."""
        losses: dict[str, Tensor] = {}
        means: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        for term in self.terms:
            given = call_user_code(f"the loss term {term.name!r}", term.per_token, batch)
            out = checked_output(term, given, len(batch.logprobs))
            coef = term.coef
            weighted = (batch.weights * out.losses).sum() if coef else batch.weights.new_zeros(())
            losses[f"loss/{term.name}"] = coef * weighted
            means |= out.means
            maxima |= out.maxima
        total = torch.stack(list(losses.values())).sum()
        if batch.logprobs.requires_grad and not total.requires_grad:
            raise UserError(
                "the loss has no gradient: compute it from logprobs (the first argument of a loss function), without "
                "detach(), item() or torch.no_grad()."
            )
        return LossOut(total, sums_of(batch, {"loss/total": total} | losses, means, maxima))

    # State

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the state of all components after step number `step`; returns their metrics."""
        return reduce(or_, (component.end_step(step, groups, metrics) for component in self.components))

    def state_dict(self) -> dict[str, Any]:
        states = {component.name: component.state_dict() for component in self.components}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for component in self.components:
            if component.name in state:
                component.load_state_dict(state[component.name])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle settings and state; user code is imported by path in the other process."""
        return Algorithm, (self.settings, self.critic, self.limits, self.load), self.state_dict()

    __setstate__ = load_state_dict
