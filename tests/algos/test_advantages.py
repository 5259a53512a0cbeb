"""Advantages against plain numpy, group by group."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.algos.advantages import ADVANTAGES
from assay.types import UserError

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
        else:
            out.append(list(group))
    return out


def assert_close(actual: list[list[float]], expected: list[list[float]], tolerance: float) -> None:
    assert [len(a) for a in actual] == [len(e) for e in expected]
    np.testing.assert_allclose(np.concatenate(actual), np.concatenate(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", list(ADVANTAGES))
@settings(deadline=None)
@given(groups=groups_of_rewards)
def test_equal_to_the_formula(name: str, groups: list[list[float]]) -> None:
    # near-equal rewards divide rounding errors by 1e-4, hence the looser bound
    assert_close(give(name, groups), reference(name, groups), 1e-9)


def test_values_by_hand() -> None:
    assert give("group_mean", [[1, 0, 0, 1]]) == [[0.5, -0.5, -0.5, 0.5]]
    assert give("leave_one_out", [[1, 0, 0, 1]]) == [pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])]
    assert give("batch_mean", [[1, 0], [0]]) == [pytest.approx([2 / 3, -1 / 3]), pytest.approx([-1 / 3])]
    # unbiased std of (0, 2) is sqrt(2)
    assert give("group_norm", [[0, 2]]) == [pytest.approx([-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)])]


@pytest.mark.parametrize("name", ["group_mean", "group_norm", "leave_one_out"])
def test_equal_rewards_give_no_advantage(name: str) -> None:
    np.testing.assert_allclose(give(name, [[0.1] * 7])[0], 0.0, atol=1e-11)


@pytest.mark.parametrize("name", ["group_mean", "group_norm", "leave_one_out"])
def test_single_samples_have_no_group_baseline(name: str) -> None:
    with pytest.raises(UserError, match=r'raise samples .* advantage="batch_mean"'):
        give(name, [[1.0, 0.0], [1.0]])


def test_single_samples_suit_a_batch_baseline() -> None:
    assert give("batch_mean", [[1.0], [0.0]]) == [[0.5], [-0.5]]
    with pytest.raises(UserError, match="two rollouts"):
        give("batch_mean", [[1.0]])


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_no_groups(name: str) -> None:
    assert give(name, []) == []


def test_none_does_not_share_memory() -> None:
    rewards = [torch.ones(2, dtype=torch.float64)]
    ADVANTAGES["none"](rewards)[0].zero_()
    assert rewards[0].tolist() == [1.0, 1.0]
