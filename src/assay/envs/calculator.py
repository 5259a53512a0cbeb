"""A calculator inside the reply: the policy writes <<48/2= and the result is put in: 24>>."""

from __future__ import annotations

from assay.envs.arithmetic import calculate, shown
from assay.envs.base import Step, TaskEnv
from assay.rewards import Unreadable
from assay.tasks import Task
from assay.types import UserError


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
        self.gap = " " if getattr(task, "style", "") == "tokens" else ""  # words of such a task are set apart

    def own_words(self) -> list[str]:
        return [self.before, self.after, "=", "error"]

    def step(self, action: str) -> Step:
        self.said += action
        if self.stop[0] not in action:
            return self.answered(self.said)
        asked = self.said.rpartition(self.before)[2] if self.before in self.said else self.after
        if self.after in asked or not asked.rstrip().endswith("=") or asked.count("=") > 1:
            return "", 0.0, False, False, {}
        try:
            result = shown(calculate(asked.rstrip().removesuffix("=")))
        except Unreadable:
            result = "error"
        written = f"{self.gap}{result}{self.gap}{self.after}"
        self.said += written
        return written, 0.0, False, False, {"result": result}
