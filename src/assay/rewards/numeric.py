r"""Parse a number exactly: sign, separators, currency, percent, fractions, powers of ten, and the unit after it.

Values are fractions: 0.33 is not 1/3. In the words after a number, a unit leaves the value unchanged and a scale such
as "million" multiplies it; other words are rejected.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

MAX_ANSWER_CHARS = 2_000  # of an extracted answer
MAX_DIGITS = 400  # of one number
MAX_EXPONENT = 400  # in scientific notation


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TAIL = re.compile(
    r"(?P<first>%|[A-Za-z$€£¥₹][A-Za-z'.\-]*)(?P<rest>(?:\s?(?: |/|\\cdot )\s?[A-Za-z][A-Za-z'.\-]*){0,7})"
    r"(?:\s?\^\s?\{?(?:(?P<power>[23])|-[123])\}?)?"
)
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*([a-z]{1,12})\s*\}\s*\{\s*([a-z]{1,12}\s?(?:\^\s?\{?[23]\}?)?)\s*\}")
_PART = re.compile(r"[a-z$€£¥₹%¢]+")

_SCALES = {"dozen": 12, "dozens": 12, "thousand": 10**3, "trillion": 10**12}
_SCALES |= {"million": 10**6, "mn": 10**6, "billion": 10**9, "bn": 10**9}
_ADJACENT_SCALES = {"k": 10**3, "K": 10**3, "M": 10**6, "mn": 10**6, "bn": 10**9}  # 42k and 42M, but 42 m is a length
_NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion "
    "hundreds thousands millions billions trillions tens zillion dozen dozens"
)
# As the first word after a number, these change its value or start an expression.
_NOT_A_UNIT = _words(
    "pi sqrt root sin cos tan log ln exp squared cubed times over and to by of point mod choose third thirds "
    "fourth fourths fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths hundredth "
    "hundredths thousandth thousandths millionth millionths infinity mil mio mln tn kilo mega giga lakh lakhs "
    "crore crores score scores gross"
)
# Anywhere after a number, these negate it, change its value or state an alternative.
_ALTERS = _words(
    "or nor if unless either neither than below under above negative minus plus times divided multiplied factorial "
    "is isn are aren was wasn were be not no none never nothing but except without maybe perhaps possibly probably "
    "wrong incorrect false wait actually instead rather versus vs half halves halved quarter quarters doubled tripled "
    "quadrupled twice thrice reciprocal inverse inverted negated reversed modulo mille permille"
)
_PERCENT = _words("% percent percents percentage pct")
_ORDINALS = _words("st nd rd th")
_DIMENSIONS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
# Synonyms, separated by commas; the first one stands for all.
_SYNONYMS = (
    "dollar $ dollars usd us$ bucks, cent ¢ cents, euro € euros eur, £ gbp, mm millimeter millimeters millimetre "
    "millimetres, cm centimeter centimeters centimetre centimetres, m meter meters metre metres, km kilometer "
    "kilometers kilometre kilometres, inch in inches, foot ft feet, yard yd yards, mile mi miles, mg milligram "
    "milligrams, g gram grams, kg kilogram kilograms kgs, ml milliliter milliliters millilitre millilitres, l liter "
    "liters litre litres, second s sec secs seconds, minute min mins minutes, hour h hr hrs hours, day d days, week "
    "weeks, month months, year yr yrs years, degree degrees deg, radian radians rad, celsius, fahrenheit"
)
KNOWN_UNITS = {word: words.split()[0] for words in _SYNONYMS.split(", ") for word in words.split()}
_VARIABLE = re.compile(rf"(?![a{''.join(word for word in KNOWN_UNITS if len(word) == 1)}])[a-z]")
_LONG_UNITS = sorted((word for word in KNOWN_UNITS if len(word) > 1 and word.isalpha()), key=len, reverse=True)
_UNIT_WORD = "|".join([*_LONG_UNITS, "units?", *_DIMENSIONS, "per"])
# Without a number before it, "m" or "s" may be a variable: only longer units are removed from an expression.
_EXPRESSION_UNIT = re.compile(
    rf"(?<=[0-9}})a-z])\s+(?:(?:{_UNIT_WORD})(?:\s?[ /]\s?|$|(?=\s?\^)))+(?:\s?\^\s?\{{?[23]\}}?)?$"
)


class Unreadable(Exception):
    """There is an answer, but it cannot be parsed or exceeds a limit. The message is one line."""


class UnreadableGold(Exception):
    """The gold answer cannot be read, so the answer cannot be judged."""


class WrongForm(Exception):
    """The answer can be read, but its form differs from the form of the gold answer, so it is wrong."""


@dataclass(frozen=True, slots=True)
class Unit:
    """The text after a number: a factor, known units, their power (0: not stated), and whether it is a percentage."""

    scale: int = 1
    known: str = ""
    power: int = 0
    percent: bool = False


NO_UNIT = Unit()


def read_unit(tail: str) -> Unit | None:
    """Parse the text after a number; None if it is not a unit or changes the number."""
    if not tail.strip():
        return NO_UNIT
    matched = _TAIL.fullmatch(_UNIT_FRACTION.sub(r" \1/\2", tail).strip())
    if matched is None:
        return None
    adjacent = not tail[0].isspace()
    first = matched["first"].rstrip(".")
    if adjacent and first in _ADJACENT_SCALES and not matched["rest"]:
        return Unit(scale=_ADJACENT_SCALES[first])
    words = [first.lower(), *matched["rest"].lower().replace("\\cdot", " ").replace("/", " ").split()]
    if not keeps_the_number(words) or any(_VARIABLE.fullmatch(word) for word in words[1:]):
        return None
    if words[0] in _PERCENT:
        altered = matched["power"] or (words[1:] and words[1] in _NOT_A_UNIT | _NUMBER_WORDS and words[1] != "of")
        return None if altered else Unit(percent=True)
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
    """Return whether a word can start a unit: "5x" and "5 y" are algebra, "42 K" is not a count."""
    if adjacent and word.lower() in _ORDINALS:
        return True
    if word.lower() in KNOWN_UNITS:
        return len(word) > 1 or word == "L" or not word.isupper()
    return not adjacent and len(word) > 1


def split_unit(expression: str) -> tuple[str, Unit]:
    r"""Split a known unit from the end of an expression such as "6\sqrt{2} cm"."""
    matched = _EXPRESSION_UNIT.search(expression)
    unit = read_unit(" " + matched.group()) if matched else None
    return (expression[: matched.start()], unit) if matched and unit else (expression, NO_UNIT)


CACHE_SIZE = 1024  # texts: all samples of a prompt share a gold answer and have few distinct answers
_LOOKALIKES = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2014\u2010\u2011\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u2002\u2003\u3000\t\n\r\f\v", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
    | {chr(0xFF10 + i): str(i) for i in range(10)}
    | {"\uff0c": ",", "\uff0e": ".", "\uff04": "$", "\uff05": "%", "\u2044": "/", "\u2019": "'"}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "×": "\\times ", "÷": "\\div ", "π": "\\pi ", "·": "\\cdot "}
    | {"±": "\\pm ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\neq ", "≈": "\\approx ", "∞": "\\infty "}
    | {"∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "ℝ": "\\mathbb{R}", "²": "^{2}", "³": "^{3}"}
)
_WRAPPERS = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|emph|boxed|fbox|ensuremath)\s*\{"
)
_WRAPPER = re.compile(_WRAPPERS + r"([^{}]*)\}")
_WRAPPED = re.compile(rf"(?:{_WRAPPERS}|\{{)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?:s)?(?![A-Za-z])|°")
_TIGHT_COMMA = re.compile(r",\\!\s*")  # 11,\! 111 is one number, 11, 111 are two
_NOISE = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|therefore|large|Large|huge|Huge|small|tiny|normalsize)(?![A-Za-z])|\\!"
)
_STYLED_FRACTION = re.compile(r"\\[dtc]frac")
_SYNONYM = re.compile(
    r"\\(?:(?P<le>leq(?:slant)?)|(?P<ge>geq(?:slant)?)|(?P<lt>lt)|(?P<gt>gt)|(?P<neq>ne)|(?P<setminus>backslash)"
    r"|(?P<emptyset>varnothing)|(?P<ldots>dots|cdots)|(?P<colon>colon)|(?P<langle>langle)|(?P<rangle>rangle))(?![A-Za-z])"
    r"|(?P<at_least>>=)|(?P<at_most><=)|(?P<unequal>!=)|(?P<empty>\\\{\s*\\\})|(?P<dots>\.\.\.)"
)
_SPELLING = {"lt": "<", "gt": ">", "colon": ":", "langle": "(", "rangle": ")", "at_least": "\\ge ", "at_most": "\\le "}
_SPELLING |= {"unequal": "\\neq ", "empty": "\\emptyset ", "dots": "\\ldots "}
_NUMBER_SETS = re.compile(r"\\mathbb\s*([A-Z])")
_TEMPERATURE = re.compile(r"degrees\s+(?:(C)|F)(?![A-Za-z])")
_DEGREES_OF_FUNCTION = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc))\s*\(?\s*([0-9]+) degrees\s*\)?")
_REPEATING = re.compile(r"(?<![0-9.,])([0-9]{0,20})\.([0-9]{0,20})\\(?:overline|bar)\s*\{([0-9]{1,20})\}")
_LATEX = re.compile(r"[\\{~°<>!]|\.\.\.")
_BRACED_SIGN = re.compile(r"(?<=[0-9])\{([.:])\}(?=[0-9])")
_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|$)|\\q?quad(?![A-Za-z])|\\hspace\s*\{[^{}]*\}|~")
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
    """A number with its unit. `quotient` is "whole" for a division such as 3/4, "decimal" for 1.5/2, else empty."""

    value: Fraction
    unit: Unit = NO_UNIT
    quotient: str = ""

    def same(self, gold: Quantity) -> bool:
        """Return whether the values are equal in compatible units."""
        return compatible(self.unit, gold.unit) and self._read_as(gold) == gold.value

    def evaluated(self, gold: Quantity) -> bool:
        """Return whether no division is left to do: 84/2 is not evaluated to 42, but 1/2 is accepted for 0.5."""
        return not self.quotient or (self.quotient == "whole" and gold.value.denominator != 1)

    def _read_as(self, gold: Quantity) -> Fraction:
        """Return the value; the gold answer decides whether a percent sign divides by 100.

        "50%" is 1/2 if the gold answer is a fraction or below 1, and 50 if it is another number, as in answers to "what
        percentage ...?". If the gold answer has the percent sign too, the numbers are compared as written.
        """
        divides = self.unit.percent and not gold.unit.percent and (gold.quotient or abs(gold.value) < 1)
        return self.value / 100 if divides else self.value


def compatible(ours: Unit, theirs: Unit) -> bool:
    """Return whether units agree: they are compared only if both sides have known ones."""
    mine, others = ours.known.split(), theirs.known.split()
    if not mine or not others:
        return True
    powers = {ours.power, theirs.power} - {0}
    return (_is_subsequence(mine, others) or _is_subsequence(others, mine)) and len(powers) < 2


def _is_subsequence(words: list[str], longer: list[str]) -> bool:
    rest = iter(longer)
    return all(word in rest for word in words)


@lru_cache(CACHE_SIZE)
def tidy(text: str) -> str:
    """Remove what only concerns typography: delimiters, spacing commands, font wrappers, lookalike characters."""
    text = text.translate(_LOOKALIKES)
    if _LATEX.search(text):
        text = _in_common_spelling(text)
    text = _unwrap(" ".join(text.split()))
    if "degrees" in text:
        text = _TEMPERATURE.sub(lambda scale: f"degrees {'celsius' if scale[1] else 'fahrenheit'}", text)
        text = _DEGREES_OF_FUNCTION.sub(r"\1(\\frac{\2\\pi}{180})", text)
    lead_in = _LEAD_IN.match(text)
    return _unwrap(text[lead_in.end() :]) if lead_in else text


def _in_common_spelling(text: str) -> str:
    """Remove commands for spaces, sizes and fonts, and replace synonyms by one command."""
    text = _NOISE.sub("", _TIGHT_COMMA.sub(",", text))
    text = _SPACE.sub(" ", text)
    text = text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\#", "#")
    text = _STYLED_FRACTION.sub(r"\\frac", _BRACED_SIGN.sub(r"\1", text))
    text = _SYNONYM.sub(_common_spelling, _NUMBER_SETS.sub(r"\\mathbb{\1}", text))
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _DEGREES.sub(" degrees ", text)
    for _ in range(3):  # wrappers may be nested
        text, replaced = _WRAPPER.subn(r" \1 ", text)
        if not replaced:
            break
    return text


def _common_spelling(command: re.Match[str]) -> str:
    name = command.lastgroup or ""
    return _SPELLING.get(name) or f"\\{name} "


def _repeating_decimal(decimal: re.Match[str]) -> str:
    r"""Convert "0.1\overline{6}" to a fraction."""
    fixed, period = decimal[1] + decimal[2], decimal[3]
    top = int(fixed + period) - int(fixed or "0")
    return f"\\frac{{{top}}}{{{(10 ** len(period) - 1) * 10 ** len(decimal[2])}}}"


def _unwrap(text: str) -> str:
    """Remove delimiters around the whole text, and the full stop of a sentence."""
    for _ in range(8):
        before = text
        text = text.strip().rstrip(".,;").strip()
        for opening, closing in _DELIMITERS:
            if len(text) > len(opening) + len(closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
        wrapped = _WRAPPED.match(text)
        if wrapped and closing_brace(text, wrapped.end()) == len(text) - 1:
            text = text[wrapped.end() : -1]
        if text == before:
            break
    return text


def nesting_depth(text: str, opening: str = "(", closing: str = ")") -> int:
    """Return how deeply brackets are nested; kinds of brackets are not distinguished."""
    return max(accumulate((character in opening) - (character in closing) for character in text), default=0)


def closing_brace(text: str, start: int, end: int = sys.maxsize) -> int:
    """Return the position of the brace that closes the content at `start`; -1 if there is none before `end`."""
    depth = 1
    for brace in _BRACE.finditer(text, start, end):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return -1


@lru_cache(CACHE_SIZE)
def read_quantity(text: str) -> Quantity | None:
    """Parse a tidied text as a number with a unit; None if it is not one. Raises Unreadable if it is too large."""
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
    """Return `Quantity.quotient`. A mixed number, and a fraction of a million or of a percentage, are not divisions."""
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
        part = _ratio(top, bottom)
        proper = part < 1 and not (number["top_sign"] or number["bottom_sign"])
        return _exact(whole) + part if proper else None
    if top:
        ratio = _ratio(top, bottom)
        return ratio if (number["top_sign"] == "-") == (number["bottom_sign"] == "-") else -ratio
    if number["over"]:
        return _ratio(number["over"], number["under"])
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


def _ratio(top: str, bottom: str) -> Fraction:
    try:
        return _exact(top) / _exact(bottom)
    except ZeroDivisionError:
        raise Unreadable("division by zero") from None
