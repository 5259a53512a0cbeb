r"""Reading one number exactly: signs, separators, currency, percent, fractions, powers of ten, a unit after it.

Values are fractions, so 0.1 + 0.2 style surprises do not exist and 0.33 is not 1/3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from assay.rewards.limits import MAX_ANSWER_CHARS, MAX_DIGITS, MAX_EXPONENT, Unreadable

REMEMBERED = 1024  # texts: all samples of a prompt have one gold answer, and few different answers
_LOOKALIKES = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u2002\u2003\u3000\t\n\r\f\v", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
    | {chr(0xFF10 + i): str(i) for i in range(10)}
    | {"\uff0c": ",", "\uff0e": ".", "\uff04": "$", "\uff05": "%", "\u2044": "/", "\u2019": "'"}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "×": "\\times ", "÷": "\\div ", "π": "\\pi ", "·": "\\cdot "}
)
_WRAPPER = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|emph|boxed|fbox)\s*\{([^{}]*)\}"
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?:s)?(?![A-Za-z])|°")
_TIGHT_COMMA = re.compile(r",\\!\s*")  # 11,\! 111 is one number, 11, 111 are two
_NOISE = re.compile(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\displaystyle(?![A-Za-z])|\\!")
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~")
_LEAD_IN = re.compile(r"(?:(?:the )?(?:final )?answer\b(?: is\b)?\s*[:=]?|=)\s*(?=\S)", re.IGNORECASE)
_DELIMITERS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:\s[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_ARGUMENT = rf"(?:\{{\s*([-+]?\s*{_DECIMAL})\s*\}}|\s*([0-9]))"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+])?\s*(?P<currency>(?:US)?\$|[€£¥₹]|(?:USD|EUR|GBP|Rs\.?)(?=\s?[-+0-9.]))?\s*(?P<inner>[-+])?\s*
    (?:
      (?:(?P<whole>{_DIGITS})\s*)?\\frac\s*{_ARGUMENT}\s*{_ARGUMENT}
    | (?P<mixed>{_DIGITS})\s(?P<top>[0-9]+)\s?/\s?(?P<bottom>[0-9]+)
    | (?P<over>{_DECIMAL})\s?/\s?(?P<under>{_DECIMAL})
    | (?P<mantissa>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]+)
        |\s?(?:\\times|\\cdot|\*|x)\s?10\s?(?:\^|\*\*)\s?\{{?(?P<power>[-+]?[0-9]+)\}}?)
    | (?P<plain>{_DECIMAL})
    )""",
    re.VERBOSE,
)
_UNIT = re.compile(
    r"(%|[A-Za-z$€£¥₹][A-Za-z'.\-]*)((?:\s?[ /]\s?[A-Za-z][A-Za-z'.\-]*){0,7})(?:\s?\^\s?\{?[23]\}?|[²³])?"
)

_SCALES = {"dozen": 12, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words that make the number before them something else than itself.
_NOT_A_UNIT = (
    "pi sqrt root sin cos tan log ln exp squared cubed times plus minus over and or to by of point mod choose hundred "
    "half halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths eighth "
    "eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths millionth millionths infinity "
    "tens hundreds thousands millions billions zillion"
)
_NOT_UNITS = frozenset(_NOT_A_UNIT.split())
# Words that turn an answer into another one, or into two, wherever they stand behind the number.
_HEDGED = "or if unless either than below negative minus plus times divided factorial"
_HEDGES = frozenset(_HEDGED.split())
_PERCENT = frozenset({"%", "percent", "percents", "percentage", "pct"})
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
_KNOWN_UNITS = {word: unit for unit, words in _SYNONYMS.items() for word in words.split()}


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number, the known units with it ("" or e.g. "mile hour"), and whether it is a percentage."""

    value: Fraction
    unit: str = ""
    percent: bool = False

    def same(self, gold: Quantity) -> bool:
        """Equal values; units only matter if both have known ones and neither side's are among the other's.

        With a percent sign on one side alone, both readings count: "50%" equals "50" (percent asked for) and "0.5".
        """
        ours, theirs = set(self.unit.split()), set(gold.unit.split())
        if not (ours <= theirs or theirs <= ours):
            return False
        if self.value == gold.value:
            return True
        if self.percent == gold.percent:
            return False
        return self.value == gold.value * 100 if self.percent else self.value * 100 == gold.value


@lru_cache(REMEMBERED)
def tidy(text: str) -> str:
    """The same answer without what only concerns its looks: delimiters, spacing commands, font wrappers, lookalikes."""
    text = text.translate(_LOOKALIKES)
    text = _NOISE.sub("", _TIGHT_COMMA.sub(",", text))
    text = _SPACE.sub(" ", text)
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\#", "#")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _DEGREES.sub(" degrees ", text)
    for _ in range(3):  # wrappers may wrap wrappers
        text, replaced = _WRAPPER.subn(r" \1 ", text)
        if not replaced:
            break
    text = _unwrap(" ".join(text.split()))
    lead_in = _LEAD_IN.match(text)
    return _unwrap(text[lead_in.end() :]) if lead_in else text


def _unwrap(text: str) -> str:
    """Strip delimiters around the whole, and the full stop of a sentence."""
    for _ in range(8):
        before = text
        text = text.strip().rstrip(".,;").strip()
        for opening, closing in _DELIMITERS:
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
        if text == before:
            break
    return text


@lru_cache(REMEMBERED)
def read_quantity(text: str) -> Quantity | None:
    """The number that a tidied text is, with its unit; None if it is something else; Unreadable if it is too much."""
    if len(text) > MAX_ANSWER_CHARS:
        raise Unreadable(f"the answer is longer than {MAX_ANSWER_CHARS} characters")
    number = _NUMBER.match(text)
    if number is None or (number["sign"] and number["inner"]):
        return None
    tail = _read_tail(text[number.end() :])
    if tail is None:
        return None
    scale, unit, percent = tail
    value = _value(number) * scale
    if "-" in (number["sign"], number["inner"]):
        value = -value
    currency = (number["currency"] or "").strip().rstrip(".").lower()
    return Quantity(value, unit or _KNOWN_UNITS.get(currency, ""), percent)


def _value(number: re.Match[str]) -> Fraction:
    top, top_digit, bottom, bottom_digit = number.groups()[4:8]
    if top or top_digit:
        whole = _exact(number["whole"] or "0")
        return whole + _ratio(_exact(top or top_digit), _exact(bottom or bottom_digit))
    if number["mixed"]:
        return _exact(number["mixed"]) + _ratio(_exact(number["top"]), _exact(number["bottom"]))
    if number["over"]:
        return _ratio(_exact(number["over"]), _exact(number["under"]))
    if number["mantissa"]:
        power = number["exponent"] or number["power"]
        if len(power) > 5 or abs(int(power)) > MAX_EXPONENT:
            raise Unreadable("the exponent is too large")
        return _exact(number["mantissa"]) * Fraction(10) ** int(power)
    return _exact(number["plain"])


def _exact(digits: str) -> Fraction:
    digits = digits.replace(",", "").replace(" ", "")
    if len(digits) > MAX_DIGITS:
        raise Unreadable(f"a number has more than {MAX_DIGITS} digits")
    return Fraction(int(digits)) if digits.isdigit() else Fraction(digits)


def _ratio(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise Unreadable("division by zero")
    return top / bottom


def _read_tail(tail: str) -> tuple[int, str, bool] | None:
    """What follows a number: (scale, known unit, percent), or None if it is not just a unit."""
    if not tail.strip():
        return 1, "", False
    adjacent = not tail[0].isspace()
    matched = _UNIT.fullmatch(tail.strip())
    if matched is None:
        return None
    words = [matched[1].lower().rstrip("."), *matched[2].lower().replace("/", " ").split()]
    if any(word.rstrip(".") in _HEDGES for word in words):
        return None
    if words[0] in _SCALES and not adjacent:
        rest = words[1:]
        if any(word in _SCALES or word in _NOT_UNITS for word in rest[:1]):
            return None
        return _SCALES[words[0]], _known(rest), False
    if words[0] in _PERCENT:
        return 1, "", True
    known = _known(words)
    # "5x" and "5 y" are algebra, "3 and 4" are two numbers, "2 pi" is not 2.
    if words[0] in _NOT_UNITS or (words[0] not in _KNOWN_UNITS and (adjacent or len(words[0]) == 1)):
        return None
    return 1, known, False


def _known(words: list[str]) -> str:
    return " ".join(_KNOWN_UNITS[word] for word in words if word in _KNOWN_UNITS)
