"""The final answer of a completion, and the judges of this package that extract it: math answers, Countdown
expressions, and problems of reasoning-gym.

The last answer of a completion counts. Extraction takes time linear in the length of the text.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar

from assay.rewards.equality import compare
from assay.rewards.expressions import compute, parse_arithmetic
from assay.rewards.judge import binary_verdict
from assay.rewards.latex import cache_bytecode, verify_whole
from assay.rewards.numeric import (
    MAX_ANSWER_CHARS,
    Unreadable,
    UnreadableGold,
    closing_brace,
    nesting_depth,
    read_quantity,
    tidy,
)
from assay.types import Status, UserError, Verdict, clip, describe_error, missing_extra, unknown_name


@dataclass(frozen=True, slots=True)
class Extraction:
    """An answer (`status` ok), or why there is none: no_answer, or unparsable with the text that was found."""

    text: str = ""
    status: Status = Status.OK
    form: str = ""  # the extractor that found it
    detail: str = ""

    @property
    def found(self) -> bool:
        return self.status is Status.OK


_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(\{)|((?:\\?\$)?[-+\u2212]?[0-9][0-9,]*(?:\.[0-9]+)?))")
_DIGIT = re.compile(r"[0-9]")
MAX_SHOWN = 200  # characters of an answer in a verdict
_GROUPED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_PLAIN = rf"(?:{_GROUPED}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])[-\u2212])?(?:\\?\$|[€£¥₹])?(?:(?<=[$€£¥₹])[-\u2212])?"  # a minus after a word or ")" subtracts
    rf"(?:\\[dt]?frac\{{{_PLAIN}\}}\{{{_PLAIN}\}}|{_PLAIN}(?:/{_PLAIN})?(?:[eE][-+]?[0-9]+(?![\w]))?)(?:\s?\\?%)?"
)


def boxed(text: str) -> Extraction:
    r"""Extract the last `\boxed{...}` or `\fbox{...}`, with nested braces; `\boxed 5` counts too."""
    box = _last_match(_BOX, text)
    if box is None:
        return _no_answer("\\boxed{}")
    if box.group(2):
        return _answer(box.group(2))
    start = box.end()
    end = closing_brace(text, start, start + MAX_ANSWER_CHARS + 1)
    if end >= 0:
        return _answer(text[start:end])
    inside = text[start : start + MAX_ANSWER_CHARS + 1]
    reason = "the last box is too long" if len(inside) > MAX_ANSWER_CHARS else "the last box is never closed"
    return Extraction(clip(inside, MAX_SHOWN), Status.UNPARSABLE, detail=reason)


def hash_mark(text: str) -> Extraction:
    """Extract the text after the last `####`, to the end of the line (the form of GSM8K's solutions)."""
    start = text.rfind("####")
    if start < 0:
        return _no_answer("####")
    line = text[start + 4 : start + MAX_ANSWER_CHARS + 6]
    return _answer(line.split("\n", 1)[0])


def answer_tag(text: str) -> Extraction:
    """Extract the content of the last `<answer>...</answer>`."""
    start = text.rfind("<answer>")
    if start < 0:
        return _no_answer("<answer> tag")
    start += len("<answer>")
    end = text.find("</answer>", start)
    if end < 0:
        inside = text[start : start + MAX_ANSWER_CHARS]
        return Extraction(clip(inside, MAX_SHOWN), Status.UNPARSABLE, detail="the last <answer> is never closed")
    return _answer(text[start:end])


def last_number(text: str) -> Extraction:
    """Extract the last number, with sign, currency, thousands separators, decimals, a/b, exponent and %."""
    digit = _DIGIT.search(text[::-1])  # backwards, so that the cost does not depend on the length
    if digit is None:
        return _no_answer("number")
    end = len(text) - digit.start()
    start = max(0, end - MAX_ANSWER_CHARS)
    window = text[start : end + 4]  # a closing brace or a percent sign may follow the last digit
    number = _last_match(_NUMBER, window)
    if number is None or (number.start() == 0 and start > 0):
        return Extraction(clip(window, MAX_SHOWN), Status.UNPARSABLE, detail="the last number is too long")
    return _answer(number.group())


EXTRACTORS: dict[str, Callable[[str], Extraction]]
EXTRACTORS = {"boxed": boxed, "hash": hash_mark, "answer-tag": answer_tag, "last-number": last_number}


def check_extractor(name: str) -> None:
    if name not in EXTRACTORS:
        raise UserError(f"unknown answer form '{name}': choose one of {', '.join(EXTRACTORS)}")


def extract(text: str, form: str, strict: bool = True, any_number: bool = True) -> Extraction:
    """Extract the final answer in the given form; if not strict, in any form (the last number only if `any_number`)."""
    others = [name for name in EXTRACTORS if name != form and (any_number or name != "last-number")]
    extractions = (replace(EXTRACTORS[name](text), form=name) for name in [form, *([] if strict else others)])
    first = next(extractions)
    return first if first.found else next((other for other in extractions if other.found), first)


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def _no_answer(missing: str) -> Extraction:
    return Extraction(status=Status.NO_ANSWER, detail=f"no {missing} in the completion")


def _answer(text: str) -> Extraction:
    text = text.strip()
    if not text:
        return Extraction(status=Status.UNPARSABLE, detail="the final answer is empty")
    if len(text) > MAX_ANSWER_CHARS:
        detail = f"the final answer is longer than {MAX_ANSWER_CHARS} characters"
        return Extraction(clip(text, MAX_SHOWN), Status.UNPARSABLE, detail=detail)
    return Extraction(text)


# Judges

MAX_AUDIT_CHARS = 50_000  # math-verify's own extraction searches the whole text, and is slow


@dataclass(frozen=True)
class FinalAnswerJudge(ABC):
    """Extracts the final answer in the form `extract` and scores it.

    Not strict: an answer in any of the known forms counts. `parts` has `accuracy`, and `format`: whether there was an
    answer in the requested form, correct or not.
    """

    extract: str = "boxed"
    strict: bool = True
    any_number: ClassVar[bool] = True  # if not strict, the last number of the completion counts as answer too

    def __post_init__(self) -> None:
        check_extractor(self.extract)

    @abstractmethod
    def problem(self, answer: str, fields: Mapping[str, Any]) -> Any:
        """Return what `score` needs to know of the problem. Raises UnreadableGold if it is invalid."""

    @abstractmethod
    def score(self, text: str, problem: Any) -> tuple[float, str]:
        """Return the score of an extracted answer (1.0: correct), and a reason. Raises Unreadable, UnreadableGold."""

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        try:
            problem = self.problem(answer, fields)
        except UnreadableGold as error:
            return Verdict(0.0, Status.ERROR, detail=str(error))
        extraction = extract(completion, self.extract, self.strict, self.any_number)
        in_form = float(extraction.found and extraction.form == self.extract)
        if not extraction.found:
            return binary_verdict(extraction.status, extraction.text or None, in_form, extraction.detail)
        try:
            score, detail = self.score(extraction.text, problem)
        except Unreadable as error:
            return binary_verdict(Status.UNPARSABLE, clip(extraction.text, MAX_SHOWN), in_form, str(error))
        except UnreadableGold as error:
            return Verdict(0.0, Status.ERROR, clip(extraction.text, MAX_SHOWN), detail=str(error))
        status = Status.OK if score >= 1.0 else Status.WRONG
        return Verdict(score, status, extraction.text, {"accuracy": score, "format": in_form}, detail)


@dataclass(frozen=True)
class MathJudge(FinalAnswerJudge):
    """1.0 if the extracted answer equals the gold answer, else 0.0: for one number or expression as answer.

    Not strict: the answer may also be an expression where the gold answer is a number.
    """

    def prepare(self) -> None:
        cache_bytecode()

    def problem(self, answer: str, fields: Mapping[str, Any]) -> str:
        if not answer.strip():
            raise UnreadableGold("the gold answer is empty")
        return answer

    def score(self, text: str, problem: str) -> tuple[float, str]:
        try:
            equal, detail = compare(text, problem, self.strict)
        except UnreadableGold as error:
            raise UnreadableGold(f"the gold answer cannot be read: {error}") from None
        return float(equal), detail


@dataclass(frozen=True)
class MathVerifyJudge:
    """math-verify alone, including its own answer extraction: a second opinion for audits."""

    def prepare(self) -> None:
        cache_bytecode()

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        if len(completion) > MAX_AUDIT_CHARS:
            return binary_verdict(Status.UNPARSABLE, None, 0.0, f"longer than {MAX_AUDIT_CHARS} characters")
        equal, parsed = verify_whole(completion, answer)
        if equal is None:
            return binary_verdict(Status.NO_ANSWER, None, 0.0, "math-verify found no answer")
        return binary_verdict(Status.OK if equal else Status.WRONG, clip(parsed, MAX_SHOWN), 1.0)


MAX_CHARS = 400
MAX_DEPTH = 40
MAX_INT_DIGITS = 12

_SPELLINGS = (("\\times", "*"), ("\\cdot", "*"), ("\\div", "/"), ("\\left", ""), ("\\right", ""), ("∗", "*"))
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class CountdownJudge(FinalAnswerJudge):
    """1.0 if the expression uses each of `nums` exactly once and equals `target`, else 0.0.

    Integers, + - * / (also × ÷ \\times \\div \\frac) and parentheses. A sign before an operand is allowed: for a
    positive target it adds nothing that could not be written without it. "expression = number" is allowed if the number
    is the target. Arithmetic is exact.
    """

    extract: str = "answer-tag"
    any_number = False

    def problem(self, answer: str, fields: Mapping[str, Any]) -> tuple[Counter[int], Fraction]:
        try:
            numbers = Counter(_integer(number) for number in fields["nums"])
            return numbers, Fraction(_integer(fields.get("target", answer)))
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableGold(
                f"a Countdown problem needs 'nums' (a list of integers) and 'target' (an integer): {error!r}"
            ) from None

    def score(self, text: str, problem: tuple[Counter[int], Fraction]) -> tuple[float, str]:
        mistake = find_mistake(text, *problem)
        return float(not mistake), mistake


def find_mistake(text: str, numbers: Counter[int], target: Fraction) -> str:
    """Return why an expression does not solve a Countdown problem; empty if it does. Raises Unreadable."""
    left, equals, right = _normalize(text).partition("=")
    tree = _parse(left)
    try:
        value = compute(tree, left)
    except ZeroDivisionError:
        return "divides by zero"
    leaves = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    used = Counter(leaf for leaf in leaves if isinstance(leaf, int))
    if used != numbers:
        return f"uses the numbers {sorted(used.elements())}, not {sorted(numbers.elements())}"
    if value != target:
        return f"equals {value}, not {target}"
    if equals:
        claimed = read_quantity(tidy(right))
        if claimed is None:
            raise Unreadable("what follows '=' is not a number")
        if claimed.value != target:
            return f"says it equals {clip(right.strip(), 40)}, not {target}"
    return ""


def _normalize(text: str) -> str:
    """Write an expression in plain characters."""
    if len(text) > MAX_CHARS:
        raise Unreadable(f"the expression is longer than {MAX_CHARS} characters")
    text = tidy(text)
    for spelling, plain in _SPELLINGS:
        text = text.replace(spelling, plain)
    for _ in range(MAX_DEPTH):
        text, replaced = _FRACTION.subn(r"((\1)/(\2))", text)
        if not replaced:
            break
    return text


def _parse(text: str) -> ast.expr:
    text = text.strip()
    if not _ALLOWED.fullmatch(text) or "**" in text or "//" in text:
        raise Unreadable("only integers, + - * / and parentheses are allowed")
    if nesting_depth(text) > MAX_DEPTH:
        raise Unreadable(f"parentheses are nested more than {MAX_DEPTH} deep")
    if any(len(digits) > MAX_INT_DIGITS for digits in re.findall(r"[0-9]+", text)):
        raise Unreadable(f"a number has more than {MAX_INT_DIGITS} digits")
    return parse_arithmetic(text)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"{value!r} is not an integer")
    return int(value)


SEED, INDEX, SIZE = "dataset_seed", "dataset_index", "dataset_size"  # prompt fields that identify a problem


@lru_cache(maxsize=64)
def dataset(name: str, options: str, seed: int, size: int) -> Any:
    """Return a dataset object of reasoning-gym; `options` is its config as JSON."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise missing_extra(f"reasoning_gym:{name} ({error})", "reasoning-gym") from None
    if name not in DATASETS:
        raise unknown_name("reasoning-gym dataset", name, sorted(DATASETS))
    given: dict[str, Any] = json.loads(options)
    takes = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in ("seed", "size")]
    for key in given:
        if key not in takes:
            raise unknown_name("argument", key, takes, where=f"of reasoning_gym:{name}")
    try:
        return create_dataset(name, seed=seed, size=size, **given)
    except (AssertionError, TypeError, ValueError) as error:  # raised by the validation of its configs
        raise UserError(f"reasoning_gym:{name} rejects these arguments: {describe_error(error)}") from None


@lru_cache(maxsize=1024)
def entry(name: str, options: str, seed: int, size: int, index: int) -> dict[str, Any]:
    """Return a problem: question, answer (None where the package has none) and what its scorer needs to know."""
    return dataset(name, options, seed, size)[index]


@dataclass(frozen=True)
class ReasoningGymJudge(FinalAnswerJudge):
    """The score that reasoning-gym gives, including partial scores; only a full score is correct.

    The problem is generated again in the process that judges it.
    """

    extract: str = "answer-tag"
    strict: bool = True
    name: str = ""
    options: str = "{}"

    def prepare(self) -> None:
        """Import the package, which takes seconds that should not count as judging."""
        dataset(self.name, self.options, 0, 1)

    def problem(self, answer: str, fields: Mapping[str, Any]) -> tuple[int, int, int]:
        try:
            return int(fields[SEED]), int(fields[SIZE]), int(fields[INDEX])
        except (KeyError, TypeError, ValueError) as error:
            names = f"{SEED}, {SIZE} and {INDEX}"
            raise UnreadableGold(f"a reasoning-gym problem needs the fields {names}: {error!r}") from None

    def score(self, text: str, problem: tuple[int, int, int]) -> tuple[float, str]:
        source = dataset(self.name, self.options, *problem[:2])
        problem_entry = entry(self.name, self.options, *problem)
        try:
            score = float(source.score_answer(text, problem_entry))
        except Exception as error:
            source.score_answer(problem_entry["answer"], problem_entry)  # raises if the problem is broken
            raise Unreadable(describe_error(error)) from None
        if not math.isfinite(score):
            raise UnreadableGold(f"the dataset gave the score {score}")
        return score, ""
