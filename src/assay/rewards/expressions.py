"""Evaluate expressions that a model wrote: exact arithmetic, and a side-effect-free subset of Python."""

from __future__ import annotations

import ast
import builtins
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from assay.rewards.numeric import Unreadable
from assay.types import clip

MAX_CHARS = 200  # of an arithmetic expression
MAX_DIGITS = 60  # of a number or a result
MAX_POWER = 64
MAX_PYTHON_CHARS, MAX_RESULT_CHARS = 1_000, 200

_ALLOWED = re.compile(r"[0-9.+\-*/() ]+")
_SPELLINGS = (("×", "*"), ("÷", "/"), ("−", "-"), ("^", "**"), ("$", ""))
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_BUILTINS = (
    "abs all any bool dict divmod enumerate float int len list max min pow range reversed round set sorted str sum "
    "tuple zip"
)
_MATH = "ceil comb cos exp factorial floor gcd isqrt lcm log log10 log2 perm pi prod sin sqrt tan"
_NAMES: dict[str, Any] = {name: getattr(builtins, name) for name in _BUILTINS.split()}
_NAMES |= {name: getattr(math, name) for name in _MATH.split()}
_NODES = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Store, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare),
    *(ast.IfExp, ast.Call, ast.keyword, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Subscript, ast.Slice, ast.Starred),
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # in the repr of generators and the like: differs between processes


def calculate(text: str) -> Fraction:
    """Return the exact value of an expression of numbers, + - * / ^ and parentheses. Raises Unreadable."""
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text).strip()
    if not text or len(text) > MAX_CHARS or not _ALLOWED.fullmatch(text) or "//" in text:
        raise Unreadable("only numbers, + - * / ^ and parentheses are allowed")
    text = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", text)  # Python rejects 007
    try:
        return compute(parse_arithmetic(text), text, max_power=MAX_POWER, max_digits=MAX_DIGITS)
    except ZeroDivisionError:
        raise Unreadable("divides by zero") from None
    except (ValueError, RecursionError, MemoryError):
        raise Unreadable("not an arithmetic expression") from None


def parse_arithmetic(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable("not an arithmetic expression") from None


def compute(node: ast.expr, text: str, max_power: int = -1, max_digits: int | None = None) -> Fraction:
    """Return the exact value of a parsed expression; `text` is its source. Powers are refused by default.

    Raises Unreadable or ZeroDivisionError.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # The source of a decimal is exact: 0.1 is a tenth, which no float is.
        source = node.value if type(node.value) is int else ast.get_source_segment(text, node) or ""
        return _limited(Fraction(source), max_digits)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = compute(node.operand, text, max_power, max_digits)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = (compute(side, text, max_power, max_digits) for side in (node.left, node.right))
        if type(node.op) in _OPERATORS:
            return _limited(_OPERATORS[type(node.op)](left, right), max_digits)
        if isinstance(node.op, ast.Pow) and right.denominator == 1 and abs(right) <= max_power:
            return _limited(left ** int(right), max_digits)
    raise Unreadable("only numbers, + - * / and parentheses are allowed")


def _limited(value: Fraction, max_digits: int | None) -> Fraction:
    if max_digits is not None and max(abs(value.numerator), value.denominator) >= 10**max_digits:
        raise Unreadable(f"a number has more than {max_digits} digits")
    return value


def format_number(value: Fraction) -> str:
    """Return an integer or a decimal where that is exact, else a fraction."""
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return str(top)
    for places in range(1, 13):
        if 10**places % bottom == 0:
            digits = str(abs(top) * 10**places // bottom).rjust(places + 1, "0")
            return f"{'-' if top < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{top}/{bottom}"


def run_python(text: str) -> str:
    """Return the repr of a Python expression's value, or its error; for a sandboxed process with limits.

    Without attributes, imports and other names, an expression can only use up time and memory.
    """
    try:
        result = _ADDRESS.sub(">", repr(evaluate_python(text)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:MAX_RESULT_CHARS]
    return clip(result, MAX_RESULT_CHARS)


def evaluate_python(text: str) -> Any:
    if len(text) > MAX_PYTHON_CHARS:
        raise ValueError(f"longer than {MAX_PYTHON_CHARS} characters")
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ValueError(f"{type(node).__name__} is not allowed")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id.startswith("_"):
            raise ValueError(f"{node.id} is not allowed")
    return eval(compile(tree, "expression", "eval"), {"__builtins__": {}, **_NAMES})
