from __future__ import annotations

import pytest

from assay.rewards.structure import read_real_set, same_real_set

EQUAL = [
    ("[0,\\infty) \\setminus \\{1\\}", "0 \\le x < 1 or x > 1"),
    ("-x > -1", "(-\\infty, 1)"),
    ("[0,1] \\cup [1,2]", "0 \\le t and t \\le 2"),
    ("\\mathbb{R} \\setminus (0, 1]", "x \\le 0, x > 1"),  # no number fulfils both, so the comma means "or"
    ("x > 0, x \\neq 1", "(0,1) \\cup (1,\\infty)"),
    ("[\\sqrt{2}, \\infty) \\cap (-\\infty, 2)", "\\frac{2}{\\sqrt{2}} \\le x < 2"),
    ("\\{1\\} \\cup (1,2)", "[1,2)"),
    ("]1, 2[", "(1, 2]  \\setminus \\{2\\}"),
]
DIFFERENT = [
    ("(0,1)", "(0,1]"),
    ("x > 1.4142135623730950488016887", "(\\sqrt{2}, \\infty)"),
    ("x < 1", "y < 1"),
    ("x < 0 or x > 1", "x < 0 and x > 1"),
    ("\\mathbb{R}", "\\mathbb{R} \\setminus \\{0\\}"),
    ("x \\ge 0 \\cup \\{-1\\}", "x \\ge 0"),
]


@pytest.mark.parametrize("strict", [True, False])
def test_sets_are_compared_by_their_elements(strict: bool) -> None:
    assert [pair for pair in EQUAL if same_real_set(*pair, strict) is not True] == []
    assert [pair for pair in DIFFERENT if same_real_set(*pair, strict) is not False] == []


@pytest.mark.parametrize("text", ["(2, 1]", "[0, \\infty]", "2x < 1", "x^2 < 1", "x < y", "x > 0 or y > 0"])
def test_texts_that_are_no_set_of_real_numbers(text: str) -> None:
    assert read_real_set(text, strict=False) is None


def test_pair_is_an_interval_only_beside_an_explicit_set() -> None:
    assert same_real_set("(1, 2)", "(1, 2)", strict=True) is None
    assert same_real_set("1 < x < 2", "(1, 2)", strict=True) is True


def test_strict_rejects_an_end_that_is_not_evaluated() -> None:
    assert same_real_set("x > 1 + 1", "(2, \\infty)", strict=False) is True
    assert same_real_set("x > 1 + 1", "(2, \\infty)", strict=True) is None


def test_answer_to_a_solved_inequality_must_be_solved() -> None:
    assert same_real_set("2x > 4", "x > 2", strict=False) is False
