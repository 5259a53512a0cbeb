r"""Equality of an extracted answer and the gold answer, which decides how they are compared.

A number is compared exactly (see `numeric`); a list, tuple, interval, set, union or matrix part by part; words and
multiple-choice letters as text; any other expression by math-verify (see `latex`). "a \pm b" is two values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

from assay.rewards.latex import check_expression, check_vocabulary, check_work, numeric_value, same_expression
from assay.rewards.numeric import (
    CACHE_SIZE,
    MAX_ANSWER_CHARS,
    NO_UNIT,
    Quantity,
    Unreadable,
    UnreadableGold,
    WrongForm,
    keeps_the_number,
    read_quantity,
    tidy,
    without_unit,
)

_WORDS = re.compile(r"[A-Za-z][A-Za-z .,'-]*[A-Za-z]")
_BASES_TEXT = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = _BASES_TEXT.split()
_BASED = re.compile(
    rf"(\()?(?P<digits>[0-9A-Za-z]+)(?(1)\))(?:\s?_\s?\{{?\s?| (?:in )?base )(?P<base>[0-9]+|{'|'.join(_BASES)})\s?\}}?"
)
_EXTRA_SPACE = re.compile(r" (?![0-9A-Za-z])|(?<![0-9A-Za-z]) ")  # "1 2" is not "12"
_CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*\)")
_MATHS = re.compile(r"[0-9]|\\[A-Za-z]|(?<![A-Za-z])(?:pi|e|i)(?![A-Za-z])")
_EQUALS = re.compile(r"=|\\approx(?![A-Za-z])")
_NAME = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?")
_LETTERS = re.compile(r"[A-Za-z\\{}()|,'\s]{1,60}")
_LEFT_SIDE = re.compile(r"[\w\s()\[\]{}|^+*/.,'\\:$%!-]{0,99}[\w)\]}|'%!]")
_RELATION = re.compile(
    r"[<>≠]|(?<![0-9)}])!|!=|\\(?:neq?|neg|not|sim|leq?|geq?|lt|gt|lor|land|vee|wedge|[bx]?cancel|phantom)(?![A-Za-z])"
)
_ROUNDED = re.compile(r"(.*\S)\s*\\approx\s*([-+]?[0-9][0-9,]*(?:\.([0-9]+))?)", re.DOTALL)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_TWO_SIGNS = re.compile(r"[-+]\s*[-+]")
_ADJACENT_LETTER = re.compile(r"[0-9}][A-Za-z]")
_IN_BRACKETS = re.compile(r"\(([^()]*)\)|\\\{([^{}]*)\\\}")
NOT_EVALUATED = "the gold answer is a number, the answer is an expression that is not evaluated"


def equal(answer: str, gold: str, strict: bool = True) -> bool:
    """Return whether two answers are equal. Raises Unreadable (or UnreadableGold) if one cannot be read.

    Strict: if the gold answer is a number, the answer must be one too. Otherwise an expression of that value counts.
    """
    return compare(answer, gold, strict)[0]


def compare(answer: str, gold: str, strict: bool = True) -> tuple[bool, str]:
    """Return what `equal` returns, and the reason if the answer is rejected for its form."""
    if len(answer) > MAX_ANSWER_CHARS:
        raise Unreadable(f"the answer is longer than {MAX_ANSWER_CHARS} characters")
    answer, gold = tidy(answer), tidy(gold)
    if not answer:
        raise Unreadable("the answer is empty")
    try:
        return _same(answer, gold, strict), ""
    except WrongForm as error:
        return False, str(error)


def _same(answer: str, gold: str, strict: bool) -> bool:
    """Return whether two tidied answers, or parts of answers, are equal. Raises WrongForm if the forms differ."""
    if answer == gold:
        return True
    number = _gold_number(gold)
    rounded = _ROUNDED.fullmatch(answer)
    if rounded and _is_rounded(rounded, gold, number) and _same_part(rounded[1], gold, strict):
        return True
    if number is not None and (ours := read_quantity(answer)) is not None:
        return _same_numbers(ours, number, strict)
    if "=" not in gold:
        answer = _without_name(answer)
    if (based := _same_based(answer, gold, number)) is not None:
        return based
    if number is not None:
        return _states_number(answer, gold, number, strict)
    if _same_text(answer, gold):
        return True
    if _is_words(gold, 3) or (_is_words(answer, 2) and _is_words(gold, 2)) or _CHOICE.fullmatch(gold):
        return False  # as products of letters, anagrams would be equal
    parts = read_structure(gold)
    if parts is not None:
        check_expression(answer)
        ours_parts = read_structure(_CONJUNCTION.sub(", ", answer))  # "1 and 2" is a list
        return ours_parts is not None and same_structure(ours_parts, parts, partial(_same_part, strict=strict))
    return _same_scalar(without_unit(answer), without_unit(gold))


def _same_part(answer: str, gold: str, strict: bool) -> bool:
    try:
        return _same(answer, gold, strict)
    except (WrongForm, Unreadable):
        return False


def _is_rounded(rounded: re.Match[str], gold: str, number: Quantity | None) -> bool:
    r"""Return whether the decimals of "\frac{1}{3} \approx 0.33" are those of the gold answer, rounded or truncated."""
    value = number.value if number is not None else numeric_value(gold)
    step = Fraction(1, 10 ** len(rounded[3] or ""))
    return value is not None and abs(Fraction(value) - Fraction(rounded[2].replace(",", ""))) < step


def _same_scalar(answer: str, gold: str) -> bool:
    """Compare one expression that is not a number, or one equation."""
    if "=" not in gold:
        answer = _right_side(answer)
        if read_structure(answer) is not None:
            raise WrongForm("the answer has several values, the gold answer has one")
    number = read_quantity(answer)
    if number is not None and number.unit == NO_UNIT:
        answer = _as_fraction(number)  # exactly: a decimal is not an irrational number
    return same_expression(answer, gold)


def _same_numbers(answer: Quantity, gold: Quantity, strict: bool) -> bool:
    if strict and not answer.evaluated(gold) and answer.same(gold):
        raise WrongForm(NOT_EVALUATED)
    return answer.same(gold)


@lru_cache(CACHE_SIZE)
def _gold_number(gold: str) -> Quantity | None:
    """Return the number that the gold answer is, also for "x = 5"; "5m" is algebra, since it may be 5 times m."""
    name, equals, value = gold.partition("=")
    value = value.strip() if equals and _NAME.fullmatch(name.strip()) else gold
    try:
        return None if _ADJACENT_LETTER.fullmatch(value[-2:]) else read_quantity(value)
    except Unreadable as error:
        raise UnreadableGold(str(error)) from None


def _states_number(answer: str, gold: str, number: Quantity, strict: bool) -> bool:
    """Return whether an answer that is more than a number, such as "x = 5" or "(5)", states this number."""
    if not _MATHS.search(answer):
        raise Unreadable("there is no number in the answer")
    if not _same_name(answer, gold):
        return False
    if _TWO_SIGNS.search(answer):
        raise WrongForm("the answer has two signs in a row")
    value = _right_side(answer, number)
    if bracketed := _IN_BRACKETS.fullmatch(value):
        value = (bracketed[1] or bracketed[2] or "").strip()
    ours = read_quantity(value)
    if ours is not None:
        return _same_numbers(ours, number, strict)
    check_expression(value)
    check_work(value)
    if not strict:
        return same_expression(value, _as_fraction(number))
    try:
        check_vocabulary(value, "")
    except WrongForm:
        raise WrongForm("the gold answer is a number, the answer is not") from None
    raise WrongForm(NOT_EVALUATED)


def _as_fraction(number: Quantity) -> str:
    return f"\\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"


def _without_name(answer: str) -> str:
    """Return the value of "x = 5" or "(x, y) = (1, 2)", where the left side has letters but no number."""
    left, equals, right = (side.strip() for side in answer.partition("="))
    if not equals or "=" in right or _RELATION.search(answer):
        return answer
    named = _LETTERS.fullmatch(left) and keeps_the_number(left.lower().split())
    return right if named else answer


def _right_side(answer: str, number: Quantity | None = None) -> str:
    """Return the last side of an equation such as "x = 5"; the whole text if another side contradicts it."""
    *left, last = (side.strip() for side in _EQUALS.split(answer))
    if not left or _RELATION.search(answer):
        return answer
    for side in left:
        stated = read_quantity(side)
        if stated is not None and (number is None or not stated.same(number)):
            return answer
        if stated is None and side and not _is_left_side(side):
            return answer
    return last


def _is_left_side(side: str) -> bool:
    """Return whether a side names or computes one value: "x", "f(1, 2)", "Total cost", "6 \\cdot 7", not "17 or x"."""
    if not _LEFT_SIDE.fullmatch(side) or read_structure(side) is not None:
        return False
    return keeps_the_number(_COMMAND.sub(" ", side).lower().split())


def _same_name(answer: str, gold: str) -> bool:
    """Return whether answer and gold answer assign to the same variable, if both assign to a single one."""
    ours, theirs = (text.partition("=")[0].strip() for text in (answer, gold))
    both = "=" in answer and "=" in gold and _NAME.fullmatch(ours) and _NAME.fullmatch(theirs)
    return not both or ours == theirs


def _is_words(text: str, least: int) -> bool:
    """Return whether a text is words, one with `least` letters or more; "p - q" and "xy" are algebra."""
    is_text = _WORDS.fullmatch(text) is not None and " - " not in text
    return is_text and re.search(rf"[A-Za-z]{{{least}}}", text) is not None


def _same_text(answer: str, gold: str) -> bool:
    is_choice = _CHOICE.fullmatch(gold) is not None
    answer, gold = (
        _EXTRA_SPACE.sub("", _CHOICE.sub(r"\1", text) if _CHOICE.fullmatch(text) else text) for text in (answer, gold)
    )
    any_case = is_choice or _is_words(gold, 3) or gold.lower() == "no"
    return answer == gold or (any_case and answer.casefold() == gold.casefold())


def _same_based(answer: str, gold: str, number: Quantity | None) -> bool | None:
    """Compare numbers with a base, such as 101_2. The answer may omit the base of the gold answer, but not add one.

    None: they are not such numbers.
    """
    ours, theirs = _BASED.fullmatch(answer), _BASED.fullmatch(gold)
    if theirs is None:
        if ours is None or number is None:
            return None
        return _base(ours) == 10 and ours["digits"].isdigit() and int(ours["digits"]) == number.value
    digits = ours["digits"] if ours else answer
    return digits.casefold() == theirs["digits"].casefold() and (ours is None or _base(ours) == _base(theirs))


def _base(based: re.Match[str]) -> int:
    return _BASES.index(based["base"]) if based["base"] in _BASES else int(based["base"])


MAX_PARTS = 24  # of a list, a set or a matrix
MAX_UNMATCHED = 4  # symbolic parts of an unordered answer that are compared with each other

_MATRIX = re.compile(r"\\begin\s*\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*?)\\end\s*\{\1\}", re.DOTALL)
_MEMBER = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_CONJUNCTION = re.compile(r"\s*,?\s+(?:and|or)\s+")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_LESS, _MORE = r"(<|\\leq?(?![A-Za-z])|\\lt(?![A-Za-z]))", r"(>|\\geq?(?![A-Za-z])|\\gt(?![A-Za-z]))"
_BETWEEN = re.compile(rf"([^<>]+?)\s*{_LESS}\s*[A-Za-z]\s*{_LESS}\s*([^<>]+)")
_BELOW = re.compile(rf"[A-Za-z]\s*{_LESS}\s*([^<>]+)|([^<>]+?)\s*{_MORE}\s*[A-Za-z]")
_ABOVE = re.compile(rf"[A-Za-z]\s*{_MORE}\s*([^<>]+)|([^<>]+?)\s*{_LESS}\s*[A-Za-z]")

# Kind of the gold answer -> other kinds of answer that are accepted.
_ALSO_WRITTEN = {"list": ("set", "()"), "set": ("list",), "union": ("list",), "()": ("list",), "column": ("()", "list")}
_OPENING, _CLOSING = "([{", ")]}"
_TOKEN = re.compile(r"\\begin\s*\{\w+\}|\\end\s*\{\w+\}|\\cup(?![A-Za-z])|\\[{}]|\\\\|\\[A-Za-z]+|[()\[\]{},;&]")


@dataclass(frozen=True, slots=True)
class Structure:
    """`kind` is "list", "set", "union", "()", "[]", "(]", "[)" or "matrix ROWSxCOLUMNS"."""

    kind: str
    parts: tuple[str, ...]


def read_structure(text: str) -> Structure | None:
    """Return the parts of a tidied answer; None if it is a single expression."""
    text = _MEMBER.sub("", text, count=1) if _MEMBER.match(text) else text
    if interval := _interval(text):
        return interval
    if matrix := _MATRIX.fullmatch(text):
        return _read_matrix(matrix[2])
    if len(union := _split(text, "\\cup")) > 1:
        return Structure("union", tuple(union))
    if text.startswith("\\{") and text.endswith("\\}") and _encloses(text):
        return Structure("set", _with_both_signs(_split(text[2:-2], ",;")))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _encloses(text):
        parts = _split(text[1:-1], ",;")
        return Structure(text[0] + text[-1], tuple(parts)) if len(parts) > 1 else None
    values = _with_both_signs(_split(text, ",;"))
    return Structure("list", values) if len(values) > 1 else None


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


def _interval(text: str) -> Structure | None:
    r"""Convert an inequality in one variable to an interval: "2 < x \le 3" to (2, 3]."""
    if between := _BETWEEN.fullmatch(text):
        low, first, second, high = between.groups()
    elif below := _BELOW.fullmatch(text):
        low, first, second, high = "-\\infty", "<", below[1] or below[4], below[2] or below[3]
    elif above := _ABOVE.fullmatch(text):
        low, first, second, high = above[2] or above[3], above[1] or above[4], "<", "\\infty"
    else:
        return None
    opening, closing = (relation in ("<", ">", "\\lt", "\\gt") for relation in (first, second))
    return Structure(("(" if opening else "[") + (")" if closing else "]"), (low.strip(), high.strip()))


def _read_matrix(body: str) -> Structure | None:
    rows = [row for row in _split(body, "\\\\") if row]
    cells = [_split(row, "&") for row in rows]
    if not cells or len({len(row) for row in cells}) > 1:
        return None
    return Structure(f"matrix {len(cells)}x{len(cells[0])}", tuple(cell for row in cells for cell in row))


def _split(text: str, separators: str) -> list[str]:
    """Split at separators outside of brackets. Kinds of brackets are not distinguished: (2, 3] is one part."""
    wanted = [separators] if separators.startswith("\\") else list(separators)
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        depth += _nesting(token.group())
        if depth == 0 and token.group() in wanted:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _nesting(token: str) -> int:
    bracket = token.lstrip("\\") if len(token) < 3 else token
    return (bracket in _OPENING or token.startswith("\\begin")) - (bracket in _CLOSING or token.startswith("\\end"))


def _encloses(text: str) -> bool:
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
