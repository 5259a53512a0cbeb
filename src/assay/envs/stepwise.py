"""Solve a problem line by line: every line of reasoning is a step."""

from __future__ import annotations

import re
from typing import Any

from assay.envs.arithmetic import calculate
from assay.envs.base import Info, Observation, Step, TaskEnv
from assay.envs.calculator import completed, demonstration, gap_of
from assay.rewards import Unreadable, extract
from assay.tasks import Task
from assay.types import Prompt, UserError

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
