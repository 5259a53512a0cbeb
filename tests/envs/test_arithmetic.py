from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.envs.arithmetic import calculate, shown
from assay.rewards import Unreadable


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48/2", "24"),
        ("0.1+0.2", "0.3"),
        ("1/3", "1/3"),
        ("1/3*3", "1"),
        ("-(2+3)*4", "-20"),
        ("1,000 * 2", "2000"),
        ("2^10", "1024"),
        ("7 ÷ 8", "0.875"),
        ("1/8-1", "-0.875"),
        ("007 + 1", "8"),
        ("$3.50*2", "7"),
    ],
)
def test_values_are_exact(text: str, value: str) -> None:
    assert shown(calculate(text)) == value


@pytest.mark.parametrize("text", ["", "1/0", "2+", "a+1", "9**9**9", "1//2", "(" * 300, "__import__('os')", "1 2"])
def test_what_cannot_be_computed_is_said(text: str) -> None:
    with pytest.raises(Unreadable):
        calculate(text)


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=500))
def test_what_is_shown_is_the_value(value: Fraction) -> None:
    assert Fraction(shown(value)) == value
