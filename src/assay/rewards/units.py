"""The words after a number: a unit leaves the number as it is, a scale multiplies it, anything else is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

_TAIL = re.compile(
    r"(?P<first>%|[A-Za-z$€£¥₹][A-Za-z'.\-]*)(?P<rest>(?:\s?[ /]\s?[A-Za-z][A-Za-z'.\-]*){0,7})"
    r"(?:\s?\^\s?\{?(?P<power>[23])\}?)?"
)
_PART = re.compile(r"[a-z$€£¥₹%¢]+")

_SCALES = {
    "dozen": 12,
    "dozens": 12,
    "thousand": 10**3,
    "million": 10**6,
    "mn": 10**6,
    "billion": 10**9,
    "bn": 10**9,
    "trillion": 10**12,
}
_ADJACENT_SCALES = {"k": 10**3, "K": 10**3, "M": 10**6, "mn": 10**6, "bn": 10**9}  # 42k and 42M, but 42 m is a length
_NUMBER_WORDS_TEXT = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million "
    "billion trillion hundreds thousands millions billions trillions tens zillion dozen dozens"
)
_NUMBER_WORDS = frozenset(_NUMBER_WORDS_TEXT.split())
# As the first word after a number, these make it another number or the start of an expression.
_NOT_A_UNIT_TEXT = (
    "pi sqrt root sin cos tan log ln exp squared cubed times over and to by of point mod choose third thirds "
    "fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth "
    "hundredths thousandth thousandths millionth millionths infinity mil mio mln tn kilo mega giga lakh lakhs "
    "crore crores score scores gross"
)
_NOT_A_UNIT = frozenset(_NOT_A_UNIT_TEXT.split())
# Anywhere after a number, these negate it, change its value or offer an alternative.
_ALTERS_TEXT = (
    "or nor if unless either neither than below under above negative minus plus times divided multiplied "
    "factorial is isn are aren was wasn were be not no none never nothing but except without maybe perhaps "
    "possibly probably wrong incorrect false wait actually instead rather versus vs half halves halved quarter "
    "quarters doubled tripled quadrupled twice thrice reciprocal inverse inverted negated reversed modulo "
    "mille permille"
)
_ALTERS = frozenset(_ALTERS_TEXT.split())
_PERCENT = frozenset({"%", "percent", "percents", "percentage", "pct"})
_ORDINALS = frozenset({"st", "nd", "rd", "th"})
_DIMENSIONS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_SYNONYMS = {
    "dollar": "$ dollar dollars usd us$ bucks",
    "cent": "¢ cent cents",
    "euro": "€ euro euros eur",
    "pound-sterling": "£ gbp",
    "mm": "mm millimeter millimeters millimetre millimetres",
    "cm": "cm centimeter centimeters centimetre centimetres",
    "m": "m meter meters metre metres",
    "km": "km kilometer kilometers kilometre kilometres",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yard yards",
    "mile": "mi mile miles",
    "mg": "mg milligram milligrams",
    "g": "g gram grams",
    "kg": "kg kilogram kilograms kgs",
    "ml": "ml milliliter milliliters millilitre millilitres",
    "l": "l liter liters litre litres",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "d day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "degree": "degree degrees deg",
    "radian": "radian radians rad",
    "celsius": "celsius",
    "fahrenheit": "fahrenheit",
}
KNOWN_UNITS = {word: unit for unit, words in _SYNONYMS.items() for word in words.split()}
_LONG_UNITS = sorted((word for word in KNOWN_UNITS if len(word) > 1 and word.isalpha()), key=len, reverse=True)
_UNIT_WORD = "|".join([*_LONG_UNITS, "units?", *_DIMENSIONS, "per"])
# Without a number before it, "m" or "s" may be a variable: only longer units are taken off an expression.
_EXPRESSION_UNIT = re.compile(
    rf"(?<=[0-9}})a-z])\s+(?:(?:{_UNIT_WORD})(?:\s?[ /]\s?|$|(?=\s?\^)))+(?:\s?\^\s?\{{?[23]\}}?)?$"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """What follows a number: a factor, the known units, their power (0: not stated), and whether it is a percentage."""

    scale: int = 1
    known: str = ""
    power: int = 0
    percent: bool = False


NO_UNIT = Unit()


def read_unit(tail: str) -> Unit | None:
    """The unit that the text after a number is; None if it changes the number or is something else."""
    if not tail.strip():
        return NO_UNIT
    matched = _TAIL.fullmatch(tail.strip())
    if matched is None:
        return None
    adjacent = not tail[0].isspace()
    first = matched["first"].rstrip(".")
    if adjacent and first in _ADJACENT_SCALES and not matched["rest"]:
        return Unit(scale=_ADJACENT_SCALES[first])
    words = [first.lower(), *matched["rest"].lower().replace("/", " ").split()]
    if not keeps_the_number(words):
        return None
    if words[0] in _PERCENT:
        return Unit(percent=True)
    scale = 1
    if words[0] in _SCALES and not adjacent:
        scale, words = _SCALES[words[0]], words[1:]
    elif not _begins_a_unit(first, adjacent):
        return None
    if words and (words[0] in _NUMBER_WORDS or words[0] in _NOT_A_UNIT):
        return None
    power = int(matched["power"] or 0) or max((_DIMENSIONS.get(word, 0) for word in words), default=0)
    known = " ".join(KNOWN_UNITS[word] for word in words if word in KNOWN_UNITS)
    return Unit(scale, known, power)


def keeps_the_number(words: list[str]) -> bool:
    parts = [part for word in words for part in _PART.findall(word)]
    if any(part in _ALTERS for part in parts):
        return False
    if len(words) > 1 and words[-1] in _NUMBER_WORDS:
        return False
    follows_and = {after for before, after in pairwise(parts) if before == "and"}
    return not follows_and & (_NUMBER_WORDS | {"a", "an"})


def _begins_a_unit(word: str, adjacent: bool) -> bool:
    """Whether a word can be the first of a unit: "5x" and "5 y" are algebra, "42 K" is no count of anything."""
    if adjacent and word.lower() in _ORDINALS:
        return True
    if word.lower() in KNOWN_UNITS:
        return len(word) > 1 or word == "L" or not word.isupper()
    return not adjacent and len(word) > 1


def without_unit(expression: str) -> str:
    r"""An expression such as "6\sqrt{2} cm" without the known unit at its end."""
    return _EXPRESSION_UNIT.sub("", expression)
