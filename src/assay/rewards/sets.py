r"""Sets of real numbers: intervals, inequalities, unions, intersections and differences.

A set is a membership test and the points where membership may change. Two sets are equal if the tests agree at all
these points and between them, so "[0,\infty) \setminus \{1\}" equals "0 \le x < 1 or x > 1".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from assay.rewards.latex import real_value
from assay.rewards.names import VARIABLE, is_function_value
from assay.rewards.numeric import CACHE_SIZE, NO_UNIT, read_quantity
from assay.rewards.structure import MAX_PARTS, encloses, split

DIGITS = 40  # after the decimal point: numbers that agree so far are equal

Number = Fraction | float  # a float is an infinity

_RELATION = re.compile(r"([<>=]|\\(?:le|ge|neq)(?![A-Za-z]))")
_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\neq": "\\neq", "=": "="}
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|:|\|)(.*)\\\}")
_MEMBER = re.compile(r"(\S+)\s*\\in(?![A-Za-z])(.*)")
_EXPLICIT = re.compile(r"[<>]|\\(?:le|ge|neq|cup|cap|setminus|mathbb|infty)(?![A-Za-z])|^\(.*\]$|^\[.*\)$|^\]|\[$")
_REAL = "\\mathbb{R}"


@dataclass(frozen=True, slots=True)
class RealSet:
    """`variable` is the name in an inequality, else empty."""

    contains: Callable[[Number], bool]
    points: frozenset[Number]
    variable: str = ""

    def joined(self, other: RealSet, contains: Callable[[Number], bool]) -> RealSet:
        return RealSet(contains, self.points | other.points, self.variable or other.variable)

    def __or__(self, other: RealSet) -> RealSet:
        return self.joined(other, lambda x: self.contains(x) or other.contains(x))

    def __and__(self, other: RealSet) -> RealSet:
        return self.joined(other, lambda x: self.contains(x) and other.contains(x))

    def __sub__(self, other: RealSet) -> RealSet:
        return self.joined(other, lambda x: self.contains(x) and not other.contains(x))

    def samples(self) -> list[Number]:
        """Return a number of each interval on which membership is constant."""
        ends = sorted(point for point in self.points if isinstance(point, Fraction)) or [Fraction(0)]
        between = [(one + other) / 2 for one, other in pairwise(ends)]
        return [ends[0] - 1, *ends, *between, ends[-1] + 1]

    def same(self, other: RealSet) -> bool:
        return all(self.contains(x) == other.contains(x) for x in self.joined(other, self.contains).samples())


def same_real_set(answer: str, gold: str, strict: bool) -> bool | None:
    """Compare two sets of real numbers. None: one of them is not such a set, or neither is clearly one.

    An answer to a solved inequality must be solved too.
    """
    if not (_EXPLICIT.search(gold) or _EXPLICIT.search(answer)):
        return None
    theirs = _read_gold(gold)
    ours = read_real_set(answer, strict) if theirs is not None else None
    if ours is None or theirs is None:
        return False if theirs is not None and theirs.variable else None
    return (not ours.variable or not theirs.variable or ours.variable == theirs.variable) and ours.same(theirs)


@lru_cache(CACHE_SIZE)
def _read_gold(gold: str) -> RealSet | None:
    return read_real_set(gold, strict=False)


def read_real_set(text: str, strict: bool) -> RealSet | None:
    """Parse a tidied set. Strict: a rational end must be a number, not an expression. None: it cannot be parsed."""
    text = text.strip()
    if builder := _BUILDER.fullmatch(text):
        text = builder[2].strip()
    for separators, combine in (
        (("or", "\\lor", "\\vee"), RealSet.__or__),
        (("and", "\\land", "\\wedge", "\\text{and}"), RealSet.__and__),
        ((",", ";"), _listed),
        (("\\setminus",), RealSet.__sub__),
        (("\\cup",), RealSet.__or__),
        (("\\cap",), RealSet.__and__),
    ):
        parts = split(text, separators)
        if 1 < len(parts) <= MAX_PARTS:
            return _combined(parts, combine, strict)
    if text.startswith(_REAL) and (rest := text[len(_REAL) :].strip()).startswith("-"):
        return _combined([_REAL, rest[1:]], RealSet.__sub__, strict)
    return _atom(text, strict)


def _combined(parts: list[str], combine: Callable[[RealSet, RealSet], RealSet], strict: bool) -> RealSet | None:
    total: RealSet | None = None
    for part in parts:
        read = read_real_set(part, strict)
        if read is None or (combine is _listed and not _RELATION.search(part) and not _MEMBER.match(part)):
            return None
        if total is not None and total.variable != read.variable and (total.variable and read.variable):
            return None
        total = read if total is None else combine(total, read)
    return total


def _listed(one: RealSet, other: RealSet) -> RealSet:
    r"""Read a comma between conditions: "x > 0, x \neq 1" are both true, "x < 0, x > 1" cannot be."""
    both = one & other
    return both if any(map(both.contains, both.samples())) else one | other


def _atom(text: str, strict: bool) -> RealSet | None:
    if text == _REAL:
        return RealSet(lambda x: True, frozenset())
    if member := _MEMBER.fullmatch(text):
        simple = VARIABLE.fullmatch(member[1]) and not _MEMBER.search(member[2])
        inner = read_real_set(member[2], strict) if simple else None
        return inner and RealSet(inner.contains, inner.points, member[1])
    if text.startswith("\\{") and text.endswith("\\}") and encloses(text):
        values = [_number(part, strict) for part in split(text[2:-2], ",;")]
        points = frozenset(value for value in values if isinstance(value, Fraction))
        return RealSet(points.__contains__, points) if None not in values else None
    if text[:1] in ("(", "[", "]") and text[-1:] in (")", "]", "["):
        ends = split(text[1:-1], ",;")
        return _interval(ends, text[0] == "[", text[-1] == "]", strict) if len(ends) == 2 else None
    return _inequality(text, strict)


def _interval(ends: list[str], low_closed: bool, high_closed: bool, strict: bool) -> RealSet | None:
    low, high = (_number(end, strict) for end in ends)
    if low is None or high is None or low >= high or (low_closed and low == -_INFINITY):
        return None
    if high_closed and high == _INFINITY:
        return None
    return _half_line("\\ge" if low_closed else ">", low) & _half_line("\\le" if high_closed else "<", high)


_INFINITY = float("inf")
_TESTS: dict[str, Callable[[Number, Number], bool]] = {
    "<": lambda x, bound: x < bound,
    ">": lambda x, bound: x > bound,
    "\\le": lambda x, bound: x <= bound,
    "\\ge": lambda x, bound: x >= bound,
    "\\neq": lambda x, bound: x != bound,
    "=": lambda x, bound: x == bound,
}


def _half_line(relation: str, bound: Number, variable: str = "") -> RealSet:
    test = _TESTS[relation]
    return RealSet(lambda x: test(x, bound), frozenset([bound]), variable)


def _inequality(text: str, strict: bool) -> RealSet | None:
    r"""Parse "x < 1", "-x > -1" or "1 \le x < 3", with a variable or a function value alone on one side."""
    sides = [part.strip() for part in _RELATION.split(text)]
    relations, sides = sides[1::2], sides[::2]
    named = [position for position, side in enumerate(sides) if _is_variable(side.removeprefix("-").strip())]
    if not 2 <= len(sides) <= 3 or len(named) != 1 or (len(sides) == 3 and named != [1]):
        return None
    position, total = named[0], None
    negated = sides[position].startswith("-")
    for other, relation in ((position - 1, relations[0]), (position + 1, relations[-1])):
        if not 0 <= other < len(sides):
            continue
        bound = _number(sides[other], strict)
        if bound is None:
            return None
        mirrored = (other < position) != negated
        variable = sides[position].removeprefix("-").strip()
        part = _half_line(_MIRRORED[relation] if mirrored else relation, -bound if negated else bound, variable)
        total = part if total is None else total & part
    return total


def _is_variable(text: str) -> bool:
    return VARIABLE.fullmatch(text) is not None or is_function_value(text)


def _number(text: str, strict: bool) -> Number | None:
    """Return the value of an end, rounded to `DIGITS`."""
    sign, _, infinite = text.replace(" ", "").rpartition("\\infty")
    if sign in ("", "+", "-") and not infinite and "\\infty" in text:
        return -_INFINITY if sign == "-" else _INFINITY
    quantity = read_quantity(text)
    if quantity is not None:
        value = quantity.value if quantity.unit == NO_UNIT else None
    else:
        value = real_value(text, irrational=strict)
    return None if value is None else Fraction(round(value * 10**DIGITS), 10**DIGITS)
