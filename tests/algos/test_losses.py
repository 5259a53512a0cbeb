"""Per-token losses and their gradients against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.algos.losses import LOSSES, cispo, dual_clip, ppo_clip, reinforce


def column(values: list[float], grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def ppo_value_and_slope(ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Loss and d loss / d logprob, case by case: outside the range on the rewarding side, the gradient is gone."""
    if advantage > 0 and ratio > 1 + high:
        return -(1 + high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - low:
        return -(1 - low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


@settings(deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8),  # (log-ratio, advantage)
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
)
def test_ppo_clip_value_gradient_and_statistics(tokens: list[tuple[float, float]], low: float, high: float) -> None:
    # the kink itself has no unique gradient
    tokens = [t for t in tokens if min(abs(math.exp(t[0]) - 1 + low), abs(math.exp(t[0]) - 1 - high)) > 1e-9]
    behaviour = column([-1.0] * len(tokens))
    logprobs = column([log_ratio - 1.0 for log_ratio, _ in tokens], grad=True)
    losses, stats = ppo_clip(logprobs, behaviour, column([a for _, a in tokens]), low, high)
    losses.sum().backward()
    expected = [ppo_value_and_slope(math.exp(log_ratio), a, low, high) for log_ratio, a in tokens]
    assert losses.tolist() == pytest.approx([value for value, _ in expected], abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-12)
    clipped = [slope == 0.0 and a != 0 for (_, slope), (_, a) in zip(expected, tokens, strict=True)]
    assert stats["clip_fraction"].tolist() == clipped
    assert (stats["clip_low_fraction"] | stats["clip_high_fraction"]).tolist() == clipped


@settings(deadline=None)
@given(
    tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8),  # (log-ratio, advantage)
    limit=st.floats(1.1, 15),
)
def test_dual_clip_limits_the_ratio_of_negative_advantages(tokens: list[tuple[float, float]], limit: float) -> None:
    """max(min(q A, clip(q) A), limit A) where A < 0, and the gradient of whichever branch that is."""
    kinks = (0.8, 1.28, limit)
    tokens = [t for t in tokens if min(abs(math.exp(t[0]) - kink) for kink in kinks) > 1e-9]
    logprobs = column([log_ratio for log_ratio, _ in tokens], grad=True)
    advantages = column([a for _, a in tokens])
    losses, limited = dual_clip(
        ppo_clip(logprobs, column([0.0] * len(tokens)), advantages, 0.2, 0.28)[0], advantages, limit
    )
    losses.sum().backward()
    expected = []
    for log_ratio, a in tokens:
        if a < 0 and math.exp(log_ratio) > limit:
            expected.append((-limit * a, 0.0))
        else:
            expected.append(ppo_value_and_slope(math.exp(log_ratio), a, 0.2, 0.28))
    assert losses.tolist() == pytest.approx([value for value, _ in expected], abs=1e-12)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([slope for _, slope in expected], abs=1e-12)
    assert limited.tolist() == [a < 0 and math.exp(log_ratio) > limit for log_ratio, a in tokens]


def test_ppo_clip_has_separate_bounds() -> None:
    log_ratios = [math.log(1.25), math.log(1.25), math.log(0.75), math.log(0.75)]
    advantages = column([1.0, -1.0, 1.0, -1.0])
    losses, stats = ppo_clip(column(log_ratios), column([0.0] * 4), advantages, 0.2, 0.28)
    assert losses.tolist() == pytest.approx([-1.25, 1.25, -0.75, 0.8])  # 1.25 lies within 1.28; 0.75 below 0.8
    assert stats["clip_low_fraction"].tolist() == [False, False, False, True]
    assert stats["clip_high_fraction"].tolist() == [False] * 4
    losses, stats = ppo_clip(column(log_ratios), column([0.0] * 4), advantages, 0.3, 0.2)
    assert losses.tolist() == pytest.approx([-1.2, 1.25, -0.75, 0.75])
    assert stats["clip_high_fraction"].tolist() == [True, False, False, False]


@settings(deadline=None)
@given(tokens=st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8), high=st.floats(0, 5))
def test_cispo_weighs_by_the_clipped_ratio_and_drops_no_token(tokens: list[tuple[float, float]], high: float) -> None:
    logprobs = column([log_ratio - 1.0 for log_ratio, _ in tokens], grad=True)
    losses, stats = cispo(logprobs, column([-1.0] * len(tokens)), column([a for _, a in tokens]), 0.5, high)
    losses.sum().backward()
    weights = [min(max(math.exp(log_ratio), 0.5), 1 + high) for log_ratio, _ in tokens]
    expected = [-w * a * (log_ratio - 1) for w, (log_ratio, a) in zip(weights, tokens, strict=True)]
    assert losses.tolist() == pytest.approx(expected, abs=1e-12)
    assert logprobs.grad is not None
    slopes = [-w * a for w, (_, a) in zip(weights, tokens, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-12)
    outside = [not 0.5 <= math.exp(log_ratio) <= 1 + high for log_ratio, _ in tokens]
    assert sum(stats["clip_fraction"].tolist()) == pytest.approx(sum(outside), abs=1)  # rounding at the very bounds


def test_on_policy_ppo_has_the_gradient_of_reinforce() -> None:
    advantages = column([0.7, -1.3, 0.0, 2.0])
    slopes = []
    for loss in (reinforce, ppo_clip, cispo):
        logprobs = column([-0.1, -2.0, -3.0, -0.5], grad=True)
        loss(logprobs, logprobs.detach().clone(), advantages, 0.2, 0.2)[0].sum().backward()
        slopes.append(logprobs.grad)
    torch.testing.assert_close(slopes[0], -advantages)
    torch.testing.assert_close(slopes[0], slopes[1])
    torch.testing.assert_close(slopes[0], slopes[2])


def test_reinforce_is_the_policy_gradient() -> None:
    """Expected gradient over all actions of a softmax policy = gradient of the expected reward, in closed form."""
    logits = column([0.3, -0.5, 1.0], grad=True)
    rewards = column([1.0, 0.0, 2.0])
    probs = logits.detach().softmax(0)
    losses, stats = reinforce(logits.log_softmax(0), logits.detach().log_softmax(0), rewards, 0.2, 0.2)
    (probs * losses).sum().backward()
    torch.testing.assert_close(logits.grad, -probs * (rewards - (probs * rewards).sum()))
    assert stats == {}


def test_infinite_bounds_leave_the_plain_ratio() -> None:
    log_ratios, advantages = column([2.0, -2.0, 1.0]), column([1.0, -1.0, -1.0])
    losses, stats = ppo_clip(log_ratios, column([0.0] * 3), advantages, math.inf, math.inf)
    torch.testing.assert_close(losses, -log_ratios.exp() * advantages)
    assert not stats["clip_fraction"].any()


@pytest.mark.parametrize("name", list(LOSSES))
def test_absurd_log_ratios_stay_finite_in_float32(name: str) -> None:
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    losses, _ = LOSSES[name](logprobs, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, -1.0]), 0.2, 0.2)
    losses.sum().backward()
    assert logprobs.grad is not None
    assert losses.isfinite().all()
    assert logprobs.grad.isfinite().all()
