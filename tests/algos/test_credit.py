"""KL penalties in the reward and GAE, against plain loops and the gradient of the KL itself."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.algos import Scorers, make_algorithm
from assay.algos.credit import gae, value_loss
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, UserError, Verdict


def make_groups(seed: int = 0) -> tuple[list[Group], list[list[float]]]:
    """Groups of unequal sizes and lengths, one rollout with two turns, and what a reference says of their tokens."""
    draw = random.Random(seed)

    def turn() -> Turn:
        count = draw.randint(1, 5)
        logprobs = [-draw.random() for _ in range(count)]
        return Turn([1, 2], Completion([0] * count, logprobs, logprobs, Finish.STOP), "")

    groups, reference = [], []
    for number, size in enumerate((3, 2, 4)):
        prompt = Prompt(str(number), ())
        rollouts = [Rollout(prompt, i, [turn() for _ in range(1 + (i == 1))]) for i in range(size)]
        for rollout in rollouts:
            rollout.verdict = Verdict(draw.choice([0.0, 1.0]), Status.OK)
            reference.append([-draw.random() for _ in range(rollout.length)])
        groups.append(Group(prompt, rollouts))
    return groups, reference


def test_reference_with_probability_zero_for_a_sampled_token_is_reported() -> None:
    """The KL to it is infinite: no advantage could be made of that."""
    groups, reference = make_groups()
    reference[1][0] = -math.inf
    with pytest.raises(UserError, match=r"the reference gives a token .* to 0 \(sample 1\) probability 0"):
        make_algorithm("grpo", reward_kl_coef=0.3).credit(groups, Scorers(lambda _: reference))


@pytest.mark.parametrize("recipe", ["rloo", "reinforce"])
def test_sequence_kl_penalty_is_the_sum_over_tokens(recipe: str) -> None:
    groups, reference = make_groups()
    algo = make_algorithm(recipe, reward_kl_coef=0.3)
    assert algo.needs.reference and algo.needs.ref_logprobs_in_credit and not algo.needs.ref_logprobs_in_loss
    algo.credit(groups, Scorers(lambda _: reference))
    place = 0
    for group in groups:
        for rollout in group.rollouts:
            expected = rollout.verdict.reward  # type: ignore[union-attr]
            own = [p for turn in rollout.turns for p in turn.completion.engine_logprobs]
            for index in range(len(own)):
                expected -= 0.3 * (own[index] - reference[place][index])
            assert rollout.reward == pytest.approx(expected, abs=1e-12) and rollout.token_advantages is None
            place += 1
    paid, advantages = [group.rewards for group in groups], [[r.advantage for r in g.rollouts] for g in groups]
    for group in groups:
        for rollout in group.rollouts:
            rollout.verdict = Verdict(rollout.reward, Status.OK)
    make_algorithm(recipe).credit(groups)  # the same rewards, judged so
    assert [group.rewards for group in groups] == paid
    assert [[r.advantage for r in g.rollouts] for g in groups] == advantages


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out", "batch_mean", "none"])
def test_token_kl_penalty_is_the_sum_from_the_token_onwards(advantage: str) -> None:
    groups, reference = make_groups(1)
    make_algorithm("rloo", advantage=advantage, reward_kl_coef=0.3, reward_kl_per="token").credit(
        groups, Scorers(lambda _: reference)
    )
    every = [rollout for group in groups for rollout in group.rollouts]
    group_of = {id(rollout): group for group in groups for rollout in group.rollouts}
    for rollout, ref in zip(every, reference, strict=True):
        others = group_of[id(rollout)].rollouts
        baseline = {
            "group_mean": sum(r.reward for r in others) / len(others),
            "leave_one_out": sum(r.reward for r in others if r is not rollout) / (len(others) - 1),
            "batch_mean": sum(r.reward for r in every) / len(every),
            "none": 0.0,
        }[advantage]
        own = [p for turn in rollout.turns for p in turn.completion.engine_logprobs]
        assert rollout.verdict is not None and rollout.token_advantages is not None
        for index, found in enumerate(rollout.token_advantages):
            to_go = rollout.verdict.reward - 0.3 * sum(own[i] - ref[i] for i in range(index, len(own)))
            assert found == pytest.approx(to_go - baseline, abs=1e-12)


def test_reward_kl_gradient_is_that_of_the_sequence_divergence() -> None:
    """Over all answers of two tokens, weighted by their probability: the mean gradient is that of coef * KL."""
    torch.manual_seed(0)
    first, second = torch.randn(3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    reference = (torch.randn(3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64))
    theta = [first.requires_grad_(), second.requires_grad_()]
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)
    ref_first, ref_second = reference[0].log_softmax(-1), reference[1].log_softmax(-1)
    joint, ref_joint = log_first[:, None] + log_second, ref_first[:, None] + ref_second
    expected = torch.autograd.grad(0.7 * (joint.exp() * (joint - ref_joint)).sum(), theta, retain_graph=True)
    for per in ("sequence", "token"):
        algo = make_algorithm("rloo", advantage="none", reward_kl_coef=0.7, reward_kl_per=per)
        loss = torch.zeros((), dtype=torch.float64)
        for a, b in itertools.product(range(3), range(3)):
            logprobs = torch.stack([log_first[a], log_second[a, b]])
            completion = Completion([a, b], logprobs.tolist(), logprobs.tolist(), Finish.STOP)
            rollout = Rollout(Prompt("p", ()), 0, [Turn([1], completion, "")], Verdict(0.0, Status.WRONG))
            ref = [[float(ref_first[a]), float(ref_second[a, b])]]
            algo.credit([Group(rollout.prompt, [rollout])], Scorers(lambda _, ref=ref: ref))  # type: ignore[misc]
            advantages = torch.tensor(rollout.token_advantages or [rollout.advantage] * 2, dtype=torch.float64)
            loss = loss - joint[a, b].exp().detach() * (advantages * logprobs).sum()
        found = torch.autograd.grad(loss, theta, retain_graph=True)
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("per", ["sequence", "token"])
def test_greedy_baseline_is_subtracted_with_token_kl_penalties(per: str) -> None:
    (groups, reference), (plain, _) = make_groups(2), make_groups(2)
    for group in groups:
        group.baseline = 0.25
    for credited in (groups, plain):
        make_algorithm("remax", reward_kl_coef=0.3, reward_kl_per=per).credit(credited, Scorers(lambda _: reference))
    for one, other in zip(groups, plain, strict=True):
        for left, right in zip(one.rollouts, other.rollouts, strict=True):
            assert left.reward == right.reward and left.advantage == pytest.approx(right.advantage - 0.25)
            expected = [value - 0.25 for value in right.token_advantages or ()]
            assert (left.token_advantages or []) == pytest.approx(expected)


def token_advantages(groups: list[Group]) -> list[list[float]]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [r.token_advantages or [r.advantage] * r.trained for r in rollouts]


@pytest.mark.parametrize("coef", [0.0, 0.3])
def test_reinforce_pp_normalises_over_all_tokens(coef: float) -> None:
    """Against a loop over single tokens, with and without a KL in the reward."""
    groups, reference = make_groups(3)
    make_algorithm("reinforce_pp", reward_kl_coef=coef).credit(groups, Scorers(lambda _: reference))
    returns = []
    for rollout, ref in zip([r for group in groups for r in group.rollouts], reference, strict=True):
        own = [p for turn in rollout.turns for p in turn.completion.engine_logprobs]
        returns.append([rollout.verdict.reward - coef * (sum(own[i:]) - sum(ref[i:])) for i in range(len(own))])
    every = [value for values in returns for value in values]
    mean = sum(every) / len(every)
    std = (sum((value - mean) ** 2 for value in every) / (len(every) - 1)) ** 0.5
    for found, values in zip(token_advantages(groups), returns, strict=True):
        assert found == pytest.approx([(value - mean) / (std + 1e-4) for value in values], abs=1e-12)


@pytest.mark.parametrize("changes", [{}, {"reward_kl_coef": 0.3}, {"step_credit": True, "reward_kl_per": "sequence"}])
def test_token_norm_statistics_exclude_masked_answers(changes: dict[str, Any]) -> None:
    """The same as without these answers, which have no trained tokens."""
    groups, reference = make_groups(6)
    masked = groups[0].rollouts[1]
    assert len(masked.turns) == 2 and masked.verdict is not None
    masked.masked, masked.verdict.reward = True, 5.0
    algo = make_algorithm("reinforce_pp", **changes)
    algo.credit(groups, Scorers(lambda _: reference))
    assert not masked.learns
    others, other_reference = make_groups(6)
    del others[0].rollouts[1], other_reference[1]
    algo.credit(others, Scorers(lambda _: other_reference))
    expected = token_advantages(others)
    assert [*token_advantages(groups)[:1], *token_advantages(groups)[2:]] == [pytest.approx(one) for one in expected]


def test_token_norm_of_equal_trained_returns_is_exactly_zero_whatever_was_masked() -> None:
    groups, _ = make_groups(6)
    for rollout in (r for group in groups for r in group.rollouts):
        rollout.verdict = Verdict(0.1, Status.WRONG)
    groups[0].rollouts[0].masked, groups[0].rollouts[0].verdict = True, Verdict(0.7, Status.OK)
    make_algorithm("reinforce_pp").credit(groups)
    assert not any(rollout.learns for group in groups for rollout in group.rollouts)


def test_token_norm_uses_the_token_count_of_each_step() -> None:
    """With credit by steps: every step has its own return, which counts as often as the step has tokens."""
    groups, _ = make_groups(5)
    groups[0].rollouts[1].turns[0].masked = True
    for rollout in (r for group in groups for r in group.rollouts):
        rollout.turns[0].reward = 0.25
    algo = make_algorithm("reinforce_pp", step_credit=True, reward_kl_per="sequence")
    algo.credit(groups)
    returns, every = [], []
    for rollout in (r for group in groups for r in group.rollouts):
        first = rollout.verdict.reward
        steps = [first] if len(rollout.turns) == 1 else [first, first - 0.25]
        own = [v for v, t in zip(steps, rollout.turns, strict=True) if not t.masked for _ in t.completion.token_ids]
        returns.append(own)
        every += own
    mean = sum(every) / len(every)
    std = (sum((value - mean) ** 2 for value in every) / (len(every) - 1)) ** 0.5
    for found, values in zip(token_advantages(groups), returns, strict=True):
        assert found == pytest.approx([(value - mean) / (std + 1e-4) for value in values], abs=1e-12)


def test_scaled_advantages_reject_token_kl_penalties() -> None:
    for advantage in ("group_norm", "group_mean_rescaled", "batch_norm", lambda rewards: rewards):
        make_algorithm("grpo", advantage=advantage, reward_kl_coef=0.1)
        with pytest.raises(UserError, match="for single tokens"):
            make_algorithm("grpo", advantage=advantage, reward_kl_coef=0.1, reward_kl_per="token")


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.7, 0.0)])
def test_gae_is_the_discounted_sum_of_td_errors(gamma: float, lam: float) -> None:
    """Against the definition, term by term: A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})."""
    draw = random.Random(0)
    for length in (0, 1, 2, 7):
        values, rewards = ([draw.gauss(0, 1) for _ in range(length)] for _ in range(2))
        for after in (0.0, 1.3):
            found = gae(values, rewards, gamma, lam, after)
            ahead = [*values, after]
            for place in range(length):
                expected = 0.0
                for step in range(place, length):
                    surprise = rewards[step] + gamma * ahead[step + 1] - ahead[step]
                    expected += (gamma * lam) ** (step - place) * surprise
                assert found[place] == pytest.approx(expected, abs=1e-12)
        assert gae(values, rewards, gamma, lam) == gae(values, rewards, gamma, lam, 0.0)


def test_metrics_of_the_critic_are_its_mean_value_and_explained_variance() -> None:
    groups, _ = make_groups()
    told = make_algorithm("ppo").credit(groups, Scorers(values=lambda rollouts: [[0.3] * r.trained for r in rollouts]))
    inputs = [rollout.inputs for group in groups for rollout in group.rollouts]
    values, returns = (np.concatenate([own[name] for own in inputs]) for name in ("values", "returns"))
    assert told["critic/value_mean"] == pytest.approx(0.3)
    assert told["critic/explained_variance"] == pytest.approx(1 - np.var(returns - values) / np.var(returns), abs=1e-12)
    told = make_algorithm("ppo").credit(groups, Scorers(values=lambda rollouts: [own["returns"] for own in inputs]))
    assert told["critic/explained_variance"] > 0.5


def test_clipped_values_have_no_gradient() -> None:
    values = torch.tensor([0.5, 0.05, -0.5], requires_grad=True)
    given, returns = torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    loss = value_loss(values, given, returns, 0.1)
    # 0.5 counts as 0.1, which is worse; 0.05 is near enough; -0.5 is worse than -0.1, and still counts as it is
    assert loss.tolist() == pytest.approx([0.9**2 / 2, 0.95**2 / 2, 1.5**2 / 2])
    loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.0, -0.95, -1.5])
    assert value_loss(values, given, returns, 0.0).tolist() == pytest.approx([0.125, 0.95**2 / 2, 1.5**2 / 2])


def raises_index_error(rewards: list[Tensor]) -> list[Tensor]:
    return [rewards[99] for _ in rewards]


@pytest.mark.parametrize(
    ("advantage", "message"),
    [
        (lambda rewards: [float(r.mean()) for r in rewards], "one finite number per reward"),
        (lambda rewards: [r[:-1] for r in rewards], "one finite number per reward"),
        (lambda rewards: torch.cat(rewards), "returned 9 groups for 3"),
        (lambda rewards: 0.5, "returned float: return a list"),
        (lambda rewards: torch.tensor(0.5), "a single number: return a list"),
        (lambda rewards: None, "returned NoneType: return a list"),
        (lambda rewards: (r for r in rewards), "returned generator: return a list"),
        (lambda rewards: [["good"] * len(r) for r in rewards], "returned no numbers"),
        (raises_index_error, r"failed: IndexError: list index out of range \(.*test_credit.py:\d+\)"),
    ],
)
def test_an_advantage_function_with_an_invalid_result_is_reported_in_one_line(
    advantage: Callable[[list[Tensor]], Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        make_algorithm("grpo", advantage=advantage).credit(make_groups()[0])
    assert "the advantage function" in str(error.value) and "\n" not in str(error.value)


def test_an_advantage_function_may_return_lists_of_numbers() -> None:
    lists, tensors = make_groups()[0], make_groups()[0]
    make_algorithm("grpo", advantage=lambda rewards: [(r - r.mean()).tolist() for r in rewards]).credit(lists)
    make_algorithm("grpo", advantage="group_mean").credit(tensors)
    found, expected = ([r.advantage for group in groups for r in group.rollouts] for groups in (lists, tensors))
    assert found == pytest.approx(expected)
