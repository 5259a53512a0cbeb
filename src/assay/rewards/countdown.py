"""Countdown: reach the target with the given numbers, each used exactly once. Parsed and computed, never `eval`ed."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from assay.rewards.extract import check_extractor, extract
from assay.rewards.judge import graded
from assay.rewards.limits import Unreadable, clip
from assay.rewards.numeric import read_quantity, tidy
from assay.types import Status, Verdict

MAX_CHARS = 400
MAX_DEPTH = 40
MAX_INT_DIGITS = 12

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("∗", "*"))
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


class _Wrong(Exception):
    """A readable expression that does not solve the problem. Says why."""


@dataclass(frozen=True)
class CountdownJudge:
    """1.0 if the expression uses each of `nums` exactly once and equals `target`, else 0.0.

    Integers, + - * / (also × ÷ \\times \\div \\frac) and parentheses. A sign in front of an operand is allowed: for a
    positive target it adds nothing that could not be written without. "expression = number" is allowed if the number
    is the target. Arithmetic is exact.
    """

    extract: str = "answer-tag"
    strict: bool = True

    def __post_init__(self) -> None:
        check_extractor(self.extract)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        try:
            numbers = Counter(_integer(number) for number in fields["nums"])
            target = Fraction(_integer(fields.get("target", answer)))
        except (KeyError, TypeError, ValueError) as error:
            detail = f"a Countdown problem needs 'nums' (a list of integers) and 'target' (an integer): {error!r}"
            return Verdict(0.0, Status.ERROR, detail=detail)
        found = extract(completion, self.extract, self.strict, numbers=False)
        form = float(found.found and found.form == self.extract)
        if not found.found:
            return graded(found.status, found.text or None, form, found.detail)
        try:
            check_solution(found.text, numbers, target)
        except Unreadable as error:
            return graded(Status.UNPARSABLE, clip(found.text), form, str(error))
        except _Wrong as error:
            return graded(Status.WRONG, found.text, form, str(error))
        return graded(Status.OK, found.text, form)


def check_solution(text: str, numbers: Counter[int], target: Fraction) -> None:
    """Raise unless the expression solves the problem: Unreadable, or _Wrong with the reason."""
    left, equals, right = _spell(text).partition("=")
    tree = _parse(left)
    value = _compute(tree)
    leaves = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    used = Counter(leaf for leaf in leaves if isinstance(leaf, int))
    if used != numbers:
        raise _Wrong(f"uses the numbers {sorted(used.elements())}, not {sorted(numbers.elements())}")
    if value != target:
        raise _Wrong(f"equals {value}, not {target}")
    if equals:
        claimed = read_quantity(tidy(right))
        if claimed is None:
            raise Unreadable("what follows '=' is not a number")
        if claimed.value != target:
            raise _Wrong(f"says it equals {clip(right.strip(), 40)}, not {target}")


def _spell(text: str) -> str:
    """The expression in plain characters."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"the expression is longer than {MAX_CHARS} characters")
    text = tidy(text)
    for fancy, plain in _SPELLINGS:
        text = text.replace(fancy, plain)
    for _ in range(MAX_DEPTH):
        text, replaced = _FRACTION.subn(r"((\1)/(\2))", text)
        if not replaced:
            break
    return text


def _parse(text: str) -> ast.expr:
    text = text.strip()
    if not _ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        raise Unreadable("only integers, + - * / and parentheses are allowed")
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth > MAX_DEPTH:
            raise Unreadable(f"parentheses are nested more than {MAX_DEPTH} deep")
    if any(len(digits) > MAX_INT_DIGITS for digits in re.findall(r"[0-9]+", text)):
        raise Unreadable(f"a number has more than {MAX_INT_DIGITS} digits")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable("not an arithmetic expression") from None


def _compute(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _compute(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Div) and right == 0:
            raise _Wrong("divides by zero")
        return _OPERATORS[type(node.op)](left, right)
    raise Unreadable("only integers, + - * / and parentheses are allowed")


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not an integer")
    return int(value)
