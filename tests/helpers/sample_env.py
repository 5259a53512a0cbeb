"""A valid environment, from which tests derive invalid ones."""

from __future__ import annotations

import asyncio
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


class AsyncEnv(ValidEnv):
    """With async methods, which all have to run in the same event loop, as objects such as HTTP sessions require."""

    loops: set[asyncio.AbstractEventLoop] = set()  # noqa: RUF012

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await self.wait()
        return super().reset(seed=seed)

    async def step(self, action: str) -> Any:
        await self.wait()
        return super().step(action)

    async def close(self) -> None:
        await self.wait()

    async def wait(self) -> None:
        await asyncio.sleep(0)
        self.loops.add(asyncio.get_running_loop())
        assert len(self.loops) == 1


class Unseeded(ValidEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return f"seed {random.random()}", {}


class RaisingInReset(ValidEnv):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        raise KeyError("file")
