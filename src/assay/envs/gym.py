"""To and from Gymnasium, which is imported only here and only when asked for."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

from assay.envs.base import Env, Info, Observation, Step, as_messages
from assay.types import UserError

MAX_TEXT = 4_096  # characters of a text space


def to_gymnasium(env: Env, max_length: int = MAX_TEXT) -> Any:
    """A gymnasium.Env with text spaces; observations that are messages become one text."""
    try:
        import gymnasium
    except ImportError as error:
        raise UserError('this needs the gymnasium extra: pip install "assay[gymnasium]"') from error

    def text(observation: Observation) -> str:
        messages = as_messages(observation, env.role)
        return "\n".join(message["content"] for message in messages)[:max_length]

    class TextEnv(gymnasium.Env):
        metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as gymnasium declares it
        render_mode = None

        def __init__(self) -> None:
            self.env = env.fresh()
            space = gymnasium.spaces.Text(max_length, min_length=0, charset=string.printable)
            self.action_space, self.observation_space = space, space

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
            super().reset(seed=seed)
            drawn = int(self.np_random.integers(2**31))  # without a seed, the next of the last one's episodes
            observation, info = self.env.reset(seed=drawn, options=options)
            return text(observation), info

        def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return text(observation), float(reward), terminated, truncated, info

        def close(self) -> None:
            self.env.close()

    return TextEnv()


class FromGymnasium(Env):
    """A foreign environment with text actions and observations. Each episode has one of its own, made by `make`."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        self.make, self.name = make, name
        self.inner = make()
        self.max_steps = getattr(getattr(self.inner, "spec", None), "max_episode_steps", None) or Env.max_steps
        for option in ("role", "inline", "stop", "max_steps", "slow", "full", "judged", "words"):
            if hasattr(self.inner, option):
                setattr(self, option, getattr(self.inner, option))

    def fresh(self) -> FromGymnasium:
        return FromGymnasium(self.make, self.name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        return self.inner.reset(seed=seed)

    def step(self, action: str) -> Step:
        return self.inner.step(action)

    def gold_action(self) -> str | None:
        gold = getattr(self.inner, "gold_action", None)
        return gold() if gold else None

    def close(self) -> None:
        if hasattr(self.inner, "close"):
            self.inner.close()
