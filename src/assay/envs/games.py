"""Environments with several turns: guess a number, and Countdown with feedback."""

from __future__ import annotations

import random
import re
from typing import Any

from assay.envs.base import Env, Info, Observation, Step, TaskEnv
from assay.tasks import Task
from assay.types import Status, UserError, Verdict

WORDS = "Guess a number from to . You have tries Right ! Lost Name Higher Lower"


class GuessNumber(Env):
    """The policy guesses a secret number; observations say "Higher" or "Lower". Reward 1 for finding it in time."""

    name = "guess"

    def __init__(self, low: int = 1, high: int = 20, tries: int = 5) -> None:
        if low >= high or tries < 1:
            raise UserError("guess: low must be below high, and tries at least 1")
        self.low, self.high, self.tries = low, high, tries
        self.max_steps = tries

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self.secret = random.Random(seed).randint(self.low, self.high)
        self.left = self.tries
        self.possible = (self.low, self.high)  # bounds that the observations so far imply
        return f"Guess a number from {self.low} to {self.high} . You have {self.tries} tries .", {}

    def step(self, action: str) -> Step:
        self.left -= 1
        number = re.search(r"-?[0-9]{1,9}", action)
        guess = int(number[0]) if number else None
        if guess == self.secret:
            return "Right !", 1.0, True, False, {"verdict": Verdict(1.0, Status.OK, str(guess))}
        if not self.left:
            status = Status.WRONG if number else Status.NO_ANSWER
            return "Lost .", 0.0, True, False, {"verdict": Verdict(0.0, status, number and number[0])}
        if guess is None:
            return "Name a number .", 0.0, False, False, {}
        low, high = self.possible
        self.possible = (max(low, guess + 1), high) if guess < self.secret else (low, min(high, guess - 1))
        return "Higher ." if guess < self.secret else "Lower .", 0.0, False, False, {}

    def gold_action(self) -> str:
        """Bisect. With at most 2 ** tries - 1 numbers this always wins."""
        return str(sum(self.possible) // 2)

    def words(self) -> list[str]:
        return [*WORDS.split(), *map(str, range(min(self.low, self.tries), max(self.high, self.tries) + 1))]


class CountdownTries(TaskEnv):
    """Each reply is judged at once, and a wrong one can be corrected. The reward of a solution in try k is
    decay ** (k - 1)."""

    name = "countdown_tries"
    judged = False  # it judges each try itself
    default_task = "countdown"

    def __init__(self, task: Task, tries: int = 3, decay: float = 1.0) -> None:
        super().__init__(task)
        if task.judge_kind != "countdown":
            raise UserError(f"countdown_tries: the task must be Countdown, not {task.name}")
        if tries < 1 or not 0 <= decay <= 1:
            raise UserError("countdown_tries: tries must be at least 1, and decay must be between 0 and 1")
        self.tries = self.max_steps = tries
        self.decay = decay

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self.tried = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        verdict: Verdict = self._judge(action, self.prompt.answer, self.prompt.fields)  # exact and fast
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
