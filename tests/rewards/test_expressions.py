from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.rewards import Unreadable
from assay.rewards.expressions import calculate, evaluate_python, format_number, run_python


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
def test_calculate_is_exact(text: str, value: str) -> None:
    assert format_number(calculate(text)) == value


@pytest.mark.parametrize("text", ["", "1/0", "2+", "a+1", "9**9**9", "1//2", "(" * 300, "__import__('os')", "1 2"])
def test_calculate_rejects_invalid_expressions(text: str) -> None:
    with pytest.raises(Unreadable):
        calculate(text)


@given(st.fractions(min_value=-1000, max_value=1000, max_denominator=500))
def test_formatted_number_equals_the_value(value: Fraction) -> None:
    assert Fraction(format_number(value)) == value


@pytest.mark.parametrize("text", ["__builtins__", "lambda: 1", "[].append(1)", "f'{1}'", "import os", "(x := 1)"])
def test_python_expressions_with_side_effects_are_rejected(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        evaluate_python(text)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("sum(x*x for x in range(4))", "14"),
        ("(i for i in [1])", "<generator object <genexpr>>"),  # without its address
        ("1/0", "ZeroDivisionError: division by zero"),
        ("'x' * 1000", "'" + "x" * 196 + "..."),
    ],
)
def test_python_results_are_short_and_reproducible(text: str, result: str) -> None:
    assert run_python(text) == result
