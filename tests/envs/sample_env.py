"""A valid environment, from which tests derive invalid ones."""

from __future__ import annotations

import random
from typing import Any

from assay.envs import Env, make_env
from assay.tasks import make_task


def build(name: str, **args: Any) -> Any:
    task = args.pop("task", None)
    return make_env(name, task=make_task(task) if task else None, **args)


class ValidEnv(Env):
    name = "valid"
    max_steps = 3

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seen: list[str] = []
        self.secret = random.Random(seed).randint(0, 9)
        return f"seed {seed}", {}

    def step(self, action: str) -> Any:
        self.seen.append(action)
        return f"{len(self.seen)}", float(action == "gold"), action == "gold" or len(self.seen) == 3, False, {}

    def gold_action(self) -> str | None:
        return "gold"
