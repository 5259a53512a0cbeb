r"""Reading one number exactly: signs, separators, currency, percent, fractions, powers of ten, a unit after it.

Values are fractions, so 0.1 + 0.2 style surprises do not exist and 0.33 is not 1/3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from assay.rewards.limits import MAX_ANSWER_CHARS, MAX_DIGITS, MAX_EXPONENT, Unreadable
from assay.rewards.units import KNOWN_UNITS, NO_UNIT, Unit, read_unit

REMEMBERED = 1024  # texts: all samples of a prompt have one gold answer, and few different answers
_LOOKALIKES = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u2002\u2003\u3000\t\n\r\f\v", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
    | {chr(0xFF10 + i): str(i) for i in range(10)}
    | {"\uff0c": ",", "\uff0e": ".", "\uff04": "$", "\uff05": "%", "\u2044": "/", "\u2019": "'"}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "×": "\\times ", "÷": "\\div ", "π": "\\pi ", "·": "\\cdot "}
    | {"±": "\\pm ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∞": "\\infty "}
    | {"∪": "\\cup ", "∈": "\\in ", "²": "^{2}", "³": "^{3}"}
)
_WRAPPERS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname|emph|boxed|fbox)\s*\{"
_WRAPPER = re.compile(_WRAPPERS + r"([^{}]*)\}")
_WRAPPED = re.compile(rf"(?:{_WRAPPERS}|\{{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?:s)?(?![A-Za-z])|°")
_TIGHT_COMMA = re.compile(r",\\!\s*")  # 11,\! 111 is one number, 11, 111 are two
_NOISE = re.compile(r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\displaystyle(?![A-Za-z])|\\!")
_SLANTED = re.compile(r"\\([lg]eq)slant(?![A-Za-z])")
_REPEATING = re.compile(r"(?<![0-9.,])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar)\s*\{([0-9]{1,20})\}")
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~")
_LEAD_IN = re.compile(r"(?:(?:the )?(?:final )?answer\b(?: is\b)?\s*[:=]?|=)\s*(?=\S)", re.IGNORECASE)
_DELIMITERS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?:\s[0-9]{3})+)(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_TOP = rf"(?:\{{\s*(?P<top_sign>[-+])?\s*(?P<top>{_DECIMAL})\s*\}}|\s*(?P<top_digit>[0-9]))"
_BOTTOM = _TOP.replace("top", "bottom")
_NUMBER = re.compile(
    rf"""(?P<sign>[-+])?\s*(?P<currency>(?:US)?\$|[€£¥₹]|(?:USD|EUR|GBP|Rs\.?)(?=\s?[-+0-9.]))?\s*(?P<inner>[-+])?\s*
    (?:
      (?:(?P<whole>{_DIGITS})\s*)?\\frac\s*{_TOP}\s*{_BOTTOM}
    | (?P<mixed>{_DIGITS})\s(?P<mixed_top>[0-9]+)\s?/\s?(?P<mixed_bottom>[0-9]+)
    | (?P<over>{_DECIMAL})\s?/\s?(?P<under>{_DECIMAL})
    | (?P<mantissa>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]+)
        |\s?(?:\\times|\\cdot|\*|x)\s?10\s?(?:\^|\*\*)\s?\{{?(?P<power>[-+]?[0-9]+)\}}?)
    | 10\s?(?:\^|\*\*)\s?\{{?(?P<power_of_ten>[-+]?[0-9]+)\}}?
    | (?P<plain>{_DECIMAL})
    )""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with its unit. `quotient` says how a division was written, if it is one: "whole" (3/4) or "decimal"."""

    value: Fraction
    unit: Unit = NO_UNIT
    quotient: str = ""

    def same(self, gold: Quantity) -> bool:
        """Equal values in compatible units."""
        return _compatible(self.unit, gold.unit) and self._read_as(gold) == gold.value

    def worked_out(self, gold: Quantity) -> bool:
        """Whether no division is left to do: 84/2 is not 42 yet, but 1/2 may stand for 0.5."""
        return not self.quotient or (self.quotient == "whole" and gold.value.denominator != 1)

    def _read_as(self, gold: Quantity) -> Fraction:
        """The value; whether a percent sign divides by 100 is decided by how the gold answer is written.

        "50%" is 1/2 where the gold answer is a fraction or below 1, and 50 where it is another number, as in the
        answers of "what percentage ...?". Where the gold answer has the sign, the number of percent counts.
        """
        divides = self.unit.percent and not gold.unit.percent and (gold.quotient or abs(gold.value) < 1)
        return self.value / 100 if divides else self.value


def _compatible(ours: Unit, theirs: Unit) -> bool:
    """Units matter only if both sides have known ones: then one side's must be among the other's, with one power."""
    mine, others = set(ours.known.split()), set(theirs.known.split())
    if not mine or not others:
        return True
    powers = {ours.power, theirs.power} - {0}
    return (mine <= others or others <= mine) and len(powers) < 2


@lru_cache(REMEMBERED)
def tidy(text: str) -> str:
    """The same answer without what only concerns its looks: delimiters, spacing commands, font wrappers, lookalikes."""
    text = text.translate(_LOOKALIKES)
    text = _NOISE.sub("", _TIGHT_COMMA.sub(",", text))
    text = _SPACE.sub(" ", text)
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\#", "#")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\cfrac", "\\frac")
    text = _SLANTED.sub(r"\\\1", text)
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _DEGREES.sub(" degrees ", text)
    for _ in range(3):  # wrappers may wrap wrappers
        text, replaced = _WRAPPER.subn(r" \1 ", text)
        if not replaced:
            break
    text = _unwrap(" ".join(text.split()))
    lead_in = _LEAD_IN.match(text)
    return _unwrap(text[lead_in.end() :]) if lead_in else text


def _repeating_decimal(found: re.Match[str]) -> str:
    r"""The fraction that "0.1\overline{6}" is."""
    fixed, period = found[1] + found[2], found[3]
    top = int(fixed + period) - int(fixed or "0")
    return f"\\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(found[2])}}}"


def _unwrap(text: str) -> str:
    """Strip delimiters around the whole, and the full stop of a sentence."""
    for _ in range(8):
        before = text
        text = text.strip().rstrip(".,;").strip()
        for opening, closing in _DELIMITERS:
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
        wrapped = _WRAPPED.match(text)
        if wrapped and _closing(text, wrapped.end()) == len(text) - 1:
            text = text[wrapped.end() : -1]
        if text == before:
            break
    return text


def _closing(text: str, start: int) -> int:
    """Where the brace is closed whose content begins at `start`; -1 if it is not."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return -1


@lru_cache(REMEMBERED)
def read_quantity(text: str) -> Quantity | None:
    """The number that a tidied text is, with its unit; None if it is something else; Unreadable if it is too much."""
    if len(text) > MAX_ANSWER_CHARS:
        raise Unreadable(f"the answer is longer than {MAX_ANSWER_CHARS} characters")
    number = _NUMBER.match(text)
    if number is None:
        return None
    unit = read_unit(text[number.end() :])
    if unit is None:
        return None
    value = _value(number)
    if value is None:
        return None
    signs = [sign for sign in (number["sign"], number["inner"]) if sign]
    if len(signs) > 1 or (signs and "-" in (number["top_sign"], number["bottom_sign"])):
        return None  # "--18" is not a number, and neither is -\frac{-1}{2}
    currency = (number["currency"] or "").strip().rstrip(".").lower()
    if currency and not unit.known:
        unit = replace(unit, known=KNOWN_UNITS.get(currency, ""))
    return Quantity((-value if signs == ["-"] else value) * unit.scale, unit, _quotient(number, unit))


def _quotient(number: re.Match[str], unit: Unit) -> str:
    """How a division is written. A mixed number, and a fraction of a million or of a percentage, are not divisions."""
    terms = [number[name] for name in ("top", "top_digit", "bottom", "bottom_digit", "over", "under") if number[name]]
    if not terms or number["whole"] or number["mixed"] or unit.scale != 1 or unit.percent:
        return ""
    return "decimal" if any("." in term for term in terms) else "whole"


def _value(number: re.Match[str]) -> Fraction | None:
    top, bottom = number["top"] or number["top_digit"], number["bottom"] or number["bottom_digit"]
    whole = number["whole"] or number["mixed"]
    if number["mixed"]:
        top, bottom = number["mixed_top"], number["mixed_bottom"]
    if top and whole:
        part = _ratio(_exact(top), _exact(bottom))
        proper = part < 1 and not (number["top_sign"] or number["bottom_sign"])
        return _exact(whole) + part if proper else None
    if top:
        ratio = _ratio(_exact(top), _exact(bottom))
        return ratio if (number["top_sign"] == "-") == (number["bottom_sign"] == "-") else -ratio
    if number["over"]:
        return _ratio(_exact(number["over"]), _exact(number["under"]))
    power = number["exponent"] or number["power"] or number["power_of_ten"]
    if power:
        if len(power) > 5 or abs(int(power)) > MAX_EXPONENT:
            raise Unreadable("the exponent is too large")
        return _exact(number["mantissa"] or "1") * Fraction(10) ** int(power)
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
