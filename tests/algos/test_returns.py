from __future__ import annotations

import pytest

from assay.algos.advantages import credited_returns, returns, token_rewards
from assay.algos.recipes import make_algorithm
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, UserError, Verdict

PROMPT = Prompt("p/0", ())


def episode(rewards: list[float], sample: int = 0, total: float | None = None) -> Rollout:
    turns = [Turn([1], Completion([2, 3], [-1.0] * 2, [-1.0] * 2, Finish.STOP), "x", reward=r) for r in rewards]
    total = sum(rewards) if total is None else total
    return Rollout(PROMPT, sample, turns, Verdict(total, Status.WRONG), total)


def test_returns_are_discounted_sums_of_what_follows() -> None:
    rewards, discount = [1.0, 0.0, 2.0, -1.0], 0.5
    expected = [sum(discount ** (k - t) * rewards[k] for k in range(t, 4)) for t in range(4)]
    assert returns(rewards, discount) == pytest.approx(expected)
    assert returns(rewards) == [2.0, 1.0, 1.0, -1.0] and returns([]) == [] and returns([3.0], 0.0) == [3.0]


def test_what_the_whole_got_beyond_its_steps_came_with_the_last() -> None:
    group = Group(PROMPT, [episode([0.0, 0.5], total=1.5), episode([0.0], total=1.0)])
    assert credited_returns(group) == [1.5, 1.0]
    assert credited_returns(group, 0.5) == [0.75, 1.0]
    assert credited_returns(group, 0.5, by_step=True) == [0.75, 1.5, 1.0]


def test_whole_episodes_get_one_advantage_and_steps_their_own() -> None:
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


def test_rewards_come_with_the_last_tokens_of_steps() -> None:
    rollout = episode([0.5, 0.25], total=1.5)
    first, second = (len(turn.completion.token_ids) for turn in rollout.turns)
    rollout.reward = 1.5
    expected = [0.0] * (first - 1) + [0.5] + [0.0] * (second - 1) + [1.0]
    assert token_rewards(rollout) == pytest.approx(expected)
    prices = [0.1 * (place + 1) for place in range(first + second)]
    rollout.reward -= sum(prices)  # as whole answers pay
    assert token_rewards(rollout, prices) == pytest.approx([e - p for e, p in zip(expected, prices, strict=True)])


def test_masked_steps_are_none_to_compare_but_what_they_brought_is_kept() -> None:
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


def test_a_discount_prefers_the_sooner() -> None:
    group = Group(PROMPT, [episode([1.0], 0), episode([0.0, 1.0], 1)])
    make_algorithm("simple", discount=0.9).credit([group])
    assert [r.advantage for r in group.rollouts] == pytest.approx([0.05, -0.05])
    with pytest.raises(UserError, match="discount"):
        make_algorithm("simple", discount=1.5)


def test_a_group_is_dropped_only_if_nothing_that_is_compared_differs() -> None:
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


def test_credit_for_steps_and_a_penalty_on_tokens_do_not_go_together() -> None:
    for settings in ({"step_credit": True}, {"discount": 0.9}):
        with pytest.raises(UserError, match="step_credit or discount"):
            make_algorithm("reinforce_pp", reward_kl_coef=0.01, **settings)
