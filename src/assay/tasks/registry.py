"""Create a task from a name or path and the arguments of a config."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from assay.rewards import load_object
from assay.tasks.abacus import Abacus
from assay.tasks.base import Task, user_errors
from assay.tasks.code import Code
from assay.tasks.countdown import Countdown
from assay.tasks.datasets import GSM8K, PREFIX, Math, ReasoningGym
from assay.tasks.jsonl import Jsonl, ListTask
from assay.tasks.mix import EVAL_SIZE, Mix, MixPart
from assay.types import UserError, unknown_name

ENTRY = ("name", "path", "args", "weight", "label")  # keys of a task in a mix


def make_mix(tasks: list[dict[str, Any]], seed: int = 0, eval_size: int = EVAL_SIZE) -> Mix:
    """Create a mix of tasks from entries such as {name = "gsm8k", weight = 3, path = "data/gsm8k", args = {}}."""
    if not tasks:
        raise UserError('mix needs tasks: task.args.tasks = [{name = "gsm8k", weight = 3}, {name = "math"}]')
    if eval_size < 1:
        raise UserError(f"mix: eval_size must be at least 1, not {eval_size}")
    parts = [_part(entry) for entry in tasks]
    labels = [part.label for part in parts]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"mix has two tasks {repeated[0]}: add label = NAME to one of them")
    return Mix(parts, seed, eval_size)


def _part(entry: dict[str, Any]) -> MixPart:
    for key in entry:
        if key not in ENTRY:
            raise unknown_name("key", key, ENTRY, where="of a task in mix")
    name, weight, args = entry.get("name"), entry.get("weight", 1), entry.get("args", {})
    if not isinstance(name, str) or not isinstance(args, dict):
        raise UserError('each task in mix needs a name, and args as a table, e.g. {name = "abacus", args = {}}')
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise UserError(f"mix: the weight of {name} must be a number above 0, not {weight!r}")
    label = str(entry.get("label", name.rpartition(":")[2]))
    if "/" in label or not label:
        raise UserError(f"mix: the label {label!r} must not be empty or contain a slash")
    return MixPart(label, weight, make_task(name, entry.get("path"), **args))


TASKS: dict[str, Callable[..., Task]] = {
    "abacus": Abacus,
    "code": Code,
    "countdown": Countdown,
    "gsm8k": GSM8K,
    "jsonl": Jsonl,
    "math": Math,
    "mix": make_mix,
}


def make_task(name: str, path: str | None = None, **args: Any) -> Task:
    """Create the task of this name, "reasoning_gym:chain_sum", or a path such as "my_file.py:MyTask".

    A path may name a Task class, a function that returns a Task, or rows (dicts or Prompts: a list, a mapping from
    splits to lists, or a function that returns either).
    """
    if path is not None:
        args["path"] = str(path)
    if name in TASKS:
        return call(TASKS[name], name, args)
    if name.startswith(PREFIX):
        return call(ReasoningGym, name, args, dataset_name=name.removeprefix(PREFIX))
    if name.startswith("verifiers:"):
        raise UserError(f"{name} is an environment: set env.name to it, and remove task.name")
    if ":" not in name:
        raise unknown_name("task", name, TASKS, listed=[*TASKS, f"{PREFIX}NAME", "my_file.py:MyTask"])
    return _from_object(load_object(name), name, args)


def _from_object(source: Any, name: str, args: dict[str, Any]) -> Task:
    if isinstance(source, type):
        if not issubclass(source, Task):
            raise UserError(f"{name} is a class, but not a Task: derive it from assay.tasks.Task")
        return call_user(source, name, args)
    rows_args = args
    if callable(source) and not isinstance(source, Task):
        function_args = {key: value for key, value in args.items() if key in parameters(source)}
        rows_args = {key: value for key, value in args.items() if key not in function_args}
        source = call_user(source, name, function_args)
    if isinstance(source, Task):
        if rows_args:
            raise unknown_name("argument", next(iter(rows_args)), (), where=f"of {name}")
        return source
    if isinstance(source, (str, bytes)) or not isinstance(source, Iterable):
        raise UserError(
            f"{name} must be a Task, rows (dicts or Prompts), or a function that returns either; it is {source!r:.80}"
        )
    return call_user(ListTask, name, rows_args, rows=source, name=name)  # a generator may raise while it is read


def call(function: Callable[..., Any], owner: str, args: Mapping[str, Any], **fixed: Any) -> Any:
    """Call with arguments from a config; unknown names and wrong types are a UserError that names the argument."""
    known = parameters(function)
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    for key in args:
        if (key in known or takes_anything) and key not in fixed:
            continue
        if key == "path":
            raise UserError(f"{owner} takes no path: its problems are not read from files")
        raise unknown_name("argument", key, [name for name in known if name not in fixed], where=f"of {owner}")
    missing = [key for key, required in known.items() if required and key not in args and key not in fixed]
    if missing:
        raise UserError(f"{owner} needs the argument {', '.join(missing)}")
    hints = _hints(function)
    return function(**{key: _typed(value, hints.get(key), key, owner) for key, value in args.items()}, **fixed)


def call_user(factory: Callable[..., Any], owner: str, args: Mapping[str, Any], **fixed: Any) -> Any:
    """Call a user's class or function: missing methods and exceptions are a UserError that names it."""
    if missing := getattr(factory, "__abstractmethods__", None):
        page = "environments" if hasattr(factory, "step") else "tasks"
        methods = ", ".join(f"{name}()" for name in sorted(missing))
        raise UserError(f"{owner} must define {methods}, see docs/{page}.md")
    with user_errors(f"{owner} could not be created"):
        return call(factory, owner, args, **fixed)


def parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Return the names that a callable takes, and whether each is required."""
    keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in keyword}


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(function, "__init__") if isinstance(function, type) else function)  # noqa: B009
    except (NameError, TypeError):  # annotations may name what exists only for type checkers
        return {}


def _typed(value: Any, hint: Any, key: str, owner: str) -> Any:
    if hint is None:
        return value
    arbitrary = ConfigDict(arbitrary_types_allowed=True)
    try:
        return TypeAdapter(hint, config=arbitrary).validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        expected = reason.removeprefix("Input should be ").partition(",")[0]
        if expected != reason:
            raise UserError(f"{owner}: {key} must be {expected}, not {value!r}") from None
        raise UserError(f"{owner}: {key} = {value!r} is invalid: {reason}") from None
