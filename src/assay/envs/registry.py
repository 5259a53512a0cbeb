"""From a name or a dotted path, and the arguments of a config, to an environment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from assay.envs.arithmetic import Calculator, Stepwise
from assay.envs.base import Env, TaskEnv, check_attributes
from assay.envs.games import CountdownTries, GuessNumber
from assay.envs.gym import FromGymnasium
from assay.envs.python_tool import PythonTool
from assay.rewards import load_object
from assay.tasks import Task, make_task
from assay.tasks.reasoning_gym import PREFIX
from assay.tasks.registry import call, call_own, parameters
from assay.types import UserError, unknown_name

ENVS: dict[str, Callable[..., Env]] = {
    env.name: env for env in (TaskEnv, GuessNumber, Stepwise, Calculator, PythonTool, CountdownTries)
}


def make_env(name: str, path: str | None = None, task: Task | None = None, **args: Any) -> Env:
    """The environment of this name, or what a dotted path such as "my_file.py:MyEnv" leads to.

    A dotted path names an Env class, a function that returns one, or anything with Gymnasium's `reset` and `step`.
    `task` is what environments such as stepwise are about. A data set of reasoning-gym is one step of its own.
    """
    if path is not None:
        args["path"] = str(path)
    if name.startswith(PREFIX) and task is None:
        return TaskEnv(make_task(name, **args))
    if name.startswith(PREFIX):
        raise UserError(f"the environment {name} has problems of its own: leave task.name out, or name it as the task")
    if name.endswith(".py"):
        raise UserError(f"{name} is a file: name the class in it too, as {name}:MyEnv")
    if name not in ENVS and ":" not in name:
        raise unknown_name("environment", name, ENVS, listed=[*ENVS, f"{PREFIX}NAME", "my_file.py:MyEnv"])
    make: Any = ENVS[name] if name in ENVS else load_object(name)
    if isinstance(make, Env):
        return check_attributes(make)
    if not callable(make):
        raise UserError(f"{name} must be an Env class, or a function that returns an environment; it is {make!r:.80}")
    fixed = {}
    if "task" in parameters(make):
        default = getattr(make, "default_task", "")
        if task is None and not default:
            raise UserError(f"the environment {name} needs a task: set task.name, e.g. --task abacus")
        fixed["task"] = task or make_task(default)
    elif task is not None:
        raise UserError(f"the environment {name} has problems of its own: leave task.name out")
    made = call(make, name, args, **fixed) if name in ENVS else call_own(make, name, args, **fixed)
    if isinstance(made, Env):
        return check_attributes(made)
    if not (hasattr(made, "reset") and hasattr(made, "step")):
        raise UserError(f"{name} is no environment: it needs reset and step, see docs/environments.md")
    return check_attributes(FromGymnasium(partial(call_own, make, name, args, **fixed), getattr(made, "name", name)))
