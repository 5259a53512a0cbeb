"""Countdown with feedback: a wrong expression is answered with what is wrong about it, and there is another try."""

from __future__ import annotations

from typing import Any

from assay.envs.base import Info, Observation, Step, TaskEnv
from assay.tasks import Task
from assay.types import UserError, Verdict


class CountdownTries(TaskEnv):
    """Each reply is judged at once. A solution in try number k is worth decay ** (k - 1)."""

    name = "countdown_tries"
    judged = False  # by itself, for later tries depend on it
    default_task = "countdown"

    def __init__(self, task: Task, tries: int = 3, decay: float = 1.0) -> None:
        super().__init__(task)
        if task.judge_kind != "countdown":
            raise UserError(f"countdown_tries: the task must be Countdown, not {task.name}")
        if tries < 1 or not 0 <= decay <= 1:
            raise UserError("countdown_tries: tries must be at least 1, and decay between 0 and 1")
        self.tries = self.max_steps = tries
        self.decay = decay

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self.tried = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        verdict: Verdict = self._judge(action, self.prompt.answer, self.prompt.fields)  # exact, and never long
        reward = verdict.reward * self.decay**self.tried
        self.tried += 1
        if verdict.correct or self.tried == self.tries:
            return "", reward, True, False, {"verdict": verdict}
        left = self.tries - self.tried
        reason = (verdict.detail or "that is not a solution").rstrip(".")
        tries = "1 try" if left == 1 else f"{left} tries"
        return f"Not yet: {reason}. You have {tries} left.", 0.0, False, False, {}

    def gold_action(self) -> str:
        return self.task.gold_completion(self.prompt)
