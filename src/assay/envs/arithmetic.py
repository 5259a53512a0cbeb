"""Exact arithmetic on text: integers, decimals, + - * / ^ and parentheses, with fractions all the way.

A calculator inside the reply: the policy writes <<48/2= and the result is put in: 24>>.

Solve a problem line by line: every line of reasoning is a step.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from assay.envs.base import Info, Observation, Step, TaskEnv
from assay.rewards import Unreadable, extract
from assay.tasks import Task
from assay.types import Prompt, UserError

MAX_CHARS = 200
MAX_DIGITS = 60  # of a number or a result
MAX_POWER = 64

_ALLOWED = re.compile(r"[0-9.+\-*/() ]+")
_SPELLINGS = (("×", "*"), ("÷", "/"), ("−", "-"), ("^", "**"), ("$", ""))
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(text: str) -> Fraction:
    """The exact value of an expression. Raises Unreadable, with the reason."""
    for fancy, plain in _SPELLINGS:
        text = text.replace(fancy, plain)
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", text).strip()
    if not text or len(text) > MAX_CHARS or not _ALLOWED.fullmatch(text) or "//" in text:
        raise Unreadable("only numbers, + - * / ^ and parentheses are allowed")
    text = re.sub(r"(?<![0-9.])0+(?=[0-9])", "", text)  # Python refuses 007
    try:
        tree = ast.parse(text, mode="eval").body
        return _value(tree, text)
    except ZeroDivisionError:
        raise Unreadable("divides by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, Unreadable) else Unreadable("not an arithmetic expression") from None


def shown(value: Fraction) -> str:
    """A whole number or a decimal where that is exact, else a fraction."""
    top, bottom = value.numerator, value.denominator
    if bottom == 1:
        return str(top)
    for places in range(1, 13):
        if 10**places % bottom == 0:
            digits = str(abs(top) * 10**places // bottom).rjust(places + 1, "0")
            return f"{'-' if top < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{top}/{bottom}"


def _value(node: ast.expr, text: str) -> Fraction:
    if isinstance(node, ast.Constant):  # the text itself: 0.1 is a tenth, which no float is
        return _small(Fraction(ast.get_source_segment(text, node) or ""))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, text), _value(node.right, text)
        if type(node.op) in _OPERATORS:
            return _small(_OPERATORS[type(node.op)](left, right))
        if isinstance(node.op, ast.Pow) and right.denominator == 1 and abs(right) <= MAX_POWER:
            return _small(left ** int(right))
    raise Unreadable("only numbers, + - * / ^ and parentheses are allowed")


def _small(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise Unreadable(f"a number has more than {MAX_DIGITS} digits")
    return value


class Calculator(TaskEnv):
    """Completes `<<expression=` with the exact result and `>>`, as tokens that are not trained on.

    Decoding stops at every "="; outside of << >> it goes on as if it had not. A token that holds more than the "="
    states a result of the policy's own, which is left alone.
    """

    name = "calculator"
    inline = True
    stop = ("=",)
    max_steps = 64

    def __init__(self, task: Task, before: str = "<<", after: str = ">>", max_steps: int = 64) -> None:
        super().__init__(task)
        if not before or not after or max_steps < 1:
            raise UserError("calculator: before and after must not be empty, and max_steps at least 1")
        self.before, self.after, self.max_steps = before, after, max_steps
        self.gap = gap_of(task)

    def own_words(self) -> list[str]:
        return [self.before, self.after, "=", "error"]

    def gold_completion(self, prompt: Prompt) -> str:
        return demonstration(self.task.gold_completion(prompt), self.before, self.after, self.gap)

    def step(self, action: str) -> Step:
        self.said += action
        if self.stop[0] not in action:
            return self.answered(self.said)
        written = completed(self.said, self.before, self.after, self.gap)
        self.said += written
        return written, 0.0, False, False, {}


def completed(said: str, before: str, after: str, gap: str = "") -> str:
    """What a reply that ends in "<<48/2=" goes on with: "24>>". Empty if it asks for nothing."""
    asked = said.rpartition(before)[2] if before in said else after
    if after in asked or not asked.rstrip().endswith("=") or asked.count("=") > 1:
        return ""
    try:
        result = shown(calculate(asked.rstrip().removesuffix("=")))
    except Unreadable:
        result = "error"
    return f"{gap}{result}{gap}{after}"


def demonstration(worked: str, before: str, after: str, gap: str = "") -> str:
    """A worked solution with the results that the calculator gives: GSM8K's own says <<8*18=144.00>>, or rounds."""
    said = ""
    while "=" in worked:
        written, _, worked = worked.partition("=")
        said += f"{written}="
        if result := completed(said, before, after, gap):
            said += result
            stated, closed, rest = worked.partition(after)
            worked = rest if closed and before not in stated else worked
    return said + worked


def gap_of(task: Task) -> str:
    """What stands between the words of a task."""
    return " " if getattr(task, "style", "") == "tokens" else ""


CALL = ("<<", "=", ">>")  # of the calculator: what opens a call, what asks for the result, what ends it
TURNS = 8  # that a line with calls may take at most, on average: every "=" ends one
_RIGHT_SIDE = re.compile(r"\s*(-?[0-9.]++)(?!\s*[-+*/x×÷·^%(]|\s[0-9]|,[0-9])")  # a number, and all of it
_OPERATOR = re.compile(r"[0-9)]\s*[-+*/]")
_SUM_CHARACTERS = "0123456789.+-*/() "
_CONTINUES = "x×÷·^%$="  # before a sum, these are operations that belong to it but are not read


class Stepwise(TaskEnv):
    """The policy goes on with its own reply, a line a step, until a line holds the final answer or the reply ends.

    `line_reward` is given for a line that holds a true sum ("4 + 5 = 9"), and taken for one with a false sum.
    With `calculator`, `<<48/2=` is completed within a line as in the environment of that name.
    """

    name = "stepwise"
    inline = True

    def __init__(
        self,
        task: Task,
        separator: str = "\n",
        max_lines: int = 12,
        line_reward: float = 0.0,
        calculator: bool = False,
    ) -> None:
        super().__init__(task)
        if not separator or max_lines < 1:
            raise UserError("stepwise: separator must not be empty, and max_lines at least 1")
        self.stop, self.max_lines, self.line_reward = (separator,), max_lines, line_reward
        self.max_steps = max_lines
        self.calculator, self.gap = calculator, gap_of(task)
        if calculator:
            self.stop, self.max_steps = (separator, CALL[1]), TURNS * max_lines

    def own_words(self) -> list[str]:
        return [*CALL, "error"] if self.calculator else []

    def gold_completion(self, prompt: Prompt) -> str:
        worked = super().gold_completion(prompt)
        return demonstration(worked, CALL[0], CALL[2], self.gap) if self.calculator else worked

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self.lines, self.line = 0, ""
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        self.said += action
        self.line += action
        if self.calculator and self.stop[0] not in action and CALL[1] in action:
            result = completed(self.said, CALL[0], CALL[2], self.gap)
            self.said += result
            self.line += result
            return result, 0.0, False, False, {}
        line, self.line = self.line, ""
        self.lines += 1
        reward = self.line_reward * truth(line)
        ended = self.stop[0] not in action or extract(line, self.default_extract).found
        if ended or self.lines >= self.max_lines:
            return self.answered(self.said, reward)
        return "", reward, False, False, {}


def truth(line: str) -> int:
    """1 for a line whose sums are all true, -1 if one is false, 0 if there is none."""
    stated = sums(line)
    try:
        return 0 if not stated else 1 if all(calculate(left) == calculate(right) for left, right in stated) else -1
    except Unreadable:
        return 0


def sums(line: str) -> list[tuple[str, str]]:
    """Both sides of each "4 + 5 = 9", in time linear in the line; "9 = 9" and the end of "3 x 4 + 5 = 17" are none."""
    stated, start = [], 0
    for equals in re.finditer("=", line):
        before = line[start : equals.start()].rstrip()
        rest = before.rstrip(_SUM_CHARACTERS)
        left = before[len(rest) :]
        right = _RIGHT_SIDE.match(line, equals.end())
        start = equals.end()
        comma = rest.endswith(",") and left[:1].isdigit()  # "1,004 + 5", but not "first, 4 + 5"
        cut_off = comma or rest[-1:] in (*_CONTINUES,) or (rest and left.lstrip()[:1] in ("+", "-", "*", "/"))
        whole = (left[-1:].isdigit() or left.endswith(")")) and not cut_off
        if right and whole and _OPERATOR.search(left):
            stated.append((left, right[1]))
            start = right.end()
    return stated
