"""Filters and reward shaping, applied before credit assignment: select rollouts, groups and prompts to train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.algos.advantages import compared_returns
from assay.algos.component import Component, LengthLimits, RunFacts, check_order
from assay.config import AlgoConfig
from assay.config.algorithm import OverlongConfig, PassRateConfig
from assay.types import Group, Rollout, UserError

PassRates = Mapping[str, Sequence[float]]  # prompt id -> (running pass rate, step of the last attempt)

PASS_RATE_MOMENTUM = 0.5  # weight of the latest group in a running pass rate


def verdict_reward(rollout: Rollout) -> float:
    assert rollout.verdict is not None, f"rollout {rollout.sample} of {rollout.prompt.id} was not judged"
    return rollout.verdict.reward


class OverlongFilter(Component):
    """Penalises long answers, and masks truncated ones."""

    def __init__(self, settings: OverlongConfig) -> None:
        self.settings = settings

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not self.settings.soft_overlong_buffer:
            yield "algo.soft_overlong_buffer is 0", ["algo.soft_overlong_weight"]

    def shape_rewards(self, groups: list[Group], limits: LengthLimits) -> None:
        buffer, weight = self.settings.soft_overlong_buffer, self.settings.soft_overlong_weight
        if not buffer:
            return
        if limits.max_new_tokens < 1:
            raise UserError("algo.soft_overlong_buffer is a fraction of sampling.max_new_tokens: set that.")
        soft_overlong(groups, limits.max_new_tokens, buffer, weight, limits.max_length)

    def mask(self, groups: list[Group]) -> None:
        if self.settings.mask_overlong:
            mask_overlong(groups)


class ZeroVarianceFilter(Component):
    """Drops groups whose rewards are all equal; they have no gradient under a group baseline. May resample."""

    def __init__(self, settings: AlgoConfig) -> None:
        self.settings = settings

    @property
    def rounds(self) -> int:
        """Maximum number of sampling rounds per step."""
        return 1 + self.settings.resample

    def check(self) -> None:
        resample = self.settings.resample
        if resample > 0 and not self.settings.drop_zero_variance:
            raise UserError(
                f"resample = {resample} replaces dropped groups: set resample = 0, or drop_zero_variance = true."
            )

    def matches(self, group: Group) -> bool:
        return has_zero_variance(group, self.settings.discount, self.settings.step_credit)

    def split(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """(kept, dropped)"""
        if not self.settings.drop_zero_variance:
            return list(groups), []
        return drop_zero_variance(groups, self.settings.discount, self.settings.step_credit)


class PassRateFilter(Component):
    """Skips prompts whose running pass rate is outside of the given range."""

    name = "pass_rate"

    def __init__(self, settings: PassRateConfig) -> None:
        self.settings = settings
        self.rates: dict[str, list[float]] = {}

    @property
    def active(self) -> bool:
        return self.settings.pass_rate_low > 0 or self.settings.pass_rate_high < 1

    def check(self) -> None:
        check_order("pass_rate_low", self.settings.pass_rate_low, "pass_rate_high", self.settings.pass_rate_high)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if not self.active:
            yield "neither algo.pass_rate_low nor algo.pass_rate_high is set", ["algo.pass_rate_retry"]

    def accepts(self, prompt_id: str, step: int) -> bool:
        low, high = self.settings.pass_rate_low, self.settings.pass_rate_high
        return should_sample(self.rates, prompt_id, step, low, high, self.settings.pass_rate_retry)

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        if not self.active:
            return {}
        self.rates = with_results(self.rates, groups, step)
        rates = [rate for rate, _ in self.rates.values()]
        accepted = sum(self.settings.pass_rate_low <= rate <= self.settings.pass_rate_high for rate in rates)
        return {"prompts/known": float(len(rates)), "prompts/within_reach": accepted / len(rates)}

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates} if self.active else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rates = {prompt_id: list(known) for prompt_id, known in state["rates"].items()}


def has_zero_variance(group: Group, discount: float = 1.0, by_step: bool = False) -> bool:
    """Whether all rewards of a group are equal, before shaping.

    As in DAPO, length penalties alone do not keep a group in which all answers are correct. With a discount or
    credit per step, the compared returns must be equal.
    """
    judged = [(one, one.reward if one.verdict is None else one.verdict.reward) for one in group.rollouts]
    values = [value for one, whole in judged for value in compared_returns(one, whole, discount, by_step)]
    return not values or max(values) == min(values)


def drop_zero_variance(
    groups: list[Group], discount: float = 1.0, by_step: bool = False
) -> tuple[list[Group], list[Group]]:
    """(kept, dropped). Groups with equal rewards are dropped: their advantages are 0 under a group baseline."""
    kept: list[Group] = []
    dropped: list[Group] = []
    for group in groups:
        (dropped if has_zero_variance(group, discount, by_step) else kept).append(group)
    return kept, dropped


def mask_overlong(groups: list[Group]) -> int:
    """Exclude truncated rollouts from the loss; their rewards still count in the baseline. Returns their number."""
    truncated = [rollout for group in groups for rollout in group.rollouts if rollout.truncated]
    for rollout in truncated:
        rollout.masked = True
    return len(truncated)


def soft_overlong(
    groups: list[Group], max_tokens: int, buffer: float, weight: float = 1.0, max_length: int = 0
) -> None:
    """DAPO's soft overlong penalty: grows linearly from 0 to `weight` over the last `buffer` (a fraction) of the limit.

    The limit is `max_tokens`, or less if the context leaves fewer tokens of a sequence of `max_length` (0: unlimited).
    Changes `rollout.reward`, which must have been set from the verdict.
    """
    assert 0 < buffer <= 1, "the buffer is a fraction of the limit"
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        given = sum(len(turn.context_ids) for turn in rollout.turns)
        limit = min(max_tokens, max_length - given) if max_length else max_tokens
        last = max(round(buffer * limit), 1)
        rollout.reward -= weight * min(max((rollout.length - (limit - last)) / last, 0.0), 1.0)


def should_sample(rates: PassRates, prompt_id: str, step: int, low: float, high: float, retry: int) -> bool:
    """Whether to sample a prompt: it is new, its running pass rate is within [low, high], or it is due for a retry.

    `retry`: steps after which a skipped prompt is tried again; 0: never.
    """
    if prompt_id not in rates:
        return True
    rate, last = rates[prompt_id]
    return low <= rate <= high or (retry > 0 and step - last >= retry)


def with_results(rates: PassRates, groups: Sequence[Group], step: int) -> dict[str, list[float]]:
    """The running pass rates after these groups."""
    updated = {prompt_id: list(known) for prompt_id, known in rates.items()}
    for group in groups:
        solved = sum(rollout.verdict is not None and rollout.verdict.correct for rollout in group.rollouts)
        new = solved / len(group.rollouts)
        before = updated[group.prompt.id][0] if group.prompt.id in updated else new
        updated[group.prompt.id] = [before + PASS_RATE_MOMENTUM * (new - before), float(step)]
    return updated
