"""Filters of rollouts, groups and prompts, on hand-made groups."""

from __future__ import annotations

import pytest
from algos_parts import make_group

from assay.algos import LengthLimits
from assay.algos.algorithm import OverlongFilter, PassRateFilter, ZeroVarianceFilter
from assay.config import AlgoConfig
from assay.config.algorithm import OverlongConfig, PassRateConfig
from assay.types import Group, Status, Verdict


def drop_zero_variance(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    return ZeroVarianceFilter(AlgoConfig(drop_zero_variance=True)).split(groups)


def soft_overlong(group: Group, buffer: float = 0.2, weight: float = 1.0, max_length: int = 0) -> None:
    settings = OverlongConfig(soft_overlong_buffer=buffer, soft_overlong_weight=weight)
    OverlongFilter(settings).shape_rewards([group], LengthLimits(max_new_tokens=100, max_length=max_length))


def test_drop_zero_variance_splits_groups_by_equal_rewards() -> None:
    mixed = make_group("mixed", [(1, 3), (0, 3)])
    solved = make_group("solved", [(1, 3), (1, 5)])
    failed = make_group("failed", [(0, 3), (0, 5)])
    kept, dropped = drop_zero_variance([solved, mixed, failed])
    assert [group.prompt.id for group in kept] == ["mixed"]
    assert [group.prompt.id for group in dropped] == ["solved", "failed"]
    assert ZeroVarianceFilter(AlgoConfig()).split([solved, mixed]) == ([solved, mixed], [])


def test_drop_zero_variance_uses_the_reward_before_shaping() -> None:
    solved = make_group("solved", [(1, 3), (1, 9)])
    solved.rollouts[1].reward = 0.5
    assert drop_zero_variance([solved]) == ([], [solved])


def test_mask_overlong_masks_truncated_rollouts_and_keeps_their_rewards() -> None:
    group = make_group("a", [(1, 3), (0, 10), (0, 10)])
    OverlongFilter(OverlongConfig()).mask([group])
    assert not any(rollout.masked for rollout in group.rollouts)
    OverlongFilter(OverlongConfig(mask_overlong=True)).mask([group])
    assert [rollout.masked for rollout in group.rollouts] == [False, True, True]
    assert group.rewards == [1, 0, 0]


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (120, -1)])
def test_soft_overlong_is_piecewise_linear(length: int, penalty: float) -> None:
    for weight in (1.0, 0.3):
        group = make_group("a", [(1.0, length)])
        soft_overlong(group, weight=weight)
        assert group.rewards == [pytest.approx(1.0 + weight * penalty)]


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (32, 0), (36, -0.5), (40, -1)])
def test_soft_overlong_uses_the_context_limit_if_it_is_smaller(length: int, penalty: float) -> None:
    """Two context tokens leave 40 of 42 tokens: the buffer is the last 8 of these."""
    for max_length, expected in ((42, penalty), (102, 0)):
        group = make_group("a", [(1.0, length)])
        soft_overlong(group, max_length=max_length)
        assert group.rewards == [pytest.approx(1.0 + expected)]


def test_soft_overlong_subtracts_the_context_of_every_turn() -> None:
    group = make_group("a", [(1.0, 9)])
    group.rollouts[0].turns.append(make_group("b", [(0.0, 9)]).rollouts[0].turns[0])
    soft_overlong(group, buffer=0.5, max_length=24)  # 2 + 9 + 2 + 9 of 24
    assert group.rewards == [pytest.approx(1.0 - 8 / 10)]


def test_running_pass_rates_average_old_and_new_results() -> None:
    easy, hard = make_group("easy", [(1, 3), (1, 3)]), make_group("hard", [(1, 3), (0, 3)])
    known = {"easy": [0.5, 3.0]}
    prompts = PassRateFilter(PassRateConfig(pass_rate_low=0.6))
    prompts.load_state_dict({"rates": known})
    assert prompts.end_step(7, [easy, hard], {}) == {"prompts/known": 2.0, "prompts/within_reach": 0.5}
    state = prompts.state_dict()
    assert state == {"rates": {"easy": [0.75, 7.0], "hard": [0.5, 7.0]}} and known == {"easy": [0.5, 3.0]}
    prompts.end_step(9, [easy, easy], {})
    assert prompts.state_dict() == {"rates": {"easy": [0.9375, 9.0], "hard": [0.5, 7.0]}}
    assert state["rates"]["easy"] == [0.75, 7.0]  # a saved state does not change


@pytest.mark.parametrize(("retry", "accepted"), [(0, {"new", "good"}), (5, {"new", "good", "easy"})])
def test_new_prompts_medium_pass_rates_and_due_retries_are_accepted(retry: int, accepted: set[str]) -> None:
    rates = {"easy": [0.95, 3.0], "hard": [0.0, 6.0], "good": [0.2, 1.0]}
    prompts = PassRateFilter(PassRateConfig(pass_rate_low=0.1, pass_rate_high=0.9, pass_rate_retry=retry))
    prompts.load_state_dict({"rates": rates})
    assert {prompt for prompt in (*rates, "new") if prompts.accepts(prompt, step=8)} == accepted


def test_pass_rates_ignore_answers_that_were_not_judged() -> None:
    filter = PassRateFilter(PassRateConfig(pass_rate_low=0.1))
    group = make_group("a", [(1.0, 2), (0.0, 2)])
    for rollout, status in zip(group.rollouts, (Status.OK, Status.ERROR), strict=True):
        rollout.verdict = Verdict(0.0, status)
    unknown = make_group("b", [(0.0, 2)])
    unknown.rollouts[0].verdict = Verdict(0.0, Status.ERROR)
    filter.end_step(1, [group, unknown], {})
    assert filter.rates == {"a": [1.0, 1.0]}
