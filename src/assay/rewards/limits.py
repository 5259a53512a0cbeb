"""Sizes beyond which an answer is not read at all, so that hostile text is refused at once and always alike."""

from __future__ import annotations

import re

MAX_ANSWER_CHARS = 2_000  # of an extracted answer
MAX_DIGITS = 400  # of one number
MAX_EXPONENT = 400  # in scientific notation
MAX_SYMBOLIC_CHARS = 1_000  # of an expression handed to math-verify
MAX_DEPTH = 10  # of nested brackets in such an expression
MAX_POWER_DIGITS = 4  # of an integer exponent there
MAX_FACTORIAL_DIGITS = 3

_BRACKET = re.compile(r"\\[{}]|[{}()\[\]]")
_RAISED = r"\s*(?:\^|\*\*)[\s{(]*"
_POWER_TOWER = re.compile(rf"{_RAISED}[\w.\\]+{_RAISED}[\w.\\]+{_RAISED}")
_POWER_OF_POWER = re.compile(rf"{_RAISED}([0-9]+){_RAISED}([0-9]+)")
_LONG_POWER = re.compile(rf"(?:\^|\*\*)\s*[{{(\s]*[-+]?\s*[0-9][0-9,]{{{MAX_POWER_DIGITS},}}")
_LONG_FACTORIAL = re.compile(rf"[0-9]{{{MAX_FACTORIAL_DIGITS + 1},}}[)}}\s]*!|!\s*[)}}]*\s*!")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1},}}")


class Unreadable(Exception):
    """The answer is there but cannot, or must not, be read. Says why in one line."""


class UnreadableGold(Exception):
    """The same of the gold answer: then nothing can be said of the answer."""


def clip(text: str, limit: int = 200) -> str:
    """Enough of a long text to recognise it by."""
    return text if len(text) <= limit else text[:limit] + "..."


def check_expression(text: str) -> None:
    """Refuse what would cost a computer algebra system too much; the time limit of the pool catches the rest."""
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


def _check_powers(text: str) -> None:
    towers = [(base, power) for base, power in _POWER_OF_POWER.findall(text) if base not in ("0", "1")]
    small = all(len(base + power) <= 6 and int(base) ** int(power) < 10**MAX_POWER_DIGITS for base, power in towers)
    if not small or _POWER_TOWER.search(text) or _LONG_POWER.search(text):
        raise Unreadable("the powers are too large")
