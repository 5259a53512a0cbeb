from __future__ import annotations

import pytest

from assay.rewards.structure import is_function_value, is_name, names_of

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


def test_product_with_brackets_is_no_function_value() -> None:
    assert is_function_value("f(x + 1)") and not is_function_value("k(k + 1)") and not is_function_value("(a)(b)")


def test_names_are_compared_without_spaces_and_braces() -> None:
    assert names_of("( x_{1} , y )") == ("x_1", "y") and names_of("a _ {n}") == ("a_n",)
