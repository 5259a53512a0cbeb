r"""Answers that are more than one expression, how brackets divide a text, and names of values in equations.

Lists, tuples, unions and matrices have parts. A side of an equation may name the value of the other side: a variable, a
function value, a measured object, words. "x = 5", "f(1) = 5", "|AB| = 5" and "Number of ways = 5" state the value 5;
"2x = 5" and "twice the number = 5" do not.

A set of real numbers (an interval, an inequality, a union, intersection or difference) is a membership test and the
points where membership may change. Two sets are equal if the tests agree at all these points and between them, so
"[0,\infty) \setminus \{1\}" equals "0 \le x < 1 or x > 1".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from assay.rewards.latex import real_value
from assay.rewards.numeric import CACHE_SIZE, NO_UNIT, Unreadable, keeps_the_number, read_quantity

MAX_PARTS = 24  # of a list, a set or a matrix
MAX_UNMATCHED = 4  # symbolic parts of an unordered answer that are compared with each other

_ENVIRONMENT = r"\\begin\s*\{(?:[pbB]?matrix|smallmatrix|array)\}"
_MATRIX = re.compile(rf"([(\[]?)\s*{_ENVIRONMENT}(?:\{{[lcr| ]*\}})?(.*?)\\end\s*\{{\w+\}}\s*([)\]]?)", re.DOTALL)
_CASES = re.compile(r"\\begin\s*\{cases\}(.*?)\\end\s*\{cases\}", re.DOTALL)
MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_CONJUNCTIONS = ("and", "or", "\\lor", "\\vee")

# Kind of the gold answer -> other kinds of answer that are accepted.
_ALSO_WRITTEN = {"list": ("set", "()"), "set": ("list",), "union": ("list",), "()": ("list",), "column": ("()", "list")}
_OPENING, _CLOSING = "([{", ")]}"
_TOKEN = re.compile(r"\\begin\s*\{\w+\}|\\end\s*\{\w+\}|\\[{}]|\\\\|\\[A-Za-z]+|[()\[\]{},;&=:|-]|\b(?:and|or)\b")


@dataclass(frozen=True, slots=True)
class Structure:
    """`kind` is "list", "set", "union", "()", "[]", "(]", "[)" or "matrix ROWSxCOLUMNS"."""

    kind: str
    parts: tuple[str, ...]


def read_structure(text: str) -> Structure | None:
    """Return the parts of a tidied answer; None if it is a single expression."""
    text = MEMBER.sub("", text, count=1) if MEMBER.match(text) else text
    if (matrix := _MATRIX.fullmatch(text)) and len(matrix[1]) == len(matrix[3]):
        return _read_matrix(matrix[2])
    if cases := _CASES.fullmatch(text):
        return Structure("list", tuple(row for row in split(cases[1], ("\\\\", ",")) if row))
    if len(union := split(text, ("\\cup",))) > 1:
        return Structure("union", tuple(union))
    if text.startswith("\\{") and text.endswith("\\}") and encloses(text):
        return Structure("set", _with_both_signs(split(text[2:-2], ",;")))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and encloses(text):
        parts = split(text[1:-1], ",;")
        return Structure(text[0] + text[-1], tuple(parts)) if len(parts) > 1 else None
    values = _with_both_signs(list_items(text))
    return Structure("list", values) if len(values) > 1 else None


def list_items(text: str) -> list[str]:
    """Split "1, 2, and 3" at commas, semicolons and conjunctions; "p=5,q=2; p=7,q=2" at semicolons only."""
    groups = split(text, ";")
    if len(groups) > 1 and all("=" in group and len(split(group, ",")) > 1 for group in groups):
        return groups
    items = split(text, (",", ";", *_CONJUNCTIONS))
    return [item for position, item in enumerate(items) if item or position == 0 or not items[position - 1]]


def same_structure(answer: Structure, gold: Structure, same: Callable[[str, str], bool]) -> bool:
    """Return whether all parts are equal: in any order for lists, sets and unions."""
    if max(len(answer.parts), len(gold.parts)) > MAX_PARTS:
        raise Unreadable(f"the answer has more than {MAX_PARTS} parts")
    if len(answer.parts) != len(gold.parts):
        return False
    kind = "column" if gold.kind.endswith("x1") else gold.kind
    if answer.kind not in (gold.kind, *_ALSO_WRITTEN.get(kind, ())):
        return False
    if gold.kind in ("list", "set", "union"):
        return _same_parts(list(answer.parts), list(gold.parts), same)
    return all(map(same, answer.parts, gold.parts))


def _same_parts(answer: list[str], gold: list[str], same: Callable[[str, str], bool]) -> bool:
    """Return whether the parts can be paired. Equal texts are paired first, to avoid slow comparisons."""
    for part in list(answer):
        if part in gold:
            answer.remove(part)
            gold.remove(part)
    if len(answer) > MAX_UNMATCHED and any(re.search(r"[A-Za-z]", part) for part in answer + gold):
        raise Unreadable(f"more than {MAX_UNMATCHED} symbolic parts differ from the gold answer's")
    for part in answer:
        partner = next((candidate for candidate in gold if same(part, candidate)), None)
        if partner is None:
            return False
        gold.remove(partner)
    return True


def _read_matrix(body: str) -> Structure | None:
    rows = [row for row in split(body, ("\\\\",)) if row]
    cells = [split(row, "&") for row in rows]
    if not cells or len({len(row) for row in cells}) > 1:
        return None
    return Structure(f"matrix {len(cells)}x{len(cells[0])}", tuple(cell for row in cells for cell in row))


def split(text: str, separators: Collection[str]) -> list[str]:
    """Split at separators outside of brackets. Kinds of brackets are not distinguished: (2, 3] is one part."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += _nesting(token.group())
        if depth == 0 and token.group() in separators:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _nesting(token: str) -> int:
    bracket = token.lstrip("\\") if len(token) < 3 else token
    return (bracket in _OPENING or token.startswith("\\begin")) - (bracket in _CLOSING or token.startswith("\\end"))


def encloses(text: str) -> bool:
    """Return whether the bracket that opens the text is closed at its end."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += _nesting(token.group())
        if depth == 0 and _nesting(token.group()):
            return token.end() == len(text)
    return False


def _with_both_signs(parts: list[str]) -> tuple[str, ...]:
    signed: list[str] = []
    for part in parts:
        if len(_PLUS_MINUS.findall(part)) == 1:
            signed += [_PLUS_MINUS.sub("+", part).lstrip("+ "), _PLUS_MINUS.sub("-", part)]
        else:
            signed.append(part)
    return tuple(signed)


_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|(?:var)?epsilon|zeta|eta|(?:var)?theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|(?:var)?phi"
    r"|chi|psi|omega|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell)(?![A-Za-z])"
)
_INDEX = r"(?:\s?_\s?(?:\{[^{}=]*\}|\w))?"
_LETTER = rf"(?:{_GREEK}|\\(?:mathbb|mathcal|mathfrak)\s*\{{[A-Z]\}}|[A-Za-z])"
_ACCENT = r"\\(?:hat|bar|vec|tilde|dot|overline|overrightarrow|widehat|angle|measuredangle|triangle)(?![A-Za-z])"
VARIABLE = re.compile(rf"{_LETTER}{_INDEX}'*")
_ACCENTED = re.compile(rf"(?:m\s?)?{_ACCENT}\s*\{{?\s*(?:{_LETTER}{_INDEX}|[A-Z0-9]{{1,5}})'*\s*\}}?")
_OBJECT = re.compile(r"[A-Z]{2,6}|\|\s?[A-Z]{1,2}\s?\||\[\s?[A-Z]{3,6}\s?\]")  # AB, the area [ABC], the size |S|
_FUNCTION = re.compile(
    rf"(?:(?P<name>{_LETTER}){_INDEX}|\({_LETTER}\s*\\circ\s*{_LETTER}\)|\\?(?:Pr|deg|dim|det|arg|gcd|lcm|max|min)(?![A-Za-z]))"
    r"(?:\^\{?-1\}?|\^\{\(\w\)\})?'*\s?(?P<arguments>[(\[].*[)\]])"
)
_BOUND = re.compile(
    r"\\(?:lim|max|min|sup|inf|sum|prod|int|oint)\s*_.*|\\(?:deg|dim|det|arg|max|min)\s+[A-Za-z]", re.DOTALL
)
_ANGLE_FUNCTION = re.compile(rf"\\(?:sin|cos|tan|cot|sec|csc)\s*\(?\s*(?:\\angle\s*)?(?:{_GREEK}|[A-Z]{{1,3}})\s*\)?")
_WORD = re.compile(r"\\?[A-Za-z]{2,}")
_TUPLE = re.compile(rf"\(\s*{VARIABLE.pattern}(?:\s*[,;]\s*{VARIABLE.pattern})+\s*\)")
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9 .,'%$()/:-]*")
_LONG_WORD = re.compile(r"[A-Za-z]{4}|[A-Z][a-z]{2}")  # "abc" may be a product
# Words that make more than a name of a label: "at most", "from", "square of x".
_NOT_IN_LABEL = re.compile(
    r"\b(?:at|most|least|from|to|between|and|almost|nearly|about|around|up|until|suppose|assume|let|when|while|squared"
    r"|cubed|twice|(?:square|cube|root|power|multiple|opposite|double|triple|logarithm|absolute value)s? of)\b",
    re.IGNORECASE,
)


def is_name(side: str, labels: bool = True) -> bool:
    """Return whether one side of an equation only names the value of the other side; `labels`: also in words."""
    patterns = (VARIABLE, _ACCENTED, _OBJECT, _BOUND, _ANGLE_FUNCTION, _TUPLE)
    return (
        any(pattern.fullmatch(side) for pattern in patterns) or is_function_value(side) or (labels and is_label(side))
    )


def names_of(side: str) -> tuple[str, ...]:
    """Return the names in "(x, y)", or the name in another text, without spaces and braces."""
    plain = re.sub(r"[\s{}]", "", side)
    return tuple(re.split("[,;]", plain[1:-1])) if _TUPLE.fullmatch(side) else (plain,)


def is_function_value(text: str) -> bool:
    """Return whether a text is a function value such as f(1), not a product such as x(x + 1)."""
    function = _FUNCTION.fullmatch(text)
    if function is None or not encloses(function["arguments"]):
        return False
    name = function["name"]
    return not name or (name not in "xyz" and name not in _WORD.sub("", function["arguments"]))


def is_label(side: str) -> bool:
    """Return whether a side is a name in words, such as "Total cost"."""
    if not _LABEL.fullmatch(side) or not _LONG_WORD.search(side) or _NOT_IN_LABEL.search(side):
        return False
    return keeps_the_number(side.lower().split())


DIGITS = 40  # after the decimal point: numbers that agree so far are equal

Number = Fraction | float  # a float is an infinity

_RELATION = re.compile(r"([<>=]|\\(?:le|ge|neq)(?![A-Za-z]))")
_MIRRORED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\neq": "\\neq", "=": "="}
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid|:|\|)(.*)\\\}")
_MEMBERSHIP = re.compile(r"(\S+)\s*\\in(?![A-Za-z])(.*)")
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
        between = [(low + high) / 2 for low, high in pairwise(ends)]
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
        if read is None or (combine is _listed and not _RELATION.search(part) and not _MEMBERSHIP.match(part)):
            return None
        if total is not None and total.variable != read.variable and (total.variable and read.variable):
            return None
        total = read if total is None else combine(total, read)
    return total


def _listed(first: RealSet, second: RealSet) -> RealSet:
    r"""Read a comma between conditions: "x > 0, x \neq 1" are both true, "x < 0, x > 1" cannot be."""
    both = first & second
    return both if any(map(both.contains, both.samples())) else first | second


def _atom(text: str, strict: bool) -> RealSet | None:
    if text == _REAL:
        return RealSet(lambda x: True, frozenset())
    if member := _MEMBERSHIP.fullmatch(text):
        simple = VARIABLE.fullmatch(member[1]) and not _MEMBERSHIP.search(member[2])
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
_TESTS: dict[str, Callable[[Any, Any], bool]]
_TESTS = {"<": lt, ">": gt, "\\le": le, "\\ge": ge, "\\neq": ne, "=": eq}


def _half_line(relation: str, bound: Number, variable: str = "") -> RealSet:
    test = _TESTS[relation]
    return RealSet(lambda x: test(x, bound), frozenset([bound]), variable)


def _inequality(text: str, strict: bool) -> RealSet | None:
    r"""Parse "x < 1", "-x > -1" or "1 \le x < 3", with a variable or a function value alone on one side."""
    sides = [part.strip() for part in _RELATION.split(text)]
    relations, sides = sides[1::2], sides[::2]
    names = [side.removeprefix("-").strip() for side in sides]
    named = [i for i, name in enumerate(names) if VARIABLE.fullmatch(name) or is_function_value(name)]
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
        relation = _MIRRORED[relation] if mirrored else relation
        part = _half_line(relation, -bound if negated else bound, names[position])
        total = part if total is None else total & part
    return total


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
