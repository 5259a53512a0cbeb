"""Environments of the package `verifiers`: its own loop plays an episode, with the policy of the run as its client.

verifiers is imported only when it is used.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import json
import logging
import math
import os
import re
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

from assay.endpoint import LoopThread
from assay.envs.base import Env, Info, Observation, Step, as_messages, error_step, safe_reset
from assay.rewards import importing
from assay.tasks.base import LazyPrompts
from assay.tasks.sources import DataRow, RowTask, list_source
from assay.types import Message, Prompt, Status, UserError, Verdict, describe_user_error, missing_extra

PREFIX = "verifiers:"
ROW = "verifiers_row"  # the prompt field with the position of its row in the dataset
DATASET = "verifiers_dataset"  # and that of the dataset: "train" or "test"
TOOLS = """# Tools

You may call these functions:
<tools>
%s
</tools>
Write a call as a JSON object with the name and the arguments:
<tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>"""
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_failures: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("failures", default=None)


def load_verifiers_env(name: str, args: Mapping[str, Any]) -> VerifiersEnv:
    """Load the environment "verifiers:ENV_ID", whose package must be installed; `args` are those of its loader."""
    if importing.guard is not None:
        importing.guard(name)
    package = import_verifiers(name)
    env_id = name.removeprefix(PREFIX)
    try:
        with kept_signal_handlers():
            env = package.load_environment(env_id, **args)
    except (Exception, SystemExit) as error:
        raise UserError(f"{name} could not be loaded: {describe_user_error(error)}") from error
    return VerifiersEnv(env, name)


def import_verifiers(what: str) -> Any:
    try:
        import verifiers  # type: ignore[import-not-found,import-untyped,unused-ignore]

        verifiers.load_environment  # noqa: B018  # loads the classes
    except ImportError as error:
        raise missing_extra(f"the environment {what}", "verifiers") from error
    if "VF_LOG_LEVEL" not in os.environ:  # failures are reported as statuses
        logging.getLogger("verifiers").setLevel(logging.CRITICAL)
    return verifiers


def is_verifiers_env(value: Any) -> bool:
    """Whether an object is an environment of verifiers, without importing the package."""
    modules = [cls.__module__ for cls in type(value).__mro__ if cls.__name__ == "Environment"]
    return any(module.startswith("verifiers.") for module in modules)


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers of this process: environments of verifiers replace those for Ctrl-C and SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class VerifiersEnv(Env):
    """An environment of verifiers. Copies share it, and the thread with its event loop."""

    role = "user"

    def __init__(self, env: Any, name: str = "verifiers") -> None:
        if not hasattr(env, "rollout") or not hasattr(env, "rubric"):
            raise UserError(f"{name} is no environment of verifiers: it has no rollout or rubric")
        if getattr(env.rubric, "has_group_rewards", False):
            raise UserError(f"{name} has reward functions that compare answers to a prompt, which are not supported")
        self.env, self.name = env, name
        turns = getattr(env, "max_turns", -1)
        self.max_steps = turns if isinstance(turns, int) and turns > 0 else Env.max_steps
        self.threshold = float(getattr(env, "pass_threshold", 0.5))
        watch_rewards(env)
        self.tools = tool_text(getattr(env, "tool_defs", None) or ())
        self.loop = LoopThread()
        self.rollout: PlayedRollout | None = None
        self.original = self  # of which copies are made; rollouts refer to it, so that deleting a copy ends its rollout
        self.datasets = read_datasets(env, name)
        self.rows = VerifiersRows(self.datasets, self)
        self.has_all = self.rows.has_all
        self.instruction = self.default_extract = ""

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The rows of the dataset. If the environment changes their messages when it starts, it is started for each."""
        prompts = self.rows.prompts(split)
        if self._first_messages(prompts[0]) == prompts[0].messages:
            return prompts

        def started(index: int) -> Prompt:
            return replace(prompts[index], messages=self._first_messages(prompts[index]))

        return LazyPrompts(started, len(prompts))

    def _first_messages(self, prompt: Prompt) -> tuple[Message, ...]:
        episode = self.copy()
        messages, _ = safe_reset(episode, None, {"prompt": prompt})
        return as_messages(messages, self.role)

    def copy(self) -> Self:
        other = super().copy()
        other.rollout = None
        return other

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        prompt: Prompt | None = (options or {}).get("prompt")
        if prompt is None:
            train = self.prompts("train")
            prompt = train[(seed or 0) % len(train)]
        row = self.datasets[prompt.fields[DATASET]][prompt.fields[ROW]]
        self.rollout = PlayedRollout(self.original, row)
        return self.loop.call(self.rollout.begin()), {"id": prompt.id}

    def step(self, action: str) -> Step:
        return self.loop.call(self._played().advance(action))

    def step_all(self, episodes: Sequence[Env], actions: Sequence[str]) -> list[Step]:
        """Advance all episodes in one event loop: what they await, such as requests of tools, runs concurrently."""
        played = [episode._played() for episode in episodes if isinstance(episode, VerifiersEnv)]

        async def advance() -> list[Step | BaseException]:
            steps = (one.advance(action) for one, action in zip(played, actions, strict=True))
            return await asyncio.gather(*steps, return_exceptions=True)

        results = self.loop.call(advance())
        return [error_step(result) if isinstance(result, BaseException) else result for result in results]

    def _played(self) -> PlayedRollout:
        assert self.rollout is not None, "reset comes first"
        return self.rollout

    def close(self) -> None:
        """End rollouts that are under way, and release what the environment holds."""
        if not self.loop.running:
            return
        self.loop.call(self._tear_down())
        self.loop.stop()

    async def _tear_down(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.env._teardown()
        self.env._teardown = _nothing  # verifiers calls it once more when the process exits


async def _nothing() -> None:
    pass


class PlayedRollout:
    """One rollout of an environment, which waits whenever it needs a reply of the policy."""

    def __init__(self, owner: VerifiersEnv, row: Mapping[str, Any]) -> None:
        self.owner, self.row = owner, row
        self.requests: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.replies: asyncio.Queue[str] = asyncio.Queue()
        self.task: asyncio.Task[Any] | None = None
        self.seen: list[Message] = []  # the messages that the policy has read or written

    async def begin(self) -> Observation:
        """Run the environment up to its first request; the messages of the prompt."""
        client = policy_client_class()(self.requests, self.replies)
        self.task = asyncio.ensure_future(self.owner.env.rollout(dict(self.row), client, "policy", {}))
        loop, task = self.owner.loop, self.task
        self.cancel = weakref.finalize(self, lambda: loop.post(task.cancel) if loop.running else None)
        self.cancel.atexit = False
        request = await self._request()
        if request is None:
            state = task.result()
            reason = state.get("error") or "it ended"
            raise UserError(f"{self.owner.name}: the episode ended before the first reply of the policy: {reason}")
        self.seen = as_text_messages(request, self.owner.tools)
        return self.seen

    async def advance(self, action: str) -> Step:
        """Pass the policy's reply to the environment; what it says next, or the result of the episode."""
        await self.replies.put(action)
        request = await self._request()
        if request is None:
            assert self.task is not None
            return await self._result(self.task.result())
        messages = as_text_messages(request, self.owner.tools)
        expected = [*self.seen, Message(role="assistant", content=action)]
        if messages[: len(self.seen)] != self.seen or len(messages) <= len(expected):
            raise UserError("the environment changed earlier messages, or added none: such episodes are not supported")
        new = messages[len(expected) :]
        self.seen = [*expected, *new]
        return new, 0.0, False, False, {}

    async def _request(self) -> list[Any] | None:
        """The messages of the next request; None if the rollout has ended. Raises what the rollout raised."""
        assert self.task is not None
        waiting = asyncio.ensure_future(self.requests.get())
        try:
            await asyncio.wait([self.task, waiting], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            self.task.result()
            return None
        finally:
            waiting.cancel()

    async def _result(self, state: Any) -> Step:
        """Score the rollout. A reward function that raises, or an error of the environment, is an error."""
        if error := state.get("error"):
            return error_step(error)
        failures: list[str] = []
        _failures.set(failures)
        rubric = self.owner.env.rubric
        try:
            await rubric.score_rollout(state)
        finally:
            await rubric.cleanup(state)
        reward = float(state["reward"])
        if failures or not math.isfinite(reward):
            detail = failures[0] if failures else f"the reward is {reward}"
            return "", 0.0, True, False, {"verdict": Verdict(0.0, Status.ERROR, detail=detail)}
        metrics = state.get("metrics") or {}
        parts = {str(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        status = Status.OK if reward >= self.owner.threshold else Status.WRONG
        return "", reward, True, False, {"verdict": Verdict(reward, status, parts=parts)}


@functools.cache
def policy_client_class() -> Any:
    """Stands for the model server in a rollout of verifiers: its requests wait for the policy of the run."""
    from verifiers.clients import Client  # type: ignore[import-not-found,unused-ignore]
    from verifiers.types import Response, ResponseMessage, ToolCall  # type: ignore[import-not-found,unused-ignore]

    class PolicyClient(Client):
        def __init__(self, requests: asyncio.Queue[list[Any]], replies: asyncio.Queue[str]) -> None:
            super().__init__(None)
            self.requests, self.replies = requests, replies

        async def get_response(self, prompt: Any, model: str, *args: Any, tools: Any = None, **options: Any) -> Any:
            await self.requests.put(list(prompt))
            text = await self.replies.get()
            calls = [ToolCall(**call) for call in tool_calls(text)] if tools else []
            message = ResponseMessage(
                content=text,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="policy", created=0, model=model, message=message)

        async def close(self) -> None:
            pass

    unused = {name: _unused for name in Client.__abstractmethods__ if name != "close"}
    return type("PolicyClient", (PolicyClient,), unused)


def _unused(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("replies come from the policy of the run")


class VerifiersRows(RowTask):
    """The rows of the datasets of an environment as prompts."""

    def __init__(self, datasets: Mapping[str, Sequence[Mapping[str, Any]]], owner: VerifiersEnv) -> None:
        located = {
            split: [{**row, ROW: index, DATASET: split} for index, row in enumerate(rows)]
            for split, rows in datasets.items()
        }
        whole = next(iter(located.values())) if len(located) == 1 else None
        super().__init__(list_source(located if whole is None else whole, owner.name))
        self.name, self.tools = owner.name, owner.tools

    def _convert(self, row: DataRow, origin: str) -> Prompt:
        return self.to_prompt(row, origin)

    def to_prompt(self, row: DataRow, split: str) -> Prompt:
        try:
            messages = as_text_messages(row.column("prompt"), self.tools)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
        answer = row.values.get("answer")
        return Prompt(
            id=f"{self.name}/{split}/{row.key}",
            messages=tuple(messages),
            answer=answer if isinstance(answer, str) else "",
            fields={name: row.values[name] for name in (ROW, DATASET)},
        )


def read_datasets(env: Any, name: str) -> dict[str, list[dict[str, Any]]]:
    """The train dataset as "train", the evaluation dataset as "test"; only one of them if the other does not exist."""
    try:
        built = {"train": env.build_dataset(), "test": env.build_eval_dataset()}
    except Exception as error:
        raise UserError(f"the dataset of {name} cannot be read: {describe_user_error(error)}") from error
    datasets = {split: list(dataset) for split, dataset in built.items() if dataset is not None}
    if not any(datasets.values()):
        raise UserError(f"{name} has no dataset")
    return {split: rows for split, rows in datasets.items() if rows}


def watch_rewards(env: Any) -> None:
    """Record exceptions of reward functions, which verifiers itself logs and counts as 0."""
    rubrics, seen = [env.rubric], set()
    rubrics += [inner.rubric for inner in (getattr(env, "envs", None) or ())]
    while rubrics:
        rubric = rubrics.pop()
        if id(rubric) in seen:
            continue
        seen.add(id(rubric))
        rubric.funcs = [watched(function) for function in rubric.funcs]
        rubrics += getattr(rubric, "rubrics", ())


def watched(function: Callable[..., Any]) -> Callable[..., Any]:
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        try:
            result = function(*args, **kwargs)
            return float(await result if hasattr(result, "__await__") else result)
        except Exception as error:
            failures = _failures.get()
            if failures is not None:
                failures.append(f"the reward function {name}: {describe_user_error(error)}")
            raise

    return call


# -- messages and tools as text


def as_text_messages(messages: Any, tools: str = "") -> list[Message]:
    """Messages with text only. Definitions of tools are added to the system message."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    result = [_as_text(message) for message in messages]
    if not tools:
        return result
    if result and result[0]["role"] == "system":
        return [Message(role="system", content=f"{result[0]['content']}\n\n{tools}"), *result[1:]]
    return [Message(role="system", content=tools), *result]


def _as_text(message: Any) -> Message:
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if isinstance(content, list | tuple):
        parts = [part.get("text") for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise UserError("a message has images or sound: only text is supported")
        content = "".join(parts)
    content = "" if content is None else str(content)
    if role == "assistant" and calls and "<tool_call>" not in content:
        shown = (call_text(call.get("name"), call.get("arguments")) for call in calls)
        content = "\n".join([*([content] if content else []), *shown])
    return Message(role="user" if role == "text" else str(role), content=content)


def call_text(name: Any, arguments: Any) -> str:
    values = arguments if not isinstance(arguments, str) else json.loads(arguments or "{}")
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': values})}\n</tool_call>"


def tool_text(definitions: Sequence[Any]) -> str:
    """The description of tools for the system message; empty without tools."""
    lines = [
        json.dumps({"name": one.name, "description": one.description, "parameters": one.parameters})
        for one in definitions
    ]
    return TOOLS % "\n".join(lines) if lines else ""


def tool_calls(text: str) -> list[dict[str, str]]:
    """The calls in a reply, as verifiers represents them. Invalid JSON becomes a call with these arguments as text."""
    calls = []
    for number, match in enumerate(_CALL.finditer(text)):
        try:
            value = json.loads(match[1])
        except (json.JSONDecodeError, RecursionError):
            value = None
        named = isinstance(value, dict) and isinstance(value.get("name"), str)
        name = value["name"] if named else ""
        arguments = json.dumps(value.get("arguments") or {}) if named else match[1].strip()
        calls.append({"id": f"call_{number}", "name": name, "arguments": arguments})
    return calls
