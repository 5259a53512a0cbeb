"""Advantage functions against plain numpy, and the returns that they compare."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.algos.advantages import ADVANTAGES, credited_returns, returns, token_rewards
from assay.algos.recipes import make_algorithm
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, UserError, Verdict

GROUPED = [
    *("group_mean", "group_norm", "leave_one_out", "group_mean_batch_norm", "group_mean_token_norm"),
    *("group_mean_rescaled", "beta_norm"),
]
groups_of_rewards = st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=5)


def give(name: str, groups: list[list[float]]) -> list[list[float]]:
    return [a.tolist() for a in ADVANTAGES[name]([torch.tensor(g, dtype=torch.float64) for g in groups])]


def reference(name: str, groups: list[list[float]]) -> list[list[float]]:
    everything = [r for group in groups for r in group]
    out = []
    for group in groups:
        mean = sum(group) / len(group)
        if name == "group_mean":
            out.append([r - mean for r in group])
        elif name == "group_norm":
            out.append([(r - mean) / (float(np.std(group, ddof=1)) + 1e-4) for r in group])
        elif name == "leave_one_out":
            others = [[x for j, x in enumerate(group) if j != i] for i in range(len(group))]
            out.append([r - sum(o) / len(o) for r, o in zip(group, others, strict=True)])
        elif name == "batch_mean":
            out.append([r - sum(everything) / len(everything) for r in group])
        elif name in ("batch_norm", "token_norm"):  # the same where each reward is that of one token
            scale = float(np.std(everything, ddof=1)) + 1e-4
            out.append([(r - sum(everything) / len(everything)) / scale for r in group])
        elif name in ("group_mean_batch_norm", "group_mean_token_norm"):
            residuals = np.array([r - sum(g) / len(g) for g in groups for r in g])
            scale = float(np.std(residuals, ddof=1)) + 1e-4
            out.append([(r - mean - float(residuals.mean())) / scale for r in group])
        elif name == "group_mean_rescaled":
            telling = sum(max(g) > min(g) for g in groups)
            out.append([(r - mean) * len(groups) / max(telling, 1) for r in group])
        elif name == "beta_norm":
            density = beta_density(mean, *fitted_beta([sum(g) / len(g) for g in groups]))
            out.append([(r - mean) * min(1 / density, 1e6) if 0 < mean < 1 else 0.0 for r in group])
        else:
            out.append(list(group))
    return out


def fitted_beta(rates: list[float]) -> tuple[float, float]:
    """BNPO's alpha and beta, by the moments of the groups' mean rewards."""
    mean, variance = float(np.mean(rates)), float(np.var(rates, ddof=1)) if len(rates) > 1 else 0.0
    if variance <= 1e-12 or (size := mean * (1 - mean) / variance - 1) <= 0:
        return 1.0, 1.0
    return 1 + mean * size / 3, 1 + (1 - mean) * size / 3


def beta_density(p: float, alpha: float, beta: float) -> float:
    """Its logarithm, for the Gamma function overflows at 171."""
    if not 0 < p < 1:
        return 1.0
    scale = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    return max(math.exp((alpha - 1) * math.log(p) + (beta - 1) * math.log(1 - p) - scale), 1e-300)


def assert_close(actual: list[list[float]], expected: list[list[float]], tolerance: float) -> None:
    assert [len(a) for a in actual] == [len(e) for e in expected]
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@settings(max_examples=30)
@given(groups=groups_of_rewards)
def test_advantages_equal_the_formula(name: str, groups: list[list[float]]) -> None:
    if name == "beta_norm":  # it takes probabilities, and no finer ones than some judge would give
        groups = [[round(abs(r) / 10, 2) for r in group] for group in groups]
    # near-equal rewards divide rounding errors by 1e-4, hence the looser bound
    assert_close(give(name, groups), reference(name, groups), 1e-9 if name != "beta_norm" else 1e-6)


NOT_DYADIC = [0.7, 1 / 3, 0.1 + 0.2, 1e-3, 0.9999999]


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "none"])
def test_equal_rewards_without_exact_binary_form_give_exactly_zero_advantages(name: str) -> None:
    """A rounded mean is not the value that it is the mean of."""
    for value, size in itertools.product(NOT_DYADIC, range(2, 20)):
        assert give(name, [[value] * size] * 3) == [[0.0] * size] * 3
        if name in GROUPED and name != "group_mean_token_norm":  # its mean is not 0
            found = give(name, [[value] * size, [0.1, 0.7, 0.2, 0.2], [1 / 3, 0.6]])
            assert found[0] == [0.0] * size and all(any(advantages) for advantages in found[1:])


@pytest.mark.parametrize(("low", "high"), [(-3.0, 2.0), (-0.25, 0.75)])
def test_beta_norm_maps_rewards_to_success_rates(low: float, high: float) -> None:
    """The range of 0, 1 and all rewards is mapped to 0 and 1."""
    groups = [[high if reward else low for reward in group] for group in ([1, 0, 0, 0], [1, 1, 1, 0], [0, 0], [1, 0])]
    least, most = min(0.0, low), max(1.0, high)
    expected = give("beta_norm", [[(reward - least) / (most - least) for reward in group] for group in groups])
    assert_close(give("beta_norm", groups), expected, 1e-9)


def test_beta_norm_falls_back_to_the_group_mean_without_a_fit() -> None:
    assert give("beta_norm", [[1, 0], [0, 1]]) == [[0.5, -0.5], [-0.5, 0.5]]  # all alike
    assert give("beta_norm", [[1, 1], [0, 0]]) == [[0, 0], [0, 0]]  # all 0 and 1


def test_beta_norm_is_bounded_if_the_density_underflows() -> None:
    """Nearly all p alike: the Beta is narrow, and at the one p that lies apart its density is 0 in float64."""
    groups = [[1.0] * 5 + [0.0] * 5] * 2000 + [[1.0] + [0.0] * 9]
    found = give("beta_norm", groups)
    assert found[-1] == pytest.approx([0.9e6, *[-0.1e6] * 9])
    assert all(math.isfinite(value) for group in found for value in group)


@pytest.mark.parametrize("name", ["token_norm", "group_mean_token_norm"])
def test_token_norm_statistics_are_over_all_tokens(name: str) -> None:
    rewards, tokens = [[1.0, 0.0, 0.5], [0.0, 1.0]], [[3, 1, 0], [7, 2]]
    function = ADVANTAGES[name]
    found = function(*([torch.tensor(v, dtype=torch.float64) for v in values] for values in (rewards, tokens)))  # type: ignore[call-arg, arg-type]
    means = [sum(group) / len(group) if name.startswith("group") else 0.0 for group in rewards]
    values = [[r - mean for r in group] for group, mean in zip(rewards, means, strict=True)]
    every = [v for vs, ns in zip(values, tokens, strict=True) for v, n in zip(vs, ns, strict=True) for _ in range(n)]
    expected = [[(v - np.mean(every)) / (np.std(every, ddof=1) + 1e-4) for v in group] for group in values]
    expected[0][2] = 0.0  # without tokens
    assert_close([group.tolist() for group in found], expected, 1e-12)


@pytest.mark.parametrize("name", GROUPED)
def test_group_baselines_reject_single_samples(name: str) -> None:
    with pytest.raises(UserError, match=r'raise train.samples .* algo.advantage = "batch_mean"'):
        give(name, [[1.0, 0.0], [1.0]])


@pytest.mark.parametrize("name", ["batch_mean", "batch_norm", "token_norm"])
def test_batch_baselines_accept_single_samples_but_not_a_single_rollout(name: str) -> None:
    assert_close(give(name, [[1.0], [0.0]]), reference(name, [[1.0], [0.0]]), 1e-9)
    with pytest.raises(UserError, match="two rollouts"):
        give(name, [[1.0]])


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_advantages_of_an_empty_batch(name: str) -> None:
    assert give(name, []) == []


def test_advantage_none_copies_the_rewards() -> None:
    rewards = [torch.ones(2, dtype=torch.float64)]
    ADVANTAGES["none"](rewards)[0].zero_()
    assert rewards[0].tolist() == [1.0, 1.0]


PROMPT = Prompt("p/0", ())


def episode(rewards: list[float], sample: int = 0, total: float | None = None) -> Rollout:
    turns = [Turn([1], Completion([2, 3], [-1.0] * 2, [-1.0] * 2, Finish.STOP), "x", reward=r) for r in rewards]
    total = sum(rewards) if total is None else total
    return Rollout(PROMPT, sample, turns, Verdict(total, Status.WRONG), total)


def test_returns_are_discounted_sums_of_later_rewards() -> None:
    rewards, discount = [1.0, 0.0, 2.0, -1.0], 0.5
    expected = [sum(discount ** (k - t) * rewards[k] for k in range(t, 4)) for t in range(4)]
    assert returns(rewards, discount) == pytest.approx(expected)
    assert returns(rewards) == [2.0, 1.0, 1.0, -1.0] and returns([]) == [] and returns([3.0], 0.0) == [3.0]


def test_reward_beyond_the_steps_is_added_to_the_last_step() -> None:
    group = Group(PROMPT, [episode([0.0, 0.5], total=1.5), episode([0.0], total=1.0)])
    assert credited_returns(group) == [1.5, 1.0]
    assert credited_returns(group, 0.5) == [0.75, 1.0]
    assert credited_returns(group, 0.5, by_step=True) == [0.75, 1.5, 1.0]


def test_episode_credit_is_one_advantage_and_step_credit_one_per_step() -> None:
    group = Group(PROMPT, [episode([0.0, 1.0], 0), episode([0.5], 1), episode([0.0, 0.0], 2)])
    group.rollouts[0].token_advantages = [9.0, 9.0]  # of an earlier credit
    make_algorithm("simple").credit([group])
    assert [r.advantage for r in group.rollouts] == pytest.approx([0.5, 0.0, -0.5])
    assert all(rollout.token_advantages is None for rollout in group.rollouts)
    make_algorithm("simple", step_credit=True, discount=0.5).credit([group])
    values = [0.5, 1.0, 0.5, 0.0, 0.0]
    mean = sum(values) / 5
    lengths = [len(turn.completion.token_ids) for r in group.rollouts for turn in r.turns]
    expected = [value - mean for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    assert [value for r in group.rollouts for value in r.token_advantages or ()] == pytest.approx(expected)
    assert all(r.token_advantages and r.advantage == r.token_advantages[0] for r in group.rollouts)


def test_step_rewards_are_given_to_the_last_token_of_the_step() -> None:
    rollout = episode([0.5, 0.25], total=1.5)
    first, second = (len(turn.completion.token_ids) for turn in rollout.turns)
    rollout.reward = 1.5
    expected = [0.0] * (first - 1) + [0.5] + [0.0] * (second - 1) + [1.0]
    assert token_rewards(rollout) == pytest.approx(expected)
    prices = [0.1 * (place + 1) for place in range(first + second)]
    rollout.reward -= sum(prices)  # as whole answers pay
    assert token_rewards(rollout, prices) == pytest.approx([e - p for e, p in zip(expected, prices, strict=True)])


def test_masked_steps_are_not_compared_but_their_rewards_count() -> None:
    group = Group(PROMPT, [episode([0.25, 0.5, 1.0], 0), episode([0.0, 0.5], 1)])
    first, second = group.rollouts
    first.turns[1].masked = second.turns[0].masked = True
    assert credited_returns(group, 0.5) == [0.75, 0.25]
    assert credited_returns(group, 0.5, by_step=True) == [0.75, 1.0, 0.5]
    assert token_rewards(first) == [0.0, 0.75, 0.0, 1.0]  # what follows a masked step came of those before it
    assert token_rewards(second) == [0.0, 0.5]
    second.turns[0].reward, second.reward, second.verdict = 0.25, 0.75, Verdict(0.75, Status.WRONG)
    assert token_rewards(second) == [0.0, 0.5]  # no token in the loss has earned the rest
    make_algorithm("simple", step_credit=True, discount=0.5).credit([group])
    assert second.token_advantages == pytest.approx([-0.25] * 2) and second.advantage == pytest.approx(-0.25)


def test_zero_variance_filter_compares_the_credited_returns() -> None:
    sooner = Group(PROMPT, [episode([1.0], 0), episode([0.0, 1.0], 1)])
    steps = Group(PROMPT, [episode([0.5, 0.5], 0), episode([0.0, 1.0], 1)])
    solved = Group(PROMPT, [episode([1.0], 0), episode([1.0], 1)])
    expected = {(1.0, False): [], (0.9, False): [sooner, steps], (1.0, True): [steps], (0.9, True): [sooner, steps]}
    for (discount, by_step), kept in expected.items():
        algo = make_algorithm("simple", drop_zero_variance=True, discount=discount, step_credit=by_step)
        assert algo.keep([sooner, steps, solved])[0] == kept
        algo.credit([sooner, steps, solved])
        learns = [any(rollout.learns for rollout in group.rollouts) for group in (sooner, steps, solved)]
        assert learns == [group in kept for group in (sooner, steps, solved)]
