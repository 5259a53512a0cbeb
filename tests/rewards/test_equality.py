from __future__ import annotations

import contextlib

import pytest

from assay.rewards.equality import compare, equal
from assay.rewards.numeric import Unreadable, read_quantity, tidy

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


NOT_EVALUATED = r"""
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


@pytest.mark.parametrize(("answer", "gold"), pairs(NOT_EVALUATED))
def test_expression_equals_a_number_only_if_not_strict(answer: str, gold: str) -> None:
    same, reason = compare(answer, gold)
    assert not same and "not evaluated" in reason
    assert equal(answer, gold, strict=False)


@pytest.mark.parametrize(("answer", "gold"), pairs(DIFFERENT_EXPRESSIONS))
def test_different_expressions(answer: str, gold: str) -> None:
    assert not equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold", "same"), TEXTS)
def test_text_answers(answer: str, gold: str, same: bool) -> None:
    assert equal(answer, gold) is same


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
def test_similar_but_different_answers_are_not_equal(answer: str, gold: str) -> None:
    with contextlib.suppress(Unreadable):  # also counts as not equal
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
def test_other_wordings_are_equal(answer: str, gold: str) -> None:
    assert equal(answer, gold)


@pytest.mark.parametrize("gold", [r"3\sqrt{13}", r"\cot x", "18"])
def test_rejected_form_has_a_reason(gold: str) -> None:
    same, reason = compare(r"2 \lor 3", gold)
    assert not same and reason
