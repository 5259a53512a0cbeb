"""Solve a problem line by line: every line of reasoning is a step."""

from __future__ import annotations

import re
from typing import Any

from assay.envs.arithmetic import calculate
from assay.envs.base import Info, Observation, Step, TaskEnv
from assay.rewards import Unreadable, extract
from assay.tasks import Task
from assay.types import UserError

_SUM = re.compile(r"([0-9.+\-*/() ]*[0-9)])\s*=\s*(-?[0-9.]+)")


class Stepwise(TaskEnv):
    """The policy goes on with its own reply, a line a step, until a line holds the final answer or the reply ends.

    `line_reward` is given for a line that holds a true sum ("4 + 5 = 9"), and taken for one with a false sum.
    """

    name = "stepwise"
    inline = True

    def __init__(self, task: Task, separator: str = "\n", max_lines: int = 12, line_reward: float = 0.0) -> None:
        super().__init__(task)
        if not separator or max_lines < 1:
            raise UserError("stepwise: separator must not be empty, and max_lines at least 1")
        self.stop, self.max_lines, self.line_reward = (separator,), max_lines, line_reward
        self.max_steps = max_lines

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self.lines = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        self.said += action
        self.lines += 1
        reward = self.line_reward * truth(action)
        ended = self.stop[0] not in action or extract(action, self.default_extract).found
        if ended or self.lines >= self.max_lines:
            return self.answered(self.said, reward)
        return "", reward, False, False, {}


def truth(line: str) -> int:
    """1 for a line whose sums are all true, -1 if one is false, 0 if there is none."""
    found = _SUM.findall(line)
    try:
        return 0 if not found else 1 if all(calculate(left) == calculate(right) for left, right in found) else -1
    except Unreadable:
        return 0
