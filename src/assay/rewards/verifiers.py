"""Judging a final answer against a gold one: GSM8K, MATH, and anything with one number or expression as its answer.

Countdown: reach the target with the given numbers, each used exactly once. Parsed and computed, never `eval`ed.

Problems of the package reasoning-gym, made again wherever they are judged, and scored by the package itself.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from assay.rewards.equality import compare
from assay.rewards.extract import check_extractor, extract
from assay.rewards.judge import graded, one_line
from assay.rewards.latex import cache_bytecode, verify_whole
from assay.rewards.limits import Unreadable, UnreadableGold, clip
from assay.rewards.numeric import read_quantity, tidy
from assay.types import Status, UserError, Verdict, unknown_name

MAX_AUDIT_CHARS = 50_000  # math-verify's own extraction searches the whole text, and slowly


@dataclass(frozen=True)
class MathJudge:
    """1.0 if the extracted answer equals the gold one, else 0.0.

    Not strict: the answer may stand in any of the known forms, and may be an expression where the gold one is a number.

    `parts` has `accuracy`, and `format`: whether an answer stood in the asked form, right or wrong.
    """

    extract: str = "boxed"
    strict: bool = True

    def __post_init__(self) -> None:
        check_extractor(self.extract)

    def prepare(self) -> None:
        cache_bytecode()

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        if not answer.strip():
            return Verdict(0.0, Status.ERROR, detail="the gold answer is empty")
        found = extract(completion, self.extract, self.strict)
        form = float(found.found and found.form == self.extract)
        if not found.found:
            return graded(found.status, found.text or None, form, found.detail)
        try:
            right, detail = compare(found.text, answer, self.strict)
        except Unreadable as error:
            return graded(Status.UNPARSABLE, clip(found.text), form, str(error))
        except UnreadableGold as error:
            return Verdict(0.0, Status.ERROR, clip(found.text), detail=f"the gold answer cannot be read: {error}")
        return graded(Status.OK if right else Status.WRONG, found.text, form, detail)


@dataclass(frozen=True)
class MathVerifyJudge:
    """math-verify alone, with its own way of finding the answer: a second opinion for audits."""

    def prepare(self) -> None:
        cache_bytecode()

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        if len(completion) > MAX_AUDIT_CHARS:
            return graded(Status.UNPARSABLE, None, 0.0, f"longer than {MAX_AUDIT_CHARS} characters")
        same, read = verify_whole(completion, answer)
        if same is None:
            return graded(Status.NO_ANSWER, None, 0.0, "math-verify found no answer")
        return graded(Status.OK if same else Status.WRONG, clip(read), 1.0)


MAX_CHARS = 400
MAX_DEPTH = 40
MAX_INT_DIGITS = 12

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("∗", "*"))
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


class _Wrong(Exception):
    """A readable expression that does not solve the problem. Says why."""


@dataclass(frozen=True)
class CountdownJudge:
    """1.0 if the expression uses each of `nums` exactly once and equals `target`, else 0.0.

    Integers, + - * / (also × ÷ \\times \\div \\frac) and parentheses. A sign in front of an operand is allowed: for a
    positive target it adds nothing that could not be written without. "expression = number" is allowed if the number
    is the target. Arithmetic is exact.
    """

    extract: str = "answer-tag"
    strict: bool = True

    def __post_init__(self) -> None:
        check_extractor(self.extract)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        try:
            numbers = Counter(_integer(number) for number in fields["nums"])
            target = Fraction(_integer(fields.get("target", answer)))
        except (KeyError, TypeError, ValueError) as error:
            detail = f"a Countdown problem needs 'nums' (a list of integers) and 'target' (an integer): {error!r}"
            return Verdict(0.0, Status.ERROR, detail=detail)
        found = extract(completion, self.extract, self.strict, numbers=False)
        form = float(found.found and found.form == self.extract)
        if not found.found:
            return graded(found.status, found.text or None, form, found.detail)
        try:
            check_solution(found.text, numbers, target)
        except Unreadable as error:
            return graded(Status.UNPARSABLE, clip(found.text), form, str(error))
        except _Wrong as error:
            return graded(Status.WRONG, found.text, form, str(error))
        return graded(Status.OK, found.text, form)


def check_solution(text: str, numbers: Counter[int], target: Fraction) -> None:
    """Raise unless the expression solves the problem: Unreadable, or _Wrong with the reason."""
    left, equals, right = _spell(text).partition("=")
    tree = _parse(left)
    value = _compute(tree)
    leaves = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    used = Counter(leaf for leaf in leaves if isinstance(leaf, int))
    if used != numbers:
        raise _Wrong(f"uses the numbers {sorted(used.elements())}, not {sorted(numbers.elements())}")
    if value != target:
        raise _Wrong(f"equals {value}, not {target}")
    if equals:
        claimed = read_quantity(tidy(right))
        if claimed is None:
            raise Unreadable("what follows '=' is not a number")
        if claimed.value != target:
            raise _Wrong(f"says it equals {clip(right.strip(), 40)}, not {target}")


def _spell(text: str) -> str:
    """The expression in plain characters."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"the expression is longer than {MAX_CHARS} characters")
    text = tidy(text)
    for fancy, plain in _SPELLINGS:
        text = text.replace(fancy, plain)
    for _ in range(MAX_DEPTH):
        text, replaced = _FRACTION.subn(r"((\1)/(\2))", text)
        if not replaced:
            break
    return text


def _parse(text: str) -> ast.expr:
    text = text.strip()
    if not _ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        raise Unreadable("only integers, + - * / and parentheses are allowed")
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if depth > MAX_DEPTH:
            raise Unreadable(f"parentheses are nested more than {MAX_DEPTH} deep")
    if any(len(digits) > MAX_INT_DIGITS for digits in re.findall(r"[0-9]+", text)):
        raise Unreadable(f"a number has more than {MAX_INT_DIGITS} digits")
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unreadable("not an arithmetic expression") from None


def _compute(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _compute(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _compute(node.left), _compute(node.right)
        if isinstance(node.op, ast.Div) and right == 0:
            raise _Wrong("divides by zero")
        return _OPERATORS[type(node.op)](left, right)
    raise Unreadable("only integers, + - * / and parentheses are allowed")


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not an integer")
    return int(value)


SEED, INDEX, SIZE = "dataset_seed", "dataset_index", "dataset_size"  # fields that say which problem it is


@lru_cache(maxsize=64)
def dataset(name: str, options: str, seed: int, size: int) -> Any:
    """The package's own object; `options` of its config as JSON."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(
            f'reasoning_gym:{name} needs the reasoning-gym extra: pip install "assay[reasoning-gym]" ({error})'
        ) from None
    if name not in DATASETS:
        raise unknown_name("reasoning-gym dataset", name, sorted(DATASETS))
    given: dict[str, Any] = json.loads(options)
    takes = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in given:
        if key not in takes:
            raise unknown_name("argument", key, takes, where=f"of reasoning_gym:{name}")
    try:
        return create_dataset(name, seed=seed, size=size, **given)
    except (AssertionError, TypeError, ValueError) as error:  # how its configs say no
        raise UserError(f"reasoning_gym:{name} does not take these arguments: {one_line(error)}") from None


@lru_cache(maxsize=1024)
def entry(name: str, options: str, seed: int, size: int, index: int) -> dict[str, Any]:
    """A problem: question, answer (None where the package has none of its own) and what its judge needs to know."""
    return dataset(name, options, seed, size)[index]


@dataclass(frozen=True)
class ReasoningGymJudge:
    """The score that the data set gives, partial ones too; only a full one is right."""

    name: str
    options: str = "{}"
    extract: str = "answer-tag"
    strict: bool = True

    def __post_init__(self) -> None:
        check_extractor(self.extract)

    def prepare(self) -> None:
        """The package takes seconds to import, which should not count as judging."""
        dataset(self.name, self.options, 0, 1)

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        try:
            place = [int(fields[key]) for key in (SEED, SIZE, INDEX)]
        except (KeyError, TypeError, ValueError) as error:
            detail = f"a problem of reasoning-gym needs the fields {SEED}, {SIZE} and {INDEX}: {error!r}"
            return Verdict(0.0, Status.ERROR, detail=detail)
        found = extract(completion, self.extract, self.strict)
        form = float(found.found and found.form == self.extract)
        if not found.found:
            return graded(found.status, found.text or None, form, found.detail)
        source, problem = dataset(self.name, self.options, *place[:2]), entry(self.name, self.options, *place)
        try:
            score = float(source.score_answer(found.text, problem))
        except Exception as error:
            source.score_answer(problem["answer"], problem)  # if this fails too, it is not the answer's fault
            return graded(Status.UNPARSABLE, found.text, form, one_line(error))
        if not math.isfinite(score):
            return Verdict(0.0, Status.ERROR, found.text, detail=f"the data set gave the score {score}")
        status = Status.OK if score >= 1.0 else Status.WRONG
        return Verdict(score, status, found.text, {"accuracy": score, "format": form})
