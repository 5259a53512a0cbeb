"""Size limits of answers, so that hostile text is rejected quickly and always with the same verdict."""

from __future__ import annotations

import math
import re

MAX_ANSWER_CHARS = 2_000  # of an extracted answer
MAX_DIGITS = 400  # of one number
MAX_EXPONENT = 400  # in scientific notation
MAX_SYMBOLIC_CHARS = 1_000  # of an expression handed to math-verify
MAX_DEPTH = 10  # of nested brackets in such an expression
MAX_POWER_DIGITS = 4  # of an integer exponent there
MAX_FACTORIAL_DIGITS = 3
MAX_BINOMIAL_DIGITS = 4
MAX_RESULT_DIGITS = 1_000  # of a number raised to a power
MAX_MIXED_DIGITS = 100  # the same beside roots, functions and symbols, where large numbers are factorized
MAX_TERMS = 200  # of an expanded power of a bracket
MAX_SYMBOL_POWER = 300
MAX_FUNCTION_POWER = 20
MAX_FUNCTIONS = 6  # such as sine and logarithm in one expression
MAX_ROUND_DEPTH = 5  # of nested round brackets and absolute values: the parser backtracks on each
MAX_PARTS = 24  # of a list, a set or a matrix

_BRACKET = re.compile(r"\\[{}]|[{}()\[\]]")
_RAISED = r"\s*(?:\^|\*\*)[\s{(]*"
_POWER_TOWER = re.compile(rf"{_RAISED}[\w.\\]+{_RAISED}[\w.\\]+{_RAISED}")
_POWER_OF_POWER = re.compile(rf"{_RAISED}([0-9]+){_RAISED}([0-9]+)")
_LONG_POWER = re.compile(rf"(?:\^|\*\*)\s*[{{(\s]*[-+]?\s*[0-9][0-9,]{{{MAX_POWER_DIGITS},}}")
_LONG_FACTORIAL = re.compile(rf"[0-9]{{{MAX_FACTORIAL_DIGITS + 1},}}[)}}\s]*!|!\s*[)}}]*\s*!")
_UNFINISHED = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![A-Za-z])")
_LONG_BINOMIAL = re.compile(rf"binom[^0-9]{{0,9}}[0-9]{{{MAX_BINOMIAL_DIGITS + 1},}}")
_BINOMIAL_OF_POWER = re.compile(r"binom\s*\{[^{}]*[\^!]|binom\s*\{[^{}]*\}\s*\{[^{}]*[\^!]")
_BRACKET_FACTORIAL = re.compile(r"[)}\]]\s*!")
_NOT_SMALL = re.compile(rf"\^|!|binom|[0-9]{{{MAX_FACTORIAL_DIGITS},}}")
_POWER = re.compile(rf"([0-9][0-9.]*|\\[A-Za-z]+|[A-Za-z]|[)\]}}]){_RAISED}([0-9]+)")
_SYMBOLIC = re.compile(r"\\(?!cdot|times|div|frac)[A-Za-z]|(?<![\\A-Za-z])[A-Za-z]")
_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc|log|ln|lg|exp)(?=h?(?![A-Za-z]))")
_SIGN = re.compile(r"[-+]")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1},}}")


class Unreadable(Exception):
    """There is an answer, but it cannot be parsed or exceeds a limit. The message is one line."""


class UnreadableGold(Exception):
    """The gold answer cannot be read, so the answer cannot be judged."""


class WrongForm(Exception):
    """The answer can be read, but its form differs from that of the gold answer, so it is wrong."""


def clip(text: str, limit: int = 200) -> str:
    """Shorten a text."""
    return text if len(text) <= limit else text[:limit] + "..."


def check_expression(text: str) -> None:
    """Reject expressions that are too expensive for a computer algebra system; the time limit handles the rest."""
    if len(text) > MAX_SYMBOLIC_CHARS:
        raise Unreadable(f"the expression is longer than {MAX_SYMBOLIC_CHARS} characters")
    depth = 0
    for bracket in _BRACKET.findall(text):
        if bracket.startswith("\\"):
            continue
        depth += 1 if bracket in "{([" else -1
        if depth > MAX_DEPTH:
            raise Unreadable(f"brackets are nested more than {MAX_DEPTH} deep")
    if text.count("{") != text.count("}"):
        raise Unreadable("braces do not match")
    _check_powers(text)
    if _LONG_FACTORIAL.search(text):
        raise Unreadable("the factorial is too large")
    if _LONG_NUMBER.search(text):
        raise Unreadable(f"a number has more than {MAX_DIGITS} digits")


def check_work(text: str) -> None:
    """Reject short answers on which a computer algebra system would work for seconds, so that verdicts do not depend on
    time limits."""
    if _UNFINISHED.search(text):
        raise Unreadable("an integral, sum, product or limit is not evaluated")
    if _LONG_BINOMIAL.search(text) or _BINOMIAL_OF_POWER.search(text):
        raise Unreadable("the binomial coefficient is too large")
    for factorial in _BRACKET_FACTORIAL.finditer(text):
        if _NOT_SMALL.search(_inside(text, factorial.start())):
            raise Unreadable("the factorial is too large")
    if len(_FUNCTION.findall(text)) > MAX_FUNCTIONS:
        raise Unreadable(f"there are more than {MAX_FUNCTIONS} functions such as \\sin in the answer")
    if _round_depth(text) > MAX_ROUND_DEPTH or text.count("|") > 2 * MAX_ROUND_DEPTH:
        raise Unreadable(f"brackets are nested more than {MAX_ROUND_DEPTH} deep")
    for power in _POWER.finditer(text):
        if _work(text, power) > 1:
            raise Unreadable("the powers are too large")


def _round_depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _work(text: str, power: re.Match[str]) -> float:
    """Return the cost of a power as a multiple of its limit."""
    base, exponent = power[1], int(power[2])
    if base[0].isdigit():
        limit = MAX_MIXED_DIGITS if _SYMBOLIC.search(text) else MAX_RESULT_DIGITS
        return exponent * math.log10(max(int(base.replace(".", "")), 1)) / limit
    if base[0].isalpha():
        return exponent / MAX_SYMBOL_POWER
    if base[0] == "\\":
        return exponent / MAX_FUNCTION_POWER
    inside = _inside(text, power.start())
    terms = len(_SIGN.findall(inside))
    if not terms:
        return math.prod((int(inner) for _, inner in _POWER.findall(inside)), start=exponent) / MAX_SYMBOL_POWER
    return math.comb(exponent + terms, terms) / MAX_TERMS


def _inside(text: str, end: int) -> str:
    """Return the content of the bracket that is closed at `end`; kinds of brackets are not distinguished."""
    depth = 0
    for start in range(end, -1, -1):
        depth += (text[start] in ")]}") - (text[start] in "([{")
        if depth == 0:
            return text[start:end]
    return text[:end]


def _check_powers(text: str) -> None:
    towers = [(base, power) for base, power in _POWER_OF_POWER.findall(text) if base not in ("0", "1")]
    small = all(len(base + power) <= 6 and int(base) ** int(power) < 10**MAX_POWER_DIGITS for base, power in towers)
    if not small or _POWER_TOWER.search(text) or _LONG_POWER.search(text):
        raise Unreadable("the powers are too large")
