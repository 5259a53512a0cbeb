"""Create an environment from a name or path and the arguments of a config; adapters to and from Gymnasium.

Gymnasium is imported only when it is used.
"""

from __future__ import annotations

import pkgutil
import string
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from inspect import isawaitable
from typing import Any

from assay.envs.base import Env, Info, Observation, Step, TaskEnv, as_messages, check_attributes
from assay.envs.builtin import Calculator, CountdownTries, GuessNumber, PythonTool, Stepwise
from assay.rewards import load_object
from assay.system.awaiting import resolve, submit
from assay.tasks import Task, make_task
from assay.tasks.datasets import PREFIX
from assay.tasks.registry import call, call_user, parameters
from assay.types import UserError, missing_extra, unknown_name

MAX_TEXT = 4_096  # characters of a text space
# Prefix of a name -> loader of environments of another package.
ADAPTERS = {"verifiers:": "assay.integrations.verifiers:load_verifiers_env"}
OPTIONS = ("role", "inline", "stop", "max_steps", "slow", "max_return", "judged", "words")
ENVS: dict[str, Callable[..., Env]] = {
    env.name: env for env in (TaskEnv, GuessNumber, Stepwise, Calculator, PythonTool, CountdownTries)
}


def make_env(name: str, path: str | None = None, task: Task | None = None, **args: Any) -> Env:
    """Create the environment of this name or path.

    A path such as "my_file.py:MyEnv" names an Env class, a function that returns an Env, or anything with Gymnasium's
    `reset` and `step`. Environments such as stepwise run on `task`. A reasoning-gym dataset is a single-step
    environment. "verifiers:ENV_ID" is an installed environment of the package verifiers.
    """
    if path is not None:
        args["path"] = str(path)
    prefix = next((prefix for prefix in (PREFIX, *ADAPTERS) if name.startswith(prefix)), "")
    if prefix and task is not None:
        other = ", or set task.name to it" if prefix == PREFIX else ""
        raise UserError(f"the environment {name} has its own problems: remove task.name{other}")
    if prefix == PREFIX:
        return TaskEnv(make_task(name, **args))
    if prefix:
        load = pkgutil.resolve_name(ADAPTERS[prefix])
        return check_attributes(load(name, args))
    if name.endswith(".py"):
        raise UserError(f"{name} is a file: add the name of the class, as in {name}:MyEnv")
    if name not in ENVS and ":" not in name:
        adapted = [f"{prefix}ENV_ID" for prefix in ADAPTERS]
        raise unknown_name("environment", name, ENVS, listed=[*ENVS, f"{PREFIX}NAME", *adapted, "my_file.py:MyEnv"])
    factory: Any = ENVS[name] if name in ENVS else load_object(name)
    if isinstance(factory, Env):
        return check_attributes(factory)
    if not callable(factory):
        raise UserError(
            f"{name} must be an Env class, or a function that returns an environment; it is {factory!r:.80}"
        )
    fixed = {}
    if "task" in parameters(factory):
        default = getattr(factory, "default_task", "")
        if task is None and not default:
            raise UserError(f"the environment {name} needs a task: set task.name, e.g. --task abacus")
        fixed["task"] = task or make_task(default)
    elif task is not None:
        raise UserError(f"the environment {name} has its own problems: remove task.name")
    env = call(factory, name, args, **fixed) if name in ENVS else call_user(factory, name, args, **fixed)
    if isinstance(env, Env):
        return check_attributes(env)
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise UserError(f"{name} is not an environment: it must define reset and step, see docs/guides/environments.md")
    make = partial(call_user, factory, name, args, **fixed)
    return check_attributes(FromGymnasium(make, getattr(env, "name", name), env))


def to_gymnasium(env: Env, max_length: int = MAX_TEXT) -> Any:
    """Return a gymnasium.Env with text spaces; the messages of an observation are joined."""
    try:
        import gymnasium
    except ImportError as error:
        raise missing_extra("a Gymnasium environment", "gymnasium") from error

    def text(observation: Observation) -> str:
        messages = as_messages(observation, env.role)
        return "\n".join(message["content"] for message in messages)[:max_length]

    class TextEnv(gymnasium.Env):
        metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as gymnasium declares it
        render_mode = None

        def __init__(self) -> None:
            self.env = env.copy()
            space = gymnasium.spaces.Text(max_length, min_length=0, charset=string.printable)
            self.action_space, self.observation_space = space, space

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
            super().reset(seed=seed)
            episode_seed = int(self.np_random.integers(2**31))  # without a seed: the next one of the last generator
            observation, info = resolve(self.env.reset(seed=episode_seed, options=options))
            return text(observation), info

        def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
            observation, reward, terminated, truncated, info = resolve(self.env.step(action))
            return text(observation), float(reward), terminated, truncated, info

        def close(self) -> None:
            resolve(self.env.close())

    return TextEnv()


class FromGymnasium(Env):
    """An environment with Gymnasium's methods, text actions and text observations.

    Each copy has a separate environment, created by `make`. It is closed when the copy is deleted, or when any of
    the copies is closed.
    """

    def __init__(self, make: Callable[[], Any], name: str, inner: Any = None) -> None:
        self.make, self.name = make, name
        self.inner = make() if inner is None else inner
        self.max_steps = getattr(getattr(self.inner, "spec", None), "max_episode_steps", None) or Env.max_steps
        if hasattr(self.inner, "full"):  # the former name of max_return
            self.max_return = self.inner.full
        for option in OPTIONS:
            if hasattr(self.inner, option):
                setattr(self, option, getattr(self.inner, option))
        self._copies = weakref.WeakSet([self])
        self._close_inner = weakref.finalize(self, _close, self.inner)

    def copy(self) -> FromGymnasium:
        other = FromGymnasium(self.make, self.name)
        other._copies = self._copies
        self._copies.add(other)
        return other

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        return self.inner.reset(seed=seed)

    def step(self, action: str) -> Step:
        return self.inner.step(action)

    def gold_action(self) -> str | None:
        gold = getattr(self.inner, "gold_action", None)
        return gold() if gold else None

    def close(self) -> None:
        for closing in [env._close_inner() for env in list(self._copies)]:  # at most once per environment
            if closing is not None:
                closing.result()


def _close(inner: Any) -> Future[None] | None:
    """Close an environment. If `close` is `async`, it runs in the background."""
    result = getattr(inner, "close", lambda: None)()
    return submit(result) if isawaitable(result) else None
