"""Equality of LaTeX expressions with math-verify, which is imported when first needed: importing sympy is slow.

Expressions are first evaluated at a few points, which is cheap where simplification may take seconds. Expressions that
differ at a point are not equal; equations and inequalities are equal if one is a multiple of the other.

Limits on the size of expressions reject hostile text quickly, and always with the same verdict.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from types import ModuleType
from typing import Any

from assay.rewards.numeric import MAX_DIGITS, Unreadable, UnreadableGold, WrongForm, nesting_depth
from assay.system.sandbox import time_limit_paused

# Sums and the like are not evaluated: the texts up to here must be the same, the rest is compared.
_OPERATOR = re.compile(r"\\(?:sum|prod|int|lim)\s*(?:[_^]\s*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|\w)\s*)+")
_SPACES = re.compile(r"\s+")
_PLAIN_ROOT = re.compile(r"(?:(?<![\\A-Za-z])sqrt|√)\s*\(([^()]*)\)|√\s*([0-9]+|[A-Za-z])")
_PLAIN_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)(?![0-9.])")
# In "5i" math-verify reads i as a variable, in "5 i" as the imaginary unit.
_IMAGINARY = re.compile(r"(?<=[0-9])i(?![A-Za-z])")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)")
_FUNCTIONS = "sqrt sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lg min max gcd lcm"
_PLAIN_NAMES = re.compile(rf"(?<![A-Za-z])(?:{_FUNCTIONS.replace(' ', '|')}|pi)(?![A-Za-z])")
_OTHER_COMMANDS = "frac binom cdot times div pi infty lfloor rfloor lceil rceil"
_COMMANDS = frozenset(f"\\{name}" for name in f"{_FUNCTIONS} {_OTHER_COMMANDS}".split())
_INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
_INDEXED = re.compile(r"[0-9]\s*_")
_CHARACTERS = frozenset("0123456789+-*/^_()[]{}|!.√ ")


@lru_cache(maxsize=1)
def _library() -> ModuleType:
    with time_limit_paused():
        import math_verify

        # It warns that its own time limit is off; the process has one.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        math_verify.verify(_parse(math_verify, "\\boxed{x^2}"), _parse(math_verify, "\\boxed{x^{2}}"), **_NO_LIMIT)
    return math_verify


def cache_bytecode() -> None:
    """Import the library if Python has not cached its bytecode yet. A sandboxed process cannot write the cache, so
    every worker would compile the library again."""
    spec = importlib.util.find_spec("sympy")
    if spec is None or not spec.cached or not spec.origin or sys.dont_write_bytecode or os.path.exists(spec.cached):
        return
    if os.access(sys.pycache_prefix or os.path.dirname(spec.origin), os.W_OK):
        _library()


# Its time limits use signals, which work only in the main thread, and raise a BaseException.
_NO_LIMIT: dict[str, Any] = {"timeout_seconds": None, "raise_on_error": True}


_CANNOT_COMPARE = (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError, LookupError)


def same_expression(answer: str, gold: str) -> bool:
    """Compare two tidied expressions with math-verify. Raises Unreadable if it cannot parse the answer."""
    check_vocabulary(answer, gold)
    check_expression(answer)
    if (ours := _OPERATOR.search(answer)) and (theirs := _OPERATOR.search(gold)):
        same_operator = _SPACES.sub("", answer[: ours.end()]) == _SPACES.sub("", gold[: theirs.end()])
        return same_operator and same_expression(answer[ours.end() :], gold[theirs.end() :])
    check_work(answer)
    library = _library()
    gold_parsed = _parse_gold(gold)
    if not gold_parsed:
        return False  # plain text, which has been compared as text already
    try:
        answer_parsed = _parse(library, _as_box(answer))
        if not answer_parsed:
            raise Unreadable("the answer is not a mathematical expression")
        return _same_parsed(library, answer_parsed[0], gold_parsed[0])
    except (RecursionError, MemoryError, OverflowError) as error:
        raise Unreadable(f"the expression is too large ({type(error).__name__})") from None
    except _CANNOT_COMPARE as error:
        raise Unreadable(f"math-verify cannot compare it ({type(error).__name__})") from None


def _same_parsed(library: ModuleType, answer: Any, gold: Any) -> bool:
    """Compare values at sample points first: that detects most wrong answers without simplifying or solving."""
    from sympy import Eq, Expr

    if isinstance(gold, Eq) and isinstance(gold.lhs, Expr) and gold.lhs.is_Symbol and isinstance(answer, Expr):
        gold = gold.rhs  # "2x + 3" for "y = 2x + 3"
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        if not (gold.free_symbols or answer.free_symbols) and (same := _same_constants(answer, gold)) is not None:
            return same
        return not differ(answer, gold) and bool(library.verify(gold, answer, **_NO_LIMIT))
    same = proportional(answer, gold)
    return bool(library.verify(gold, answer, **_NO_LIMIT)) if same is None else same


def _same_constants(answer: Any, gold: Any) -> bool | None:
    """Compare numbers by their difference, to far more digits than an answer has. None: one is not finite."""
    size, difference = _evaluated(gold), _evaluated(answer - gold)
    if size is None or difference is None:
        return None
    return bool(abs(difference) <= CONSTANT_TOLERANCE * (min(1, abs(size)) or 1))


def _evaluated(constant: Any) -> Any:
    """Return the value of a sympy expression without symbols, to 20 digits or more; None if it is not finite."""
    value = constant.evalf(20, maxn=MAX_RESULT_DIGITS + 200)
    return value if value.is_finite and value.is_number else None


def check_vocabulary(answer: str, gold: str) -> None:
    """Raise WrongForm for words, relations and variables that the gold answer lacks; math-verify would ignore some."""
    if _INEQUALITY.search(gold):
        gold += "<>\\le\\ge"  # sides may be swapped
    known = _COMMANDS | set(_COMMAND.findall(gold))
    for command in _COMMAND.findall(answer):
        if command not in known:
            raise WrongForm(f"{command} is not expected in the answer")
    if _INDEXED.search(answer) and not _INDEXED.search(gold):
        raise WrongForm("a number has an index")
    rest = set(_PLAIN_NAMES.sub("", _COMMAND.sub(" ", answer)))
    unexpected = sorted(rest - _CHARACTERS - {"e", "i"} - set(gold))
    if unexpected:
        raise WrongForm(f"{unexpected[0]!r} is not expected in the answer")


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    try:
        check_expression(gold)
    except Unreadable as error:
        raise UnreadableGold(str(error)) from None
    return _parse(_library(), _as_box(gold))


def real_value(text: str, irrational: bool = False) -> Fraction | None:
    """Return the value of a tidied expression, to `DIGITS` digits; None if it is not a real number.

    `irrational`: None for a rational number too, which should have been evaluated.
    """
    try:
        check_vocabulary(text, "")
        check_expression(text)
        check_work(text)
        parsed = _parse(_library(), _as_box(text))
        if not parsed or parsed[0].free_symbols or (irrational and parsed[0].doit().is_Rational):
            return None
        value = parsed[0].evalf(DIGITS)
        return Fraction(str(value)) if value.is_finite and value.is_extended_real else None
    except (Unreadable, WrongForm, RecursionError, MemoryError, *_CANNOT_COMPARE):
        return None


def _as_box(text: str) -> str:
    """Put the expression in a box, so that math-verify reads all of it instead of choosing a part."""
    text = _PLAIN_ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", text)
    text = _DECIMAL.sub(lambda decimal: f"(\\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}})", text)
    text = _IMAGINARY.sub(" i", text)
    text = _PLAIN_PI.sub(r"\\pi ", text)
    return "\\boxed{" + text.replace("**", "^").replace("*", "\\cdot ") + "}"


def _parse(library: ModuleType, text: str) -> list[Any]:
    # Without the fallback it does not extract a formula from other text; with units kept, "5m" stays algebra.
    default = library.LatexExtractionConfig()
    config = replace(default, try_extract_without_anchor=False, boxed_match_priority=0)
    config = replace(config, normalization_config=replace(default.normalization_config, units=False))
    parsed = library.parse(text, [config], fallback_mode="no_fallback", parsing_timeout=None)
    return [_with_imaginary_unit(part) for part in parsed]


def _with_imaginary_unit(parsed: Any) -> Any:
    """Replace the symbol i, as which math-verify often reads the imaginary unit."""
    from sympy import Expr, I

    letters = [symbol for symbol in parsed.free_symbols if symbol.name == "i"] if isinstance(parsed, Expr) else []
    return parsed.xreplace(dict.fromkeys(letters, I)) if letters else parsed


def verify_whole(completion: str, gold: str) -> tuple[bool | None, str]:
    """Apply math-verify with its own extraction. Returns (equal or None if it found no answer, the parsed answer)."""
    library = _library()
    gold_parsed = library.parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    answer_parsed = library.parse(completion, parsing_timeout=None)
    if not answer_parsed:
        return None, ""
    equal = library.verify(gold_parsed, answer_parsed, timeout_seconds=None)
    return bool(equal), str(answer_parsed[-1])


POINTS = 4
DIGITS = 50
TOLERANCE = 1e-12  # relative
CONSTANT_TOLERANCE = 1e-60  # of numbers, which are compared more exactly


def differ(first: Any, second: Any) -> bool:
    """Return whether two sympy expressions have different values at a sample point."""
    return any(not _close(ours, theirs) for ours, theirs in _values(first, second))


def proportional(first: Any, second: Any) -> bool | None:
    """Return whether two sympy relations are equivalent: same kind, and differences of sides that are proportional.

    None: unknown.
    """
    ours, theirs = _normal(first), _normal(second)
    if ours is None or theirs is None:
        return None
    if ours[0] != theirs[0]:
        return False
    ratios = [left / right for sign in (1, -1) for left, right in _values(ours[1], theirs[1], sign) if right]
    if len(ratios) < 2:
        return None
    is_equation = ours[0] == "Equality"
    return all(_close(ratio, ratios[0]) and (abs(ratio) if is_equation else ratio.real) > TOLERANCE for ratio in ratios)


def _normal(relation: Any) -> tuple[str, Any] | None:
    """Return the kind of a relation, with "greater" turned into "less", and the difference of its sides."""
    kind = type(relation).__name__
    if kind in ("StrictGreaterThan", "GreaterThan"):
        return kind.replace("Greater", "Less"), relation.rhs - relation.lhs
    if kind in ("StrictLessThan", "LessThan", "Equality"):
        return kind, relation.lhs - relation.rhs
    return None


def _values(first: Any, second: Any, sign: int = 1) -> Iterator[tuple[complex, complex]]:
    """Yield both values at each sample point where both are defined. The points are the same in every process."""
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    for point in range(POINTS if symbols else 1):
        # Irregular values between 0.4 and 2.7, so that roots and logarithms are defined.
        steps = ((0.7548776662 * (7 * point + index + 1)) % 2.3 for index in range(len(symbols)))
        where = {symbol: sign * (0.4 + step) for symbol, step in zip(symbols, steps, strict=True)}
        pair = [value_at(expression, where) for expression in (first, second)]
        if pair[0] is not None and pair[1] is not None:
            yield pair[0], pair[1]


def value_at(expression: Any, where: dict[Any, float]) -> complex | None:
    """Evaluate a sympy expression for these values of its symbols; None if it is undefined."""
    try:
        value = complex(expression.evalf(30, subs=where))
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None  # undefined, or a symbol has no value
    return value if abs(value) < 1e300 else None  # also excludes infinities and NaN


def _close(ours: complex, theirs: complex) -> bool:
    return abs(ours - theirs) <= 1e4 * TOLERANCE * max(abs(ours), abs(theirs), 1e-9)


MAX_SYMBOLIC_CHARS = 1_000  # of an expression handed to math-verify
MAX_DEPTH = 10  # of nested brackets in such an expression
MAX_POWER_DIGITS = 4  # of an integer exponent there
MAX_FACTORIAL_DIGITS = 3
MAX_BINOMIAL_DIGITS = 4
MAX_RESULT_DIGITS = 1_000  # of a number raised to a power
MAX_MIXED_DIGITS = 100  # the same beside roots, functions and symbols, where large numbers are factorized
MAX_TERMS = 200  # of an expanded power of a bracket
MAX_SYMBOL_POWER = 300
MAX_FUNCTION_POWER = 20
MAX_FUNCTIONS = 6  # such as sine and logarithm in one expression
MAX_ROUND_DEPTH = 5  # of nested round brackets and absolute values: the parser backtracks on each

_ESCAPED_BRACE = re.compile(r"\\[{}]")
_RAISED = r"\s*(?:\^|\*\*)[\s{(]*"
_POWER_TOWER = re.compile(rf"{_RAISED}[\w.\\]+{_RAISED}[\w.\\]+{_RAISED}")
_POWER_OF_POWER = re.compile(rf"{_RAISED}([0-9]+){_RAISED}([0-9]+)")
_LONG_POWER = re.compile(rf"(?:\^|\*\*)\s*[{{(\s]*[-+]?\s*[0-9][0-9,]{{{MAX_POWER_DIGITS},}}")
_LONG_FACTORIAL = re.compile(rf"[0-9]{{{MAX_FACTORIAL_DIGITS + 1},}}[)}}\s]*!|!\s*[)}}]*\s*!")
_UNFINISHED = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![A-Za-z])")
_LONG_BINOMIAL = re.compile(rf"binom[^0-9]{{0,9}}[0-9]{{{MAX_BINOMIAL_DIGITS + 1},}}")
_BINOMIAL_OF_POWER = re.compile(r"binom\s*\{[^{}]*[\^!]|binom\s*\{[^{}]*\}\s*\{[^{}]*[\^!]")
_BRACKET_FACTORIAL = re.compile(r"[)}\]]\s*!")
_NOT_SMALL = re.compile(rf"\^|!|binom|[0-9]{{{MAX_FACTORIAL_DIGITS},}}")
_POWER = re.compile(rf"([0-9][0-9.]*|\\[A-Za-z]+|[A-Za-z]|[)\]}}]){_RAISED}([0-9]+)")
_SYMBOLIC = re.compile(r"\\(?!cdot|times|div|frac)[A-Za-z]|(?<![\\A-Za-z])[A-Za-z]")
_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc|log|ln|lg|exp)(?=h?(?![A-Za-z]))")
_SIGN = re.compile(r"[-+]")
_LONG_NUMBER = re.compile(rf"[0-9]{{{MAX_DIGITS + 1},}}")


def check_expression(text: str) -> None:
    """Reject expressions that are too expensive for a computer algebra system; the time limit handles the rest."""
    if len(text) > MAX_SYMBOLIC_CHARS:
        raise Unreadable(f"the expression is longer than {MAX_SYMBOLIC_CHARS} characters")
    if nesting_depth(_ESCAPED_BRACE.sub("", text), "{([", "})]") > MAX_DEPTH:
        raise Unreadable(f"brackets are nested more than {MAX_DEPTH} deep")
    if text.count("{") != text.count("}"):
        raise Unreadable("braces do not match")
    _check_powers(text)
    if _LONG_FACTORIAL.search(text):
        raise Unreadable("the factorial is too large")
    if _LONG_NUMBER.search(text):
        raise Unreadable(f"a number has more than {MAX_DIGITS} digits")


def check_work(text: str) -> None:
    """Reject short answers on which a computer algebra system would work for seconds, so that verdicts do not depend on
    time limits."""
    if _UNFINISHED.search(text):
        raise Unreadable("an integral, sum, product or limit is not evaluated")
    if _LONG_BINOMIAL.search(text) or _BINOMIAL_OF_POWER.search(text):
        raise Unreadable("the binomial coefficient is too large")
    for factorial in _BRACKET_FACTORIAL.finditer(text):
        if _NOT_SMALL.search(_inside(text, factorial.start())):
            raise Unreadable("the factorial is too large")
    if len(_FUNCTION.findall(text)) > MAX_FUNCTIONS:
        raise Unreadable(f"there are more than {MAX_FUNCTIONS} functions such as \\sin in the answer")
    if nesting_depth(text) > MAX_ROUND_DEPTH or text.count("|") > 2 * MAX_ROUND_DEPTH:
        raise Unreadable(f"brackets are nested more than {MAX_ROUND_DEPTH} deep")
    for power in _POWER.finditer(text):
        if _work(text, power) > 1:
            raise Unreadable("the powers are too large")


def _work(text: str, power: re.Match[str]) -> float:
    """Return the cost of a power as a multiple of its limit."""
    base, exponent = power[1], int(power[2])
    if base[0].isdigit():
        limit = MAX_MIXED_DIGITS if _SYMBOLIC.search(text) else MAX_RESULT_DIGITS
        return exponent * math.log10(max(int(base.replace(".", "")), 1)) / limit
    if base[0].isalpha():
        return exponent / MAX_SYMBOL_POWER
    if base[0] == "\\":
        return exponent / MAX_FUNCTION_POWER
    inside = _inside(text, power.start())
    terms = len(_SIGN.findall(inside))
    if not terms:
        return math.prod((int(inner) for _, inner in _POWER.findall(inside)), start=exponent) / MAX_SYMBOL_POWER
    return math.comb(exponent + terms, terms) / MAX_TERMS


def _inside(text: str, end: int) -> str:
    """Return the content of the bracket that is closed at `end`; kinds of brackets are not distinguished."""
    depth = 0
    for start in range(end, -1, -1):
        depth += (text[start] in ")]}") - (text[start] in "([{")
        if depth == 0:
            return text[start:end]
    return text[:end]


def _check_powers(text: str) -> None:
    towers = [(base, power) for base, power in _POWER_OF_POWER.findall(text) if base not in ("0", "1")]
    small = all(len(base + power) <= 6 and int(base) ** int(power) < 10**MAX_POWER_DIGITS for base, power in towers)
    if not small or _POWER_TOWER.search(text) or _LONG_POWER.search(text):
        raise Unreadable("the powers are too large")
