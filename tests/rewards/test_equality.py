"""Numbers, expressions and reasons of inequality. Pairs of answers are in test_answer_pairs.py."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.rewards import latex
from assay.rewards.equality import compare
from assay.rewards.numeric import Unreadable, read_quantity, tidy


def equal(answer: str, gold: str, strict: bool = True) -> bool:
    return compare(answer, gold, strict)[0]


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**15), 10**15), st.integers(0, 4))
def test_all_spellings_of_a_number_have_its_value(units: int, places: int) -> None:
    value = Fraction(units, 10**places)
    digits = f"{abs(units):0{places + 1}d}"
    whole, decimals = digits[: len(digits) - places], digits[len(digits) - places :]
    sign = "-" if units < 0 else ""
    tail = f".{decimals}" if places else ""
    for text in (
        f"{sign}{int(whole):,}{tail}",
        f"{sign}${whole}{tail}",
        f"{sign}{whole}{tail} apples",
        f"${units}/{10**places}$",
    ):
        quantity = read_quantity(tidy(text))
        assert quantity is not None and quantity.value == value, text


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="0123456789.,-+$%/\\frac{}^ e\u2212½\ud800xm", max_size=25))
def test_any_text_is_a_number_or_none_or_unreadable(text: str) -> None:
    try:
        quantity = read_quantity(tidy(text))
    except Unreadable:
        return
    if quantity is not None:
        value = quantity.value
        again = read_quantity(f"{value.numerator}/{value.denominator}")
        assert again is not None and again.value == value


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


@pytest.mark.parametrize(
    ("answer", "gold", "reason"),
    [
        *((r"\sqrt{4}", "2", "not evaluated"), ("x = 2 + 3", "5", "not evaluated"), ("2**10", "1024", "not evaluated")),
        *((r"2 \lor 3", gold, "") for gold in (r"3\sqrt{13}", r"\cot x", "18")),
    ],
)
def test_rejected_form_has_a_reason(answer: str, gold: str, reason: str) -> None:
    same, why = compare(answer, gold)
    assert not same and why and reason in why


UNREADABLE = r"""
hello | five | 1/0 | \frac{1}{0} | 3 1/0 | 1e999999999 | 1e-999999999 | 9**9**9**9 | 9^{9^{9^{9}}} | 9^9^9^9
9^{9^9} | 9**(9**(9**9)) | x^{x^{x^{x}}} | 10^{10^{10}} | 2^{99999999} | 999999999! | 9!!!! | {5 | (x+1)^{9999}
(x+y+z)^{500} | (a+b+c+d+e+f)^{12} | (1+\sqrt{2})^{5000} | ((9^{999})^{999})^{999} | (9^{499})^{199}
\sqrt{9999^{9999}-1} | \frac{x^{999}-1}{x-1} | \sin^{99}(x)\cos^{99}(x)
\int_0^1 \frac{\sin(x^7)}{\cos(x)+x^9} dx | \sum_{n=1}^{9999} \frac{1}{n} | \prod_{n=1}^{9999} n^n
\binom{99999999}{44444444}
"""

# Short, but slow to compare.
EXPENSIVE = [
    "\\sin(" * 7 + "x" + ")" * 7,
    "\\sin " * 7 + "x",
    r"\begin{pmatrix} x & 1 \\ 1 & x \end{pmatrix}^{20}",
    r"(2^{500})!",
    r"\sin((9^{9})!)",
    r"\binom{9^{9}}{x}",
    r"99^{500} - \arctan x",
    "(" * 8 + "x+1" + ")" * 8,
    "|x+" * 8 + "1" + "|" * 8,
    r"x\sqrt{9^{999}+1}",
]
# Large, but within the limits.
LARGE = r"""
2^{2010}+1 | 2^{2010}+2 ; (x+1)^{20} | (x+2)^{20} ; (x+y)^{12} | x+y ; (1+\sqrt{5})^{100} | \sqrt{5}
(x^2)^{9} | x ; \{1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20\} | \{1,2\} ; \sin^{2}(x) | \cos^{2}(x)
\pi^{2}/6 | \pi/6 ; \binom{100}{50}x | x
"""


@pytest.mark.parametrize(
    "answer",
    [*UNREADABLE.strip().replace("\n", " | ").split(" | "), "9" * 1000, "(" * 500 + "1" + ")" * 500, *EXPENSIVE],
)
def test_expensive_answers_are_rejected_without_computer_algebra(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(latex, "_parse")
    if answer not in EXPENSIVE:
        with pytest.raises(Unreadable):
            equal(answer, "5")
        return
    for gold, strict in ((r"\cot x", True), ("18", False)):
        with contextlib.suppress(Unreadable):
            assert not equal(answer, gold, strict)


@pytest.mark.parametrize("pair", LARGE.strip().replace("\n", " ; ").split(" ; "))
def test_large_answers_within_the_limits_are_compared(pair: str) -> None:
    answer, gold = pair.split(" | ")
    assert not equal(answer, gold) and equal(answer, answer.replace("x", " x"))
