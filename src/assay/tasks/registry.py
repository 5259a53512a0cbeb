"""Create a task from a name or path and the arguments of a config, several tasks as one, and the judge of a task."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from assay.config import JudgeConfig, RewardConfig
from assay.rewards import Judge, JudgePanel, JudgePool, Judging, RewardMix, load_object
from assay.rewards.functions import judge_at
from assay.rewards.judge import JudgeByTask
from assay.tasks.abacus import Abacus
from assay.tasks.base import UNLIMITED, LazyPrompts, Task, check_split, stable_hash, user_errors
from assay.tasks.code import Code
from assay.tasks.countdown import Countdown
from assay.tasks.datasets import GSM8K, PREFIX, Jsonl, ListTask, Math, ReasoningGym
from assay.types import TASK_LABEL, Prompt, UserError, unknown_name

EVAL_SIZE = 500  # problems of a task whose validation or test split is endless
MAX_CYCLE = 10_000  # prompts after which the order of tasks repeats; weights are rounded accordingly


@dataclass(frozen=True)
class MixPart:
    """A task of a mix."""

    label: str  # in metrics, and at the start of prompt ids
    weight: float
    task: Task

    def labelled(self, prompt: Prompt) -> Prompt:
        """Return a prompt whose id starts with the label, which is also one of its fields."""
        if TASK_LABEL in prompt.fields:
            raise UserError(f"the fields of {prompt.id} use the reserved name {TASK_LABEL}: rename it")
        prompt_id = prompt.id if prompt.id.startswith(f"{self.label}/") else f"{self.label}/{prompt.id}"
        return replace(prompt, id=prompt_id, fields={**prompt.fields, TASK_LABEL: self.label})


class MixedPrompts(LazyPrompts):
    """Endless problems of several tasks. Every cycle has the same number of problems of a task, evenly distributed.

    A problem depends on its index only. A split with an end is repeated, each time in another order.
    """

    def __init__(self, parts: Sequence[MixPart], prompts: Sequence[Sequence[Prompt]], seed: int) -> None:
        self.parts, self.prompts, self.seed = parts, prompts, seed
        self.counts = cycle_counts([part.weight for part in parts])
        self.cycle = interleave(self.counts)
        super().__init__(self._problem, UNLIMITED)

    def filtered(self, keep: Callable[[Sequence[Prompt]], Sequence[Prompt]]) -> MixedPrompts:
        """Return the mix without the problems that `keep` leaves out of a task."""
        return MixedPrompts(self.parts, [keep(prompts) for prompts in self.prompts], self.seed)

    @property
    def rejected(self) -> int:  # type: ignore[override]
        return sum(prompts.rejected for prompts in self.prompts if isinstance(prompts, LazyPrompts))

    def _problem(self, index: int) -> Prompt:
        cycle, position = divmod(index, len(self.cycle))
        number, rank = self.cycle[position]
        part, prompts = self.parts[number], self.prompts[number]
        epoch, index = divmod(cycle * self.counts[number] + rank, len(prompts))
        if len(prompts) < UNLIMITED:  # generated problems are independent of each other
            index = permuted(index, len(prompts), f"{self.seed}/{part.label}/{epoch}")
        return part.labelled(prompts[index])


class Mix(Task):
    """Several tasks with weights. `make_mix` of the registry creates it from settings."""

    name = "mix"

    def __init__(self, parts: Sequence[MixPart], seed: int = 0, eval_size: int = EVAL_SIZE) -> None:
        self.parts, self.seed, self.eval_size = parts, seed, eval_size
        self.default_extract = parts[0].task.default_extract
        words = [getattr(part.task, "words", None) for part in parts]
        if all(words):
            self.words = lambda: [*dict.fromkeys(word for task_words in words if task_words for word in task_words())]

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return endless train problems; of other splits all problems, with the tasks interleaved."""
        check_split(split)
        prompts = [part.task.prompts(split) for part in self.parts]
        for part, part_prompts in zip(self.parts, prompts, strict=True):
            if not len(part_prompts):
                raise UserError(f"the {split} split of {part.label} is empty")
        if split == "train":
            return MixedPrompts(self.parts, prompts, self.seed)
        finite = [part[: self.eval_size] if len(part) >= UNLIMITED else part for part in prompts]
        order = sorted(
            ((rank + 0.5) / part.weight, number, rank)
            for number, part in enumerate(self.parts)
            for rank in range(len(finite[number]))
        )
        return [self.parts[number].labelled(finite[number][rank]) for _, number, rank in order]

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        judges = tuple(part.task.judge(extract, strict) for part in self.parts)
        return JudgeByTask(judges, tuple(part.label for part in self.parts))

    def gold_completion(self, prompt: Prompt) -> str:
        return self._task(prompt).gold_completion(prompt)

    def bare_question(self, prompt: Prompt) -> str:
        return self._task(prompt).bare_question(prompt)

    def _task(self, prompt: Prompt) -> Task:
        return next(part.task for part in self.parts if part.label == prompt.fields[TASK_LABEL])


def cycle_counts(weights: Sequence[float]) -> list[int]:
    """Return the number of prompts of each task in a cycle, in proportion to the weights."""
    exact = [Fraction(weight).limit_denominator(1000) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    common = math.gcd(*counts)
    counts = [count // common for count in counts] if common else counts
    if min(counts) < 1 or sum(counts) > MAX_CYCLE:
        counts = [max(1, round(weight / sum(weights) * MAX_CYCLE)) for weight in weights]
    return counts


def interleave(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (task, its n-th prompt) for each position of a cycle; the next one is of the task that lags most."""
    total, placed = sum(counts), [0] * len(counts)
    order = []
    for position in range(1, total + 1):
        number = max(range(len(counts)), key=lambda i: counts[i] * position - placed[i] * total)
        order.append((number, placed[number]))
        placed[number] += 1
    return order


def permuted(index: int, size: int, key: Any) -> int:
    """Return the image of an index in a pseudorandom permutation of range(size), without computing all of it.

    A Feistel network over the next power of 4; images outside of the range are permuted again (cycle walking).
    """
    bits = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << bits) - 1
    while True:
        left, right = index >> bits, index & mask
        for turn in range(4):
            left, right = right, left ^ (stable_hash(f"{key}/{turn}/{right}") & mask)
        index = left << bits | right
        if index < size:
            return index


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
        page = "environments" if hasattr(factory, "step") else "data"
        methods = ", ".join(f"{name}()" for name in sorted(missing))
        raise UserError(f"{owner} must define {methods}, see docs/guides/{page}.md")
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


TASK_JUDGE, MODEL_JUDGE = "task", "judge"  # in reward.functions


def build_judge_pool(cfg: RewardConfig, task: Task | None, judge: JudgeConfig | None = None) -> Judging:
    """What judges answers: verifiers and reward functions in worker processes, a model (`judge`) at its endpoint.

    `task`: None if the settings name reward functions only.
    """
    paths, weights = reward_functions(cfg)
    if MODEL_JUDGE not in paths:
        return judge_pool(build_judge(cfg, task), cfg)
    from assay.rewards.reward_model import make_model_judge  # late: it imports an HTTP client

    place = paths.index(MODEL_JUDGE)
    part_names(paths)  # refuses repeated functions
    model, weight = make_model_judge(judge or JudgeConfig()), weights[place]
    mix = None if place else shaping(cfg, model)
    if len(paths) == 1:
        return JudgePanel(model, weight, mix=mix)
    others = {"functions": paths[:place] + paths[place + 1 :], "weights": weights[:place] + weights[place + 1 :]}
    verifiers = build_judge(cfg.model_copy(update=others), task, shaped=mix is None)
    return JudgePanel(model, weight, judge_pool(verifiers, cfg), mix)


def judge_pool(judge: Judge, cfg: RewardConfig) -> JudgePool:
    return JudgePool(judge, cfg.workers, cfg.timeout_s, sandbox=cfg.sandbox, pass_env=cfg.pass_env, pool=cfg.pool)


def build_judge(cfg: RewardConfig, task: Task | None, shaped: bool = True) -> Judge:
    """The judge of the settings. Weights for accuracy, format and length apply to the first of several functions.

    `shaped`: false if the first function is elsewhere.
    """
    paths, weights = reward_functions(cfg)

    def judge_of(path: str) -> Judge:
        if path != TASK_JUDGE:
            return judge_at(path)
        assert task is not None
        return task.judge(cfg.extract or None, cfg.strict)

    first, *others = [judge_of(path) for path in paths]
    mix = replace(shaping(cfg, first), others=tuple(others), shaped=shaped)
    return replace(mix, weights=tuple(weights), names=part_names(paths)) if cfg.functions else mix


def shaping(cfg: RewardConfig, judge: Judge) -> RewardMix:
    values = cfg.model_dump(include={field.name for field in fields(RewardMix)} - {"weights"})
    return RewardMix(judge, **values | {"format_pattern": cfg.format_pattern or None})


def reward_functions(cfg: RewardConfig) -> tuple[list[str], list[float]]:
    """Paths of the reward functions (TASK_JUDGE: the task's judge), and their weights."""
    if cfg.function and cfg.functions:
        raise UserError("reward.function and reward.functions are both set: remove one of them")
    if not cfg.functions:
        if cfg.weights:
            raise UserError("reward.weights needs reward.functions, with one function per weight")
        return [cfg.function or TASK_JUDGE], [1.0]
    weights = cfg.weights or [1.0] * len(cfg.functions)
    if len(weights) != len(cfg.functions):
        raise UserError(f"reward.functions has {len(cfg.functions)} entries and reward.weights {len(weights)}")
    return cfg.functions, weights


def part_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Names of reward functions in metrics: the name of the function, with its file if two have the same name."""
    short = [path.rpartition(":")[2] for path in paths]
    full = [f"{Path(path.rpartition(':')[0]).stem}.{name}" for path, name in zip(paths, short, strict=True)]
    names = tuple(long if short.count(name) > 1 else name for name, long in zip(short, full, strict=True))
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"reward.functions names {repeated[0]} more than once: give each function once")
    return names
