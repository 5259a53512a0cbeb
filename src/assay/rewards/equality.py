r"""Equality of an extracted answer and the gold answer, which decides how they are compared.

A number is compared exactly (see `numeric`); a set of real numbers as a set, and a list, tuple, set or matrix part by
part (see `structure`); words and multiple-choice letters as text; any other expression by math-verify (see `latex`).
"a \pm b" is two values. The other sides of an equation must name the value (see `structure`) or be equal to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

from assay.rewards.expressions import calculate
from assay.rewards.latex import check_expression, check_vocabulary, check_work, real_value, same_expression
from assay.rewards.numeric import (
    CACHE_SIZE,
    MAX_ANSWER_CHARS,
    NO_UNIT,
    Quantity,
    Unreadable,
    UnreadableGold,
    WrongForm,
    compatible,
    read_quantity,
    split_unit,
    tidy,
)
from assay.rewards.structure import (
    MEMBER,
    VARIABLE,
    Structure,
    is_function_value,
    is_name,
    list_items,
    names_of,
    read_structure,
    same_real_set,
    same_structure,
    split,
)

_WORDS = re.compile(r"[A-Za-z][A-Za-z .,'-]*[A-Za-z]")
_BASES_TEXT = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = _BASES_TEXT.split()
_BASED = re.compile(
    rf"(\()?(?P<digits>[0-9A-Za-z]+)(?(1)\))(?:\s?_\s?\{{?\s?| (?:in )?base )(?P<base>[0-9]+|{'|'.join(_BASES)})\s?\}}?"
)
_EXTRA_SPACE = re.compile(r" (?![0-9A-Za-z])|(?<![0-9A-Za-z]) ")  # "1 2" is not "12"
_CHOICE = re.compile(r"\(?\s*([A-Za-z])\s*\)")
_OPTION = re.compile(r"(?i:option|choice) \(?([A-E])\)?")
_CHOICE_AND_VALUE = re.compile(r"(\([A-E]\))\s+(\S.*)")
_BEFORE_TEXT = re.compile(r"(?:option|choice|an?|the) ", re.IGNORECASE)
_TIME = re.compile(r"([0-9]{1,2}\s?:\s?[0-9]{2})\s?([ap])\s?\.?\s?m\.?", re.IGNORECASE)
_MATHS = re.compile(r"[0-9]|\\[A-Za-z]|(?<![A-Za-z])(?:pi|e|i)(?![A-Za-z])")
_ROUNDED = re.compile(r"(.*\S)\s*\\approx\s*([-+]?[0-9][0-9,]*(?:\.([0-9]+))?)", re.DOTALL)
_TWO_SIGNS = re.compile(r"[-+]\s*[-+]")
_ADJACENT_LETTER = re.compile(r"[0-9}][A-Za-z]")
_IN_BRACKETS = re.compile(r"\(([^()]*)\)|\\\{([^{}]*)\\\}")
_ONE_OF = re.compile(r"\bor\b|\\(?:lor|vee)(?![A-Za-z])")
_SYMBOL = re.compile(r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+|[A-Za-z]")
_ALPHABET = "abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_INTEGERS = r"(?:\\mathbb\s*\{\s*Z\s*\}|Z)"
_PARAMETER = re.compile(
    rf"[\s,;(]{{0,4}}(?:where|for)?\s*(?:(?P<name>[a-z])\s*\\in\s*{_INTEGERS}"
    r"|(?:any |all |an |some )?integers? (?P<other>[a-z]))\s*\)?$"
)
_UNDECLARED = re.compile(r"(?<![A-Za-z\\])[jklmn](?![A-Za-z])")
NOT_EVALUATED = "the gold answer is a number, the answer is an expression that is not evaluated"


def compare(answer: str, gold: str, strict: bool = True) -> tuple[bool, str]:
    """Return whether two answers are equal, and the reason if the answer is rejected for its form.

    Raises Unreadable (or UnreadableGold) if one cannot be read. Strict: if the gold answer is a number, the answer must
    be one too. Otherwise an expression of that value counts.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        raise Unreadable(f"the answer is longer than {MAX_ANSWER_CHARS} characters")
    answer, gold = tidy(answer), tidy(gold)
    if not answer:
        raise Unreadable("the answer is empty")
    try:
        return answer == gold or _same(*_with_same_parameter(answer, gold), strict), ""
    except WrongForm as error:
        return False, str(error)


def _same(answer: str, gold: str, strict: bool) -> bool:
    """Return whether two tidied answers, or parts of answers, are equal. Raises WrongForm if the forms differ."""
    if answer == gold:
        return True
    theirs = _gold_statement(gold)
    number = theirs.number
    rounded = _ROUNDED.fullmatch(answer) if "\\approx" in answer else None
    if rounded and _is_rounded(rounded, gold, number) and _same_part(rounded[1], gold, strict):
        return True
    if number is not None and (ours := read_quantity(answer)) is not None:
        return _same_numbers(ours, number, strict)
    if (based := _same_based(answer, gold, number)) is not None:
        return based
    if number is not None:
        return _states_number(answer, theirs, number, strict)
    if _same_text(answer, gold) or ((option := _OPTION.fullmatch(answer)) and option[1] == gold):
        return True
    if _CHOICE.fullmatch(gold):
        return False
    if theirs_choice := _CHOICE_AND_VALUE.fullmatch(gold):
        ours_choice = _CHOICE_AND_VALUE.fullmatch(answer)
        value = ours_choice is None or _same_part(ours_choice[2], theirs_choice[2], strict)
        return value and _same_text(ours_choice[1] if ours_choice else answer, theirs_choice[1])
    if _is_words(gold, 3) or (_is_words(answer, 2) and _is_words(gold, 2)):
        # As products of letters, anagrams would be equal.
        return "=" in answer and _same_text(read_statement(answer, labels=False).value, gold)
    if (same := same_real_set(answer, gold, strict)) is not None:
        return same
    if (gold_parts := _read_parts(gold)) is not None:
        check_expression(answer)
        return gold_parts.same(_read_parts(answer), strict)
    return _same_scalar(answer, theirs, gold)


def _same_part(answer: str, gold: str, strict: bool) -> bool:
    try:
        return _same(answer, gold, strict)
    except (WrongForm, Unreadable):
        return False


@dataclass(frozen=True, slots=True)
class Statement:
    """A value and the names that it is assigned to, if any: ("x",) for "x = 2 + 3 = 5". `number`: a gold answer's."""

    value: str
    names: tuple[str, ...] = ()
    number: Quantity | None = None


def read_statement(text: str, labels: bool = True) -> Statement:
    """Parse an equation that states one value: "x = 5" or "6 \\cdot 7 = 42". Raises WrongForm for other equations.

    labels: words may name the value, as in "Total cost = 5".
    """
    sides = split(text, ("=", "\\approx")) if "=" in text or "\\approx" in text else [text]
    if len(sides) == 1:
        return Statement(text)
    *left, value = sides
    if len(left) == 1 and is_name(value, labels=False) and not is_name(left[0]):
        left, value = [value], left[0]  # "5 = x"
    tolerance = _last_digit(value) if "\\approx" in text else None
    for side in left:
        if not is_name(side, labels) and not _equal_sides(side, value, tolerance):
            raise WrongForm("a side of the equation is neither a name of the other side nor equal to it")
    names = names_of(left[0]) if is_name(left[0], labels=False) else ()
    if read_quantity(value) is None and set(names) & set(_SYMBOL.findall(value)):
        raise WrongForm("the answer is an equation that is not solved")
    return Statement(value, names)


def _last_digit(value: str) -> Fraction | None:
    number = re.fullmatch(r"[-+]?[0-9][0-9,]*(?:\.([0-9]+))?", value)
    return Fraction(1, 10 ** len(number[1] or "")) if number else None


def _equal_sides(side: str, value: str, tolerance: Fraction | None) -> bool:
    ours, theirs = read_quantity(side), read_quantity(value)
    if tolerance is not None and theirs is not None:
        exact = ours.value if ours is not None else real_value(side)
        return exact is not None and abs(exact - theirs.value) < tolerance
    if ours is not None and theirs is not None:
        return ours.same(theirs) or theirs.same(ours)
    computed = [quantity.value if quantity else _computed(text) for quantity, text in ((ours, side), (theirs, value))]
    if None not in computed:
        return computed[0] == computed[1]
    try:
        return same_expression(side, value)
    except (Unreadable, UnreadableGold, WrongForm):
        return False


_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_PYTHON = (("\\cdot", "*"), ("\\times", "*"), ("\\div", "/"), ("%", "/100"), (" of ", "*"), ("{", "("), ("}", ")"))
_UNIT_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def _computed(side: str) -> Fraction | None:
    r"""Return the value of arithmetic such as "20\% of 50" or "3 apples + 4 apples"; None if it is something else."""
    side = _FRACTION.sub(lambda part: f"(({part[1] or part[2]})/({part[3] or part[4]}))", side)
    for latex, python in _PYTHON:
        side = side.replace(latex, python)
    try:
        return calculate(_UNIT_WORDS.sub(" ", side))
    except Unreadable:
        return None


@lru_cache(CACHE_SIZE)
def _gold_statement(gold: str) -> Statement:
    """Return what the gold answer states, with its number if it is one; "5m" is algebra, since it may be 5 times m."""
    try:
        stated = read_statement(gold, labels=False) if "=" in gold else Statement(gold)
        number = None if _ADJACENT_LETTER.fullmatch(stated.value[-2:]) else read_quantity(stated.value)
        return Statement(stated.value, stated.names, number)
    except WrongForm:
        return Statement(gold)
    except Unreadable as error:
        raise UnreadableGold(str(error)) from None


def _is_rounded(rounded: re.Match[str], gold: str, number: Quantity | None) -> bool:
    r"""Return whether the decimals of "\frac{1}{3} \approx 0.33" equal the gold answer, rounded or truncated."""
    value = number.value if number is not None else real_value(gold)
    step = Fraction(1, 10 ** len(rounded[3] or ""))
    return value is not None and abs(value - Fraction(rounded[2].replace(",", ""))) < step


def _same_numbers(answer: Quantity, gold: Quantity, strict: bool) -> bool:
    if strict and not answer.evaluated(gold) and answer.same(gold):
        raise WrongForm(NOT_EVALUATED)
    return answer.same(gold)


def _states_number(answer: str, gold: Statement, number: Quantity, strict: bool) -> bool:
    """Return whether an answer that is more than a number, such as "x = 5" or "(5)", states this number."""
    if not _MATHS.search(answer):
        raise Unreadable("there is no number in the answer")
    if _TWO_SIGNS.search(answer):
        raise WrongForm("the answer has two signs in a row")
    stated = read_statement(answer)
    if gold.names and stated.names and stated.names != gold.names:
        return False
    value = stated.value
    if bracketed := _IN_BRACKETS.fullmatch(value):
        value = (bracketed[1] or bracketed[2] or "").strip()
    if based := _BASED.fullmatch(value):
        return bool(_same_based(based.group(), gold.value, number))
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


def _same_scalar(answer: str, theirs: Statement, gold: str) -> bool:
    """Compare one expression that is not a number, or one equation."""
    try:
        ours = read_statement(answer, labels=not theirs.names)
    except WrongForm:
        if "=" not in gold:
            raise
        return same_expression(answer, gold)  # two equations
    if "=" in gold and not theirs.names:
        return same_expression(answer, gold)
    value = ours.value
    if ours.names and theirs.names and ours.names != theirs.names:
        variables = _arguments(ours.names[0], theirs.names[0])
        if variables is None:
            return same_expression(answer, gold)
        value = _renamed(value, *variables)
    if read_structure(value) is not None:
        raise WrongForm("the answer has several values, the gold answer has one")
    value, unit = split_unit(MEMBER.sub("", value) if theirs.value == "\\emptyset" else value)
    expected, gold_unit = split_unit(theirs.value)
    if not compatible(unit, gold_unit) or (unit.known == "degree" and not gold_unit.known and "\\pi" in expected):
        return False
    number = read_quantity(value)
    if number is not None and number.unit == NO_UNIT:
        value = _as_fraction(number)  # exactly: a decimal is not an irrational number
    return value == expected or same_expression(value, expected)


def _arguments(ours: str, theirs: str) -> tuple[str, str] | None:
    """Return the variables of "f(t)" and "f(x)"; None if these are not values of one function at a variable."""
    (function, _, variable), (expected, _, argument) = (name.partition("(") for name in (ours, theirs))
    named = is_function_value(ours) and is_function_value(theirs) and function == expected
    both = (variable.removesuffix(")"), argument.removesuffix(")"))
    return both if named and all(map(VARIABLE.fullmatch, both)) else None


def _renamed(text: str, name: str, new: str) -> str:
    return _SYMBOL.sub(lambda symbol: new if symbol.group() == name else symbol.group(), text)


def _with_same_parameter(answer: str, gold: str) -> tuple[str, str]:
    r"""Name the integer parameter of "\frac{\pi}{4} + n\pi, n \in \mathbb{Z}" as in the gold answer, if it has one."""
    expected, theirs = _parameter(gold, "\\pi" in gold or "degrees" in gold)
    if theirs is None:
        return answer, gold
    text, ours = _parameter(answer, True)
    if ours is None or (ours != theirs and theirs in _SYMBOL.findall(text)):
        return text, expected
    return _renamed(text, ours, theirs), expected


@lru_cache(CACHE_SIZE)
def _parameter(text: str, undeclared: bool) -> tuple[str, str | None]:
    declared = _PARAMETER.search(text)
    if declared:
        return text[: declared.start()], declared["name"] or declared["other"]
    letters = set(_UNDECLARED.findall(text)) if undeclared else set()
    return text, letters.pop() if len(letters) == 1 else None


@dataclass(frozen=True, slots=True)
class Parts:
    """The values of a structure. `names`: of the coordinates of a tuple, or of the one variable with these values."""

    structure: Structure
    names: tuple[str, ...] = ()

    def same(self, answer: Parts | None, strict: bool) -> bool:
        """Return whether an answer has the same parts as this gold answer."""
        if answer is None:
            return False
        ours = answer.structure
        if self.names and answer.names and self.names != answer.names:
            if variables := _arguments(answer.names[0], self.names[0]):
                ours = Structure(ours.kind, tuple(_renamed(part, *variables) for part in ours.parts))
            elif sorted(self.names) == sorted(answer.names) and len(ours.parts) == len(self.names):
                values = dict(zip(answer.names, ours.parts, strict=True))
                ours = Structure(ours.kind, tuple(values[name] for name in self.names))
            else:
                return False
        return same_structure(ours, self.structure, partial(_same_part, strict=strict))


@lru_cache(CACHE_SIZE)
def _read_parts(text: str) -> Parts | None:
    """Parse several values, with or without names: "(p, q) = (3, 2)", "x = 1 or x = 2", "x = 1, y = 2"."""
    if "=" in text and len(list_items(text)) == 1 and not text.startswith("\\begin"):
        stated = _read_part(text)
        structure = read_structure(stated.value)
        return Parts(structure, stated.names) if structure and stated.value != text else None
    structure = read_structure(text)
    if structure is None or structure.kind != "list" or not any("=" in part for part in structure.parts):
        return Parts(structure) if structure else None
    stated_parts = [_read_part(part) for part in structure.parts]
    names = {part.names for part in stated_parts if part.names}
    values = tuple(part.value for part in stated_parts)
    if len(names) < 2:
        return Parts(Structure("list", values), next(iter(names), ()))
    if len(names) < len(values) or _ONE_OF.search(text):
        return None if all(part.names for part in stated_parts) else Parts(structure)
    assigned = [("".join(part.names), part.value) for part in stated_parts]
    if "".join(sorted(name for name, _ in assigned)) in _ALPHABET:
        assigned.sort()  # "y = 2, x = 1" is the point (1, 2)
    return Parts(Structure("()", tuple(value for _, value in assigned)), tuple(name for name, _ in assigned))


def _read_part(part: str) -> Statement:
    try:
        return read_statement(part, labels=False)
    except WrongForm:
        return Statement(part)


def _is_words(text: str, least: int) -> bool:
    """Return whether a text is words, one with `least` letters or more; "p - q" and "xy" are algebra."""
    is_text = _WORDS.fullmatch(text) is not None and " - " not in text
    return is_text and re.search(rf"[A-Za-z]{{{least}}}", text) is not None


def _same_text(answer: str, gold: str) -> bool:
    is_choice = _CHOICE.fullmatch(gold) is not None
    if (ours := _TIME.fullmatch(answer)) and (theirs := _TIME.fullmatch(gold)):
        answer, gold = (f"{time[1]} {time[2].lower()}" for time in (ours, theirs))
    any_case = is_choice or _is_words(gold, 3) or gold.lower() == "no"
    if any_case:
        answer = _BEFORE_TEXT.sub("", answer, count=1) if _BEFORE_TEXT.match(answer) else answer
    answer, gold = (
        _EXTRA_SPACE.sub("", _CHOICE.sub(r"\1", text) if _CHOICE.fullmatch(text) else text) for text in (answer, gold)
    )
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
    if ours is None and "=" in answer:
        return bool(_same_based(read_statement(answer).value, gold, number))
    digits = ours["digits"] if ours else answer
    return digits.casefold() == theirs["digits"].casefold() and (ours is None or _base(ours) == _base(theirs))


def _base(based: re.Match[str]) -> int:
    return _BASES.index(based["base"]) if based["base"] in _BASES else int(based["base"])
