"""Create an environment from a name or path and the arguments of a config."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from assay.envs.base import Env, TaskEnv, check_attributes
from assay.envs.games import CountdownTries, GuessNumber
from assay.envs.gym import FromGymnasium
from assay.envs.tools import Calculator, PythonTool, Stepwise
from assay.rewards import load_object
from assay.tasks import Task, make_task
from assay.tasks.reasoning_gym import PREFIX
from assay.tasks.registry import call, call_user, parameters
from assay.types import UserError, unknown_name

ENVS: dict[str, Callable[..., Env]] = {
    env.name: env for env in (TaskEnv, GuessNumber, Stepwise, Calculator, PythonTool, CountdownTries)
}


def make_env(name: str, path: str | None = None, task: Task | None = None, **args: Any) -> Env:
    """Create the environment of this name or path.

    A path such as "my_file.py:MyEnv" names an Env class, a function that returns an Env, or anything with Gymnasium's
    `reset` and `step`. Environments such as stepwise run on `task`. A reasoning-gym dataset is a single-step
    environment.
    """
    if path is not None:
        args["path"] = str(path)
    if name.startswith(PREFIX) and task is None:
        return TaskEnv(make_task(name, **args))
    if name.startswith(PREFIX):
        raise UserError(f"the environment {name} has its own problems: remove task.name, or set task.name to it")
    if name.endswith(".py"):
        raise UserError(f"{name} is a file: add the name of the class, as in {name}:MyEnv")
    if name not in ENVS and ":" not in name:
        raise unknown_name("environment", name, ENVS, listed=[*ENVS, f"{PREFIX}NAME", "my_file.py:MyEnv"])
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
        raise UserError(f"{name} is not an environment: it must define reset and step, see docs/environments.md")
    make = partial(call_user, factory, name, args, **fixed)
    return check_attributes(FromGymnasium(make, getattr(env, "name", name), env))
