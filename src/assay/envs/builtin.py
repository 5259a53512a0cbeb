"""Built-in environments: guess a number, Countdown with feedback, calculator, Python, and solutions line by line."""

from __future__ import annotations

import pickle
import pkgutil
import random
import re
import string
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from inspect import isawaitable
from typing import Any

from assay.envs.base import Env, Info, Observation, Step, TaskEnv, as_messages, check_attributes
from assay.rewards import Unreadable, extract, load_object
from assay.rewards.expressions import calculate, format_number, run_python
from assay.system.awaiting import resolve, submit
from assay.system.sandbox import WorkerSettings, environment
from assay.system.spawn import BadMessage
from assay.system.worker_pool import ItemFailure, WorkerPool
from assay.tasks import Task, make_task
from assay.tasks.datasets import PREFIX
from assay.tasks.registry import call, call_user, parameters
from assay.types import Prompt, Status, UserError, Verdict, missing_extra, unknown_name

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
        verdict: Verdict = resolve(self._judge(action, self.prompt.answer, self.prompt.fields))  # exact and fast
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


class Calculator(TaskEnv):
    """Completes `<<expression=` with the exact result and `>>`, as tokens that are not trained on.

    Decoding stops at every "="; outside of << >> it continues unchanged. If the token with "=" holds more text, the
    policy states a result itself, which is left unchanged.
    """

    name = "calculator"
    inline = True
    stop = ("=",)
    max_steps = 64

    def __init__(self, task: Task, before: str = "<<", after: str = ">>", max_steps: int = 64) -> None:
        super().__init__(task)
        if not before or not after or max_steps < 1:
            raise UserError("calculator: before and after must not be empty, and max_steps must be at least 1")
        self.before, self.after, self.max_steps = before, after, max_steps
        self.space = word_separator(task)

    def extra_words(self) -> list[str]:
        return [self.before, self.after, "=", "error"]

    def gold_completion(self, prompt: Prompt) -> str:
        return recompute_calls(self.task.gold_completion(prompt), self.before, self.after, self.space)

    def step(self, action: str) -> Step:
        self.reply += action
        if self.stop[0] not in action:
            return self.finish(self.reply)
        result = complete_call(self.reply, self.before, self.after, self.space)
        self.reply += result
        return result, 0.0, False, False, {}


def complete_call(reply: str, before: str, after: str, space: str = "") -> str:
    """Return the continuation of a reply that ends in "<<48/2=": "24>>". Empty if there is no open call."""
    call = reply.rpartition(before)[2] if before in reply else after
    if after in call or not call.rstrip().endswith("=") or call.count("=") > 1:
        return ""
    try:
        result = format_number(calculate(call.rstrip().removesuffix("=")))
    except Unreadable:
        result = "error"
    return f"{space}{result}{space}{after}"


def recompute_calls(solution: str, before: str, after: str, space: str = "") -> str:
    """Replace the results of calls in a worked solution by the calculator's: GSM8K has <<8*18=144.00>>, or rounds."""
    reply = ""
    while "=" in solution:
        written, _, solution = solution.partition("=")
        reply += f"{written}="
        if result := complete_call(reply, before, after, space):
            reply += result
            stated, closing, rest = solution.partition(after)
            solution = rest if closing and before not in stated else solution
    return reply + solution


def word_separator(task: Task) -> str:
    return " " if getattr(task, "style", "") == "tokens" else ""


CALL = ("<<", "=", ">>")  # of the calculator: start of a call, request for the result, end of the call
TURNS_PER_LINE = 8  # maximum on average for lines with calls: every "=" ends a turn
_RIGHT_SIDE = re.compile(r"\s*(-?[0-9.]++)(?!\s*[-+*/x×÷·^%(]|\s[0-9]|,[0-9])")  # a complete number
_OPERATOR = re.compile(r"[0-9)]\s*[-+*/]")
_EQUATION_CHARACTERS = "0123456789.+-*/() "
_CONTINUES = "x×÷·^%$="  # before the left side, these are operations that belong to it but are not parsed


class Stepwise(TaskEnv):
    """The policy continues its own reply, one line per step, until a line holds the final answer or the reply ends.

    `line_reward` is added for a line with a correct equation ("4 + 5 = 9"), and subtracted for one with a wrong
    equation. With `calculator`, `<<48/2=` is completed within a line as by `Calculator`.
    """

    name = "stepwise"
    inline = True

    def __init__(
        self,
        task: Task,
        separator: str = "\n",
        max_lines: int = 12,
        line_reward: float = 0.0,
        calculator: bool = False,
    ) -> None:
        super().__init__(task)
        if not separator or max_lines < 1:
            raise UserError("stepwise: separator must not be empty, and max_lines must be at least 1")
        self.stop, self.max_lines, self.line_reward = (separator,), max_lines, line_reward
        self.max_steps = max_lines
        self.calculator, self.space = calculator, word_separator(task)
        if calculator:
            self.stop, self.max_steps = (separator, CALL[1]), TURNS_PER_LINE * max_lines

    def extra_words(self) -> list[str]:
        return [*CALL, "error"] if self.calculator else []

    def gold_completion(self, prompt: Prompt) -> str:
        solution = super().gold_completion(prompt)
        return recompute_calls(solution, CALL[0], CALL[2], self.space) if self.calculator else solution

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self.lines, self.line = 0, ""
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Step:
        self.reply += action
        self.line += action
        if self.calculator and self.stop[0] not in action and CALL[1] in action:
            result = complete_call(self.reply, CALL[0], CALL[2], self.space)
            self.reply += result
            self.line += result
            return result, 0.0, False, False, {}
        line, self.line = self.line, ""
        self.lines += 1
        reward = self.line_reward * check_equations(line)
        ended = self.stop[0] not in action or extract(line, self.default_extract).found
        if ended or self.lines >= self.max_lines:
            return self.finish(self.reply, reward)
        return "", reward, False, False, {}


def check_equations(line: str) -> int:
    """Return 1 if all equations of a line are correct, -1 if one is wrong, 0 if there is none."""
    pairs = equations(line)
    try:
        return 0 if not pairs else 1 if all(calculate(left) == calculate(right) for left, right in pairs) else -1
    except Unreadable:
        return 0


def equations(line: str) -> list[tuple[str, str]]:
    """Return both sides of each "4 + 5 = 9", in linear time; "9 = 9" and the end of "3 x 4 + 5 = 17" do not count."""
    pairs, start = [], 0
    for equals in re.finditer("=", line):
        before = line[start : equals.start()].rstrip()
        rest = before.rstrip(_EQUATION_CHARACTERS)
        left = before[len(rest) :]
        right = _RIGHT_SIDE.match(line, equals.end())
        start = equals.end()
        comma = rest.endswith(",") and left[:1].isdigit()  # "1,004 + 5", but not "first, 4 + 5"
        cut_off = comma or rest[-1:] in (*_CONTINUES,) or (rest and left.lstrip()[:1] in ("+", "-", "*", "/"))
        complete = (left[-1:].isdigit() or left.endswith(")")) and not cut_off
        if right and complete and _OPERATOR.search(left):
            pairs.append((left, right[1]))
            start = right.end()
    return pairs


class PythonTool(TaskEnv):
    """The policy writes <python>sum(range(10))</python>; <result>45</result> is appended and not trained on.

    Expressions are evaluated in strictly sandboxed processes. The token that ends a call may hold more text: with "><"
    the policy has begun the result, which is then completed.
    """

    name = "python"
    inline = True
    stop = ("</python>",)
    _call = re.compile(r"<python>((?:(?!</?python>).)*)</python>(?:(?!</?python>).)*\Z", re.DOTALL)

    def __init__(
        self, task: Task, max_steps: int = 8, timeout_s: float = 2.0, memory_gb: float = 1.0, slow: bool = True
    ) -> None:
        super().__init__(task)
        if max_steps < 1:
            raise UserError("python: max_steps must be at least 1")
        if not timeout_s > 0:
            raise UserError(f"python: timeout_s must be above 0, not {timeout_s}")
        self.max_steps, self.slow, self.timeout_s = max_steps, slow, timeout_s
        function = pickle.dumps(run_python)
        settings = WorkerSettings(function, timeout_s, memory_gb, "strict", False, environment("strict"))
        self.pool = WorkerPool(settings, workers=2, parse=_result_text)

    def step(self, action: str) -> Step:
        return self.step_all([self], [action])[0]

    def step_all(self, episodes: Sequence[Env], actions: Sequence[str]) -> list[Step]:
        """Evaluate all expressions in parallel."""
        calls = [self._call.search(action) for action in actions]
        expressions = [(call[1],) for call in calls if call]
        results = iter(self.pool.map(expressions) if expressions else ())
        steps = []
        for episode, action, wanted in zip(episodes, actions, calls, strict=True):
            assert isinstance(episode, PythonTool)
            steps.append(episode.apply(action, next(results) if wanted else "no expression"))
        return steps

    def apply(self, action: str, result: str | ItemFailure) -> Step:
        """Continue the reply with the result of a call, or finish the episode if the action is not a call."""
        self.reply += action
        if self.stop[0] not in action:
            return self.finish(self.reply)
        if isinstance(result, ItemFailure):
            result = f"took longer than {self.timeout_s:g} s" if result.timed_out else result.detail
        shown = f"<result>{result}</result>".removeprefix(action.rpartition(self.stop[0])[2])
        self.reply += shown
        return shown, 0.0, False, False, {"result": result}

    def close(self) -> None:
        self.pool.close()


def _result_text(value: Any) -> str:
    if not isinstance(value, str):
        raise BadMessage("it is not a text")
    return value


# Environments by name

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
