from __future__ import annotations

import random

import pytest
import torch

from assay.algos.credit import gae, value_loss


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 1.0), (0.7, 0.0), (1.0, 1.0)])
def test_it_is_the_discounted_sum_of_surprises(gamma: float, lam: float) -> None:
    """Against the definition, term by term: A_t = sum_l (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l})."""
    draw = random.Random(0)
    for length in (1, 2, 7, 30):
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


def test_closed_forms() -> None:
    values = [0.2, -0.4, 0.7]
    assert gae(values, [0, 0, 2], 1.0, 1.0) == pytest.approx([2 - value for value in values])  # return less value
    assert gae(values, [0, 0, 2], 0.5, 1.0) == pytest.approx([2 * 0.25 - 0.2, 2 * 0.5 + 0.4, 2 - 0.7])
    assert gae(values, [0, 0, 2], 0.5, 0.0) == pytest.approx([0.5 * -0.4 - 0.2, 0.5 * 0.7 + 0.4, 2 - 0.7])  # one step
    assert gae([0.0] * 4, [0, 0, 0, 1], 1.0, 0.5) == pytest.approx([0.125, 0.25, 0.5, 1.0])
    assert gae([1.0] * 4, [0, 0, 0, 1], 1.0, 0.3) == pytest.approx([0.0] * 4)  # a perfect critic is never surprised
    assert gae([], [], 1.0, 0.9) == []
    endless = 2.0 / (1 - 0.9)  # 2 a token for ever: a perfect critic is not surprised by a cut, if it may say so
    assert gae([endless] * 3, [2.0] * 3, 0.9, 0.5, endless) == pytest.approx([0.0] * 3)
    assert gae([endless] * 3, [2.0] * 3, 0.9, 0.5)[-1] == pytest.approx(-0.9 * endless)


def test_a_value_that_went_too_far_has_no_gradient() -> None:
    values = torch.tensor([0.5, 0.05, -0.5], requires_grad=True)
    given, returns = torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    loss = value_loss(values, given, returns, 0.1)
    # 0.5 counts as 0.1, which is worse; 0.05 is near enough; -0.5 is worse than -0.1, and still counts as it is
    assert loss.tolist() == pytest.approx([0.9**2 / 2, 0.95**2 / 2, 1.5**2 / 2])
    loss.sum().backward()
    assert values.grad is not None and values.grad.tolist() == pytest.approx([0.0, -0.95, -1.5])
    assert value_loss(values, given, returns, 0.0).tolist() == pytest.approx([0.125, 0.95**2 / 2, 1.5**2 / 2])
