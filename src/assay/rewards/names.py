r"""Sides of an equation that name a value: a variable, a function value, a measured object, words.

"x = 5", "f(1) = 5", "|AB| = 5" and "Number of ways = 5" state the value 5; "2x = 5" and "twice the number = 5" do not.
"""

from __future__ import annotations

import re

from assay.rewards.numeric import keeps_the_number
from assay.rewards.structure import encloses

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
