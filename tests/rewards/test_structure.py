"""Answers with parts, names of values, sets of real numbers; arithmetic expressions."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.rewards.expressions import calculate, evaluate_python, format_number, run_python
from assay.rewards.numeric import Unreadable
from assay.rewards.structure import (
    MAX_PARTS,
    Structure,
    is_function_value,
    is_name,
    list_items,
    names_of,
    read_real_set,
    read_structure,
    same_real_set,
    same_structure,
)


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("1, 2 and 3", "list", ("1", "2", "3")),
        ("(1,2)or(3,4)", "list", ("(1,2)", "(3,4)")),
        ("1 \\pm x", "list", ("1 + x", "1 - x")),
        ("\\{1; 2\\}", "set", ("1", "2")),
        ("[0, f(1, 2))", "[)", ("0", "f(1, 2)")),
        ("(0,1) \\cup \\{2\\}", "union", ("(0,1)", "\\{2\\}")),
        ("[\\begin{array}{cc} 1 & 2 \\\\ 3 & 4 \\end{array}]", "matrix 2x2", ("1", "2", "3", "4")),
        ("\\begin{cases} x=1 \\\\ y=2 \\end{cases}", "list", ("x=1", "y=2")),
        *(
            (single, "", ())
            for single in ("5", "(5)", "(a+b)(c+d)", "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}")
        ),
    ],
)
def test_kinds_and_parts(text: str, kind: str, parts: tuple[str, ...]) -> None:
    assert read_structure(text) == (Structure(kind, parts) if parts else None)


def test_semicolons_separate_groups_of_assignments() -> None:
    assert list_items("p=5,q=2; p=7,q=2") == ["p=5,q=2", "p=7,q=2"]


def test_order_matters_for_tuples_but_not_for_lists() -> None:
    one, other = (Structure("()", tuple(text)) for text in ("ab", "ba"))
    assert not same_structure(one, other, str.__eq__)
    assert same_structure(Structure("list", ("a", "b")), Structure("list", ("b", "a")), str.__eq__)
    assert not same_structure(Structure("set", ("a", "a")), Structure("list", ("a", "b")), str.__eq__)


def test_too_many_parts_are_not_compared() -> None:
    many = Structure("list", ("1",) * (MAX_PARTS + 1))
    with pytest.raises(Unreadable):
        same_structure(many, many, str.__eq__)


NAMES = [
    *("x", "a_{10}", "\\alpha", "y'", "\\bar{x}", "AB", "|AB|", "[ABC]", "|S|", "f(1)", "f^{-1}(3)", "P(A)"),
    *("(x, y)", "\\cos \\theta", "\\lim_{x \\to 0} x", "\\deg p", "Total cost", "Number of ways", "\\angle ABC"),
]
NOT_NAMES = [
    *("2x", "x + 1", "x^2", "|x|", "-x", "xy", "abc", "\\sin x", "\\sqrt{x}", "x(x + 1)", "3(x)", "(x + y, y)", "5"),
    *("at most x", "x squared", "Half of the cost", "Square of the side", "Suppose x", "\\pi", ""),
]


@pytest.mark.parametrize(("sides", "named"), [(NAMES, True), (NOT_NAMES, False)])
def test_sides_that_only_name_a_value(sides: list[str], named: bool) -> None:
    assert [side for side in sides if is_name(side) is not named] == []


def test_words_are_names_only_where_labels_are_allowed() -> None:
    assert is_name("Total cost") and not is_name("Total cost", labels=False)
    assert is_function_value("f(x + 1)") and not is_function_value("k(k + 1)") and not is_function_value("(a)(b)")
    assert names_of("( x_{1} , y )") == ("x_1", "y") and names_of("a _ {n}") == ("a_n",)


@pytest.mark.parametrize("text", ["(2, 1]", "[0, \\infty]", "2x < 1", "x^2 < 1", "x < y", "x > 0 or y > 0"])
def test_texts_that_are_no_set_of_real_numbers(text: str) -> None:
    assert read_real_set(text, strict=False) is None


def test_sets_that_are_compared() -> None:
    assert same_real_set("(1, 2)", "(1, 2)", strict=True) is None  # a pair, but for an explicit set on the other side
    assert same_real_set("1 < x < 2", "(1, 2)", strict=True) is True
    assert same_real_set("2x > 4", "x > 2", strict=False) is False  # not solved
    assert same_real_set("x > 1 + 1", "(2, \\infty)", strict=True) is None  # not evaluated


# Arithmetic expressions


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("48/2", "24"), ("0.1+0.2", "0.3"), ("1/3", "1/3"), ("1/3*3", "1"), ("-(2+3)*4", "-20"), ("2^10", "1024")),
        *(("1,000 * 2", "2000"), ("7 ÷ 8", "0.875"), ("1/8-1", "-0.875"), ("007 + 1", "8"), ("$3.50*2", "7")),
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
