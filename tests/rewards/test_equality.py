from __future__ import annotations

import contextlib
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.rewards import latex
from assay.rewards.equality import compare, equal
from assay.rewards.limits import Unreadable
from assay.rewards.numeric import read_quantity, tidy

SAME_NUMBERS = r"""
72 | 72
72. | 72
72.0 | 72
072 | 72
-0 | 0
1,200 | 1200
1200 | 1,200
1{,}200 | 1200
1,\!200 | 1200
11,\! 111,\! 111 | 11111111
1\,200 | 1200
1 200 | 1200
109,200,000 | 109200000
$18 | 18
\$18 | 18
$18$ | 18
$$18$$ | 18
\(18\) | 18
**18** | 18
\boxed{18} | 18
\text{18} | 18
\$1,234.50 | 1234.5
€20 | 20
US$20 | 20
-$5 | -5
$-5 | -5
−5 | -5
–5 | -5
+5 | 5
- 5 | -5
５ | 5
18 dollars | 18
18 dollars per day | 18
\$18 \text{ dollars} | $18
18\text{ cm} | 18
18 \, \mathrm{cm}^2 | 18
18 square feet | 18
18 eggs | 18
5cm | 5 centimeters
10 km/h | 10
10\text{ miles/hour} | 10
5^\circ | 5
5^{\circ} | 5
5° | 5
90 degrees | 90^\circ
7 p.m. | 7
50% | 50
50\% | 50
50 percent | 50%
50% | 0.5
50 | 50%
1/2 | 0.5
1 / 2 | 0.5
\frac{1}{2} | 0.5
\dfrac12 | 1/2
\tfrac{1}{2} | 1/2
-\frac{1}{2} | -0.5
\frac{-1}{2} | -0.5
1 1/2 | 1.5
1\frac{1}{2} | 3/2
-1\frac{1}{2} | -3/2
3½ | 3.5
3/4 cups | .75
\frac{3}{4} \text{ cup} | 0.75
.5 | 0.5
1e3 | 1000
1.5 \times 10^{3} | 1500
3*10^4 | 30000
5 million | 5000000
$5 million | 5,000,000
3 dozen | 36
The answer is 18 | 18
Final answer: 18 | 18
"""

DIFFERENT_NUMBERS = r"""
5 | -5
12 | 1,2
5 m | 5 cm
20 minutes | 20 hours
0.5% | 50%
50 | 0.5
0.33 | 1/3
0.1 | 0.10000000000000000000001
5 million | 5
3 dozen | 3
1 1/2 | 11/2
5 cents | $5
1 2 | 12
"""

SAME_EXPRESSIONS = r"""
x=5 | 5
9*2=18 | 18
(x^2)^3 | x^6
e^{x^2} | e^{x \cdot x}
2^{1009} | 2 \cdot 2^{1008}
\sqrt2 | \sqrt{2}
2\sqrt{3} | \sqrt{12}
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
(1,2) | (1, 2)
\{1,2\} | \{2,1\}
x+1 | 1+x
(x+1)^2 | x^2+2x+1
6-5i | 6 - 5i
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\left( 3, \frac{\pi}{2} \right) | (3, \pi/2)
x \in [-2,7] | [-2,7]
"""

NOT_WORKED_OUT = r"""
(16-3-4)*2 | 18
84/2 | 42
7.5/3 | 2.5
2^{10} | 1024
2**10 | 1024
2^{3^{2}} | 512
10! | 3628800
\sqrt{4} | 2
sqrt(4) | 2
\log_2 8 | 3
x = 2 + 3 | 5
"""

DIFFERENT_EXPRESSIONS = r"""
12,00 | 1200
5x | 5
5 x | 5
2 pi | 2
2\pi | 2
5 or 6 | 5
3 and 4 | 3
5, 6 | 5
5, 6 | 6
\sqrt{2} | 1.41
(1,2) | (2, 1)
x^2 | x^3
5:30 | 5
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\3\end{pmatrix}
"""

TEXTS = [
    ("Evelyn", r"\text{Evelyn}", True),
    ("evelyn", "Evelyn", True),
    ("listen", "silent", False),
    (r"\text{(C)}", "C", True),
    ("B", "C", False),
    ("5:30", "5:30", True),
]

UNREADABLE = r"""
hello
five
1/0
\frac{1}{0}
3 1/0
1e999999999
1e-999999999
9**9**9**9
9^{9^{9^{9}}}
9^9^9^9
9^{9^9}
9**(9**(9**9))
x^{x^{x^{x}}}
10^{10^{10}}
2^{99999999}
999999999!
9!!!!
{5
(x+1)^{9999}
(x+y+z)^{500}
(a+b+c+d+e+f)^{12}
(1+\sqrt{2})^{5000}
((9^{999})^{999})^{999}
(9^{499})^{199}
\sqrt{9999^{9999}-1}
\frac{x^{999}-1}{x-1}
\sin^{99}(x)\cos^{99}(x)
\int_0^1 \frac{\sin(x^7)}{\cos(x)+x^9} dx
\sum_{n=1}^{9999} \frac{1}{n}
\prod_{n=1}^{9999} n^n
\binom{99999999}{44444444}
"""

# Large, but no trouble: the limits leave them to the comparison.
LARGE = r"""
2^{2010}+1 | 2^{2010}+2
(x+1)^{20} | (x+2)^{20}
(x+y)^{12} | x+y
(1+\sqrt{5})^{100} | \sqrt{5}
(x^2)^{9} | x
\{1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20\} | \{1,2\}
\sin^{2}(x) | \cos^{2}(x)
\pi^{2}/6 | \pi/6
\binom{100}{50}x | x
"""


def pairs(table: str) -> list[tuple[str, str]]:
    return [(answer, gold) for answer, gold in (line.split(" | ") for line in table.strip().splitlines())]


@pytest.mark.parametrize(("answer", "gold"), pairs(SAME_NUMBERS))
def test_same_numbers(answer: str, gold: str) -> None:
    assert read_quantity(tidy(answer)) is not None, "the fast path must read it"
    assert equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), pairs(DIFFERENT_NUMBERS))
def test_different_numbers(answer: str, gold: str) -> None:
    assert not equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), pairs(SAME_EXPRESSIONS))
def test_same_expressions(answer: str, gold: str) -> None:
    assert equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), pairs(NOT_WORKED_OUT))
def test_strict_wants_the_number_and_lenient_takes_an_expression(answer: str, gold: str) -> None:
    same, reason = compare(answer, gold)
    assert not same and "not evaluated" in reason
    assert equal(answer, gold, strict=False)


@pytest.mark.parametrize(("answer", "gold"), pairs(DIFFERENT_EXPRESSIONS))
def test_different_expressions(answer: str, gold: str) -> None:
    assert not equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold", "same"), TEXTS)
def test_text_answers(answer: str, gold: str, same: bool) -> None:
    assert equal(answer, gold) is same


@pytest.mark.parametrize("answer", [*UNREADABLE.strip().splitlines(), "9" * 1000, "(" * 500 + "1" + ")" * 500])
def test_hostile_and_senseless_answers_are_refused_at_once(answer: str) -> None:
    started = time.perf_counter()
    with pytest.raises(Unreadable):
        equal(answer, "5")
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(("answer", "gold"), pairs(LARGE))
def test_large_answers_within_the_limits_are_compared(answer: str, gold: str) -> None:
    assert not equal(answer, gold) and equal(answer, answer.replace("x", " x"))


def test_ten_megabytes_are_refused_at_once() -> None:
    started = time.perf_counter()
    with pytest.raises(Unreadable, match="longer than"):
        equal("9" * 10_000_000, "5")
    assert time.perf_counter() - started < 1


@settings(max_examples=100, deadline=None)
@given(st.integers(-(10**15), 10**15), st.integers(0, 4))
def test_every_spelling_of_a_number_is_the_number(units: int, places: int) -> None:
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
def test_reading_any_text_never_fails_otherwise(text: str) -> None:
    try:
        quantity = read_quantity(tidy(text))
    except Unreadable:
        return
    assert quantity is None or isinstance(quantity.value, Fraction)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("5 hundredths", "5"),
        ("7 eighths", "7"),
        ("5 tens", "5"),
        ("42 factorial", "42"),
        ("42 less than x", "42"),
        ("42 cups or forty-three", "42"),
        ("5 below zero", "5"),
        ("5 radians", "5 degrees"),
        ("42 degrees Celsius", "42 degrees Fahrenheit"),
        ("101_3", "101_2"),
        ("101_2", "101"),
        ("12, 345", "12345"),
        ("43 = 42", "42"),
        ("1 = 2 = 42", "42"),
    ],
)
def test_what_only_looks_like_the_gold_answer(answer: str, gold: str) -> None:
    with contextlib.suppress(Unreadable):  # as good as wrong
        assert not equal(answer, gold)


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("No Solution", "no solution"),
        ("not possible", "\\text{Not possible}"),
        ("101_2", "101_{2}"),
        ("101", "101_2"),
        ("42 degrees Celsius", "42 degrees"),
        ("x = 42", "42"),
        ("6 \\cdot 7 = 42", "42"),
        ("5 cups of flour", "5"),
        ("5 more apples", "5"),
        ("60 miles per hour", "60 miles"),
    ],
)
def test_what_is_the_gold_answer_in_other_words(answer: str, gold: str) -> None:
    assert equal(answer, gold)


SLOW_TO_COMPARE = [
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


@pytest.mark.parametrize("answer", SLOW_TO_COMPARE)
def test_short_expressions_that_cost_seconds_never_reach_the_computer_algebra(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_called(*arguments: object) -> None:
        raise AssertionError("math-verify was called")

    monkeypatch.setattr(latex, "_parse", not_called)
    with contextlib.suppress(Unreadable):
        assert not equal(answer, r"\cot x")
    with contextlib.suppress(Unreadable):
        assert not equal(answer, "18", strict=False)


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
def test_different_values_at_a_point_spare_simplifying_and_solving(
    answer: str, gold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_called(*arguments: object, **options: object) -> None:
        raise AssertionError("math-verify tried to simplify or to solve")

    assert equal("x+1", "1+x")  # loads the library
    monkeypatch.setattr("math_verify.verify", not_called)
    assert not equal(answer, gold)


def test_words_beside_a_numeric_gold_answer_never_reach_the_computer_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latex, "_library", None)
    many_words = "so after all of this long and winding thought I believe that the answer may be 17 " * 10
    for strict in (True, False):
        assert compare(many_words, "18", strict)[0] is False


@pytest.mark.parametrize("gold", [r"3\sqrt{13}", r"\cot x", "18"])
def test_a_refused_answer_says_why(gold: str) -> None:
    same, reason = compare(r"2 \lor 3", gold)
    assert not same and reason
