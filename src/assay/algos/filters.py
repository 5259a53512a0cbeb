"""Filters and reward shaping, applied before credit assignment: select rollouts, groups and prompts to train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from assay.algos.advantages import compared_returns
from assay.algos.component import Component, LengthLimits, RunFacts, check_order
from assay.config import AlgoConfig
from assay.config.algorithm import OverlongConfig, PassRateConfig
from assay.types import Group, UserError

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
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            limit = limits.max_new_tokens
            if limits.max_length:
                limit = min(limit, limits.max_length - sum(len(turn.context_ids) for turn in rollout.turns))
            last = max(round(buffer * limit), 1)
            rollout.reward -= weight * min(max((rollout.length - (limit - last)) / last, 0.0), 1.0)

    def mask(self, groups: list[Group]) -> None:
        """Exclude truncated rollouts from the loss; their rewards still count in the baseline."""
        if self.settings.mask_overlong:
            for rollout in (rollout for group in groups for rollout in group.rollouts):
                rollout.masked = rollout.masked or rollout.truncated


class ZeroVarianceFilter(Component[AlgoConfig]):
    """Drops groups whose rewards are all equal; they have no gradient under a group baseline. May resample."""

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
            (dropped if self.settings.drop_zero_variance and self.matches(group) else kept).append(group)
        return kept, dropped


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
