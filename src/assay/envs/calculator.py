"""A calculator inside the reply: the policy writes <<48/2= and the result is put in: 24>>."""

from __future__ import annotations

from assay.envs.arithmetic import calculate, shown
from assay.envs.base import Step, TaskEnv
from assay.rewards import Unreadable
from assay.tasks import Task
from assay.types import Prompt, UserError


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
