"""Comparing parsed expressions at a few points: cheap where simplification may take seconds, and nearly always enough.

Expressions that differ at a point are not equal. Equations and inequalities are if one is a multiple of the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

POINTS = 4
DIGITS = 30
TOLERANCE = 1e-12  # relative


def differ(first: Any, second: Any) -> bool:
    """Whether two sympy expressions have different values at a point."""
    return any(not _close(one, other) for one, other in _values(first, second))


def proportional(first: Any, second: Any) -> bool | None:
    """Whether two sympy relations say the same: same kind, and sides whose difference is a constant multiple."""
    one, other = _normal(first), _normal(second)
    if one is None or other is None:
        return None
    if one[0] != other[0]:
        return False
    ratios = [left / right for left, right in _values(one[1], other[1]) if right]
    if len(ratios) < 2:
        return None
    is_equation = one[0] == "Equality"
    return all(_close(ratio, ratios[0]) and (abs(ratio) if is_equation else ratio.real) > TOLERANCE for ratio in ratios)


def _normal(relation: Any) -> tuple[str, Any] | None:
    """The kind of a relation, turned to "less than", and the difference of its sides."""
    kind = type(relation).__name__
    if kind in ("StrictGreaterThan", "GreaterThan"):
        return kind.replace("Greater", "Less"), relation.rhs - relation.lhs
    if kind in ("StrictLessThan", "LessThan", "Equality"):
        return kind, relation.lhs - relation.rhs
    return None


def _values(first: Any, second: Any) -> Iterator[tuple[complex, complex]]:
    """The values of both at each point where both have one. The same points in every process."""
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    for point in range(POINTS if symbols else 1):
        # Fractions without a pattern, between 0.4 and 2.7, so that roots and logarithms are defined.
        where = {symbol: 0.4 + (0.7548776662 * (7 * point + index + 1)) % 2.3 for index, symbol in enumerate(symbols)}
        pair = [value_at(expression, where) for expression in (first, second)]
        if pair[0] is not None and pair[1] is not None:
            yield pair[0], pair[1]


def value_at(expression: Any, where: dict[Any, float]) -> complex | None:
    """The value of a sympy expression where its symbols have these values."""
    try:
        value = complex(expression.evalf(DIGITS, subs=where))
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None  # a symbol is left, or it is not defined there
    return value if abs(value) < 1e300 else None  # not for infinities and nan either


def _close(one: complex, other: complex) -> bool:
    return abs(one - other) <= 1e4 * TOLERANCE * max(abs(one), abs(other), 1e-9)
