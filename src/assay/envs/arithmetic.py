"""Exact arithmetic on text: integers, decimals, + - * / ^ and parentheses, with fractions all the way."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from assay.rewards import Unreadable

MAX_CHARS = 200
MAX_DIGITS = 60  # of a number or a result
MAX_POWER = 64

_ALLOWED = re.compile(r"[0-9.+\-*/() ]+")
_SPELLINGS = (("×", "*"), ("÷", "/"), ("−", "-"), ("^", "**"), ("$", ""))
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(text: str) -> Fraction:
    """The exact value of an expression. Raises Unreadable, with the reason."""
    for fancy, plain in _SPELLINGS:
        text = text.replace(fancy, plain)
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text).strip()
    if not text or len(text) > MAX_CHARS or not _ALLOWED.fullmatch(text) or "//" in text:
        raise Unreadable("only numbers, + - * / ^ and parentheses are allowed")
    text = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", text)  # Python refuses 007
    try:
        tree = ast.parse(text, mode="eval").body
        return _value(tree, text)
    except ZeroDivisionError:
        raise Unreadable("divides by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable("not an arithmetic expression") from None


def shown(value: Fraction) -> str:
    """A whole number or a decimal where that is exact, else a fraction."""
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return str(top)
    for places in range(1, 13):
        if 10**places % bottom == 0:
            digits = str(abs(top) * 10**places // bottom).rjust(places + 1, "0")
            return f"{'-' if top < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{top}/{bottom}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):  # the text itself: 0.1 is a tenth, which no float is
        return _small(Fraction(ast.get_source_segment(text, node) or ""))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if type(node.op) in _OPERATORS:
            return _small(_OPERATORS[type(node.op)](left, right))
        if isinstance(node.op, ast.Pow) and right.denominator == 1 and abs(right) <= MAX_POWER:
            return _small(left ** int(right))
    raise Unreadable("only numbers, + - * / ^ and parentheses are allowed")


def _small(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise Unreadable(f"a number has more than {MAX_DIGITS} digits")
    return value
