from __future__ import annotations

import pytest

from assay.rewards.numeric import Unreadable
from assay.rewards.structure import MAX_PARTS, Structure, list_items, read_structure, same_structure


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
    ],
)
def test_kinds_and_parts(text: str, kind: str, parts: tuple[str, ...]) -> None:
    assert read_structure(text) == Structure(kind, parts)


@pytest.mark.parametrize("text", ["5", "(5)", "(a+b)(c+d)", "\\begin{vmatrix} 1 & 2 \\\\ 3 & 4 \\end{vmatrix}"])
def test_single_expressions_have_no_parts(text: str) -> None:
    assert read_structure(text) is None


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
