from __future__ import annotations

import math_verify
import pytest

from assay.rewards import latex
from assay.rewards.equality import compare, equal


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\sin(\cos(\tan(x)))", r"\cot x"),
        (r"\frac{(x+y)^{9}(x-y)^{9}}{(x+z)^{9}(y+z)^{9}}", "x+y+z"),
        (r"(2+3i)^{99}(4+5i)^{99}", "6-5i"),
        (r"\sqrt{x}+\sqrt{y}+\sqrt{x+y}=1", "y=2x+3"),
        (r"\sin(x)\cos(y)=\tan(xy)", "y=2x+3"),
    ],
)
def test_expressions_that_differ_at_a_point_are_not_simplified(
    answer: str, gold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_called(*arguments: object, **options: object) -> None:
        raise AssertionError("math-verify tried to simplify or to solve")

    assert equal("x+1", "1+x")  # loads the library
    monkeypatch.setattr(math_verify, "verify", not_called)
    assert not equal(answer, gold)


def test_words_are_compared_with_a_number_without_computer_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latex, "_library", None)
    many_words = "so after all of this long and winding thought I believe that the answer may be 17 " * 10
    for strict in (True, False):
        assert compare(many_words, "18", strict)[0] is False
