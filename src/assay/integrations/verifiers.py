"""Environments of the package `verifiers`: its own loop plays an episode, with the policy of the run as its agent.

verifiers is imported only when it is used.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from assay.envs.base import Env, Info, Observation, Step, as_messages, safe_reset
from assay.rewards import functions
from assay.system.awaiting import resolve
from assay.tasks.base import ALL, LazyPrompts, user_errors
from assay.tasks.datasets import ListTask
from assay.types import Message, Prompt, Status, UserError, Verdict, describe_user_error, missing_extra

PREFIX = "verifiers:"
ROW = "verifiers_task"  # the prompt field with the position of its task in the taskset
MAX_TASKS = 1_000  # of a taskset without end
THRESHOLD = 0.5  # the reward of a correct answer
TOOLS = """# Tools

You may call these functions:
<tools>
%s
</tools>
Write a call as a JSON object with the name and the arguments:
<tool_call>
{"name": NAME, "arguments": {...}}
</tool_call>"""


def load_verifiers_env(name: str, args: Mapping[str, Any]) -> VerifiersEnv:
    """Load the environment "verifiers:TASKSET_ID", whose package must be installed; `args` are its settings."""
    if functions.guard is not None:
        functions.guard(name)
    import_verifiers(name)
    from verifiers.v1.utils.loaders import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        load_environment,
        resolve_env_config,
    )

    with user_errors(f"{name} could not be loaded"):
        env = load_environment(resolve_env_config(settings(name, args)))
        tasks = list(env.taskset if env.taskset.bounded else env.taskset.take(MAX_TASKS))
    if not tasks:
        raise UserError(f"{name} has no tasks")
    return VerifiersEnv(env, tasks, name)


def import_verifiers(what: str) -> None:
    try:
        import verifiers  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise missing_extra(f"the environment {what}", "verifiers") from error
    if hasattr(verifiers, "load_environment"):  # removed in 0.4
        raise UserError(f"verifiers {verifiers.__version__} is not supported: pip install 'verifiers>=0.4'")
    if "VF_LOG_LEVEL" not in os.environ:  # failures are reported as statuses
        logging.getLogger("verifiers").setLevel(logging.CRITICAL)


def settings(name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an environment, in verifiers' form: the policy plays its only agent, in this process."""
    from verifiers.v1.configs.agent import AgentConfig  # type: ignore[import-not-found,unused-ignore]
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    from assay.integrations.verifiers_policy import HARNESS

    taskset = name.removeprefix(PREFIX)
    fields = env_config_type(taskset, args.get("id", "")).model_fields
    agents = {role: info.default for role, info in fields.items() if isinstance(info.default, AgentConfig)}
    if len(agents) != 1:
        raise UserError(f"{name} has the agents {', '.join(agents)}: only environments with one agent are supported")
    ((role, agent),) = agents.items()
    harness = agent.harness.id if agent.harness else default_harness_id(taskset)
    if harness not in ("null", "bash"):  # bash is the default of verifiers for an environment without a harness
        raise UserError(f"{name} needs the harness {harness}: only environments that work with null are supported")
    policy = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    return {
        **args,
        "taskset": {**args.get("taskset", {}), "id": taskset},
        role: {**args.get(role, {}), **policy},
        "interception": {"type": "server"},
    }


class VerifiersEnv(Env):
    """An environment of verifiers. Copies share it."""

    role = "user"

    def __init__(self, env: Any, tasks: Sequence[Any], name: str) -> None:
        from assay.integrations.verifiers_policy import PolicyClient

        self.env, self.tasks, self.name = env, tasks, name
        (agent,) = env._agent_specs.values()
        self.max_steps = agent.max_turns or Env.max_steps
        self.instruction = self.default_extract = ""
        self.client = PolicyClient()
        self.episodes: set[asyncio.Task[Any]] = set()  # under way
        self.serving: asyncio.Task[None] | None = None
        self.rollout: PlayedRollout | None = None
        self.original = self  # rollouts refer to it, so that deleting a copy ends its rollout
        try:
            first = resolve(self._start())
        except Exception as error:
            resolve(self.close())
            raise UserError(f"{name} cannot be started: {describe_user_error(error)}") from error
        tools = tool_text(first.get("tools") or ())
        prompts = [task_prompt(task.data.model_dump(), row, name, tools) for row, task in enumerate(tasks)]
        self.rows = ListTask(prompts, name)
        self.has_all = self.rows.has_all

    async def _start(self) -> Mapping[str, Any]:
        """Start the servers of the environment; returns the first request of the first task."""
        ready = asyncio.get_running_loop().create_future()
        self.serving = asyncio.ensure_future(self._serve(ready))
        await asyncio.wait([ready, self.serving], return_when=asyncio.FIRST_COMPLETED)
        if self.serving.done():
            self.serving.result()
        rollout = PlayedRollout(self, self.tasks[0])
        try:
            return await rollout.begin()
        finally:
            rollout.episode.cancel()

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Hold the servers until this task is cancelled: they must be started and stopped by the same task."""
        from assay.integrations.verifiers_policy import CLIENT

        async with self.env.serving():
            self.env._interception.clients[CLIENT.model_dump_json()] = self.client
            ready.set_result(None)
            await asyncio.Event().wait()

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The tasks. If the environment changes their messages when it starts, it is started for each."""
        prompts = self.rows.prompts(split)
        if self._first_messages(prompts[0]) == prompts[0].messages:
            return prompts

        def started(index: int) -> Prompt:
            return replace(prompts[index], messages=self._first_messages(prompts[index]))

        return LazyPrompts(started, len(prompts))

    def _first_messages(self, prompt: Prompt) -> tuple[Message, ...]:
        messages, _ = resolve(safe_reset(self.copy(), None, {"prompt": prompt}))
        return as_messages(messages, self.role)

    def copy(self) -> Self:
        other = super().copy()
        other.rollout = None
        return other

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        prompt: Prompt | None = (options or {}).get("prompt")
        if prompt is None:
            train = self.rows.prompts("train")
            prompt = train[(seed or 0) % len(train)]
        if self.rollout is not None:
            self.rollout.episode.cancel()
        self.rollout = PlayedRollout(self.original, self.tasks[prompt.fields[ROW]])
        cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, self.rollout.episode.cancel)
        weakref.finalize(self, cancel).atexit = False
        await self.rollout.begin()
        return self.rollout.seen, {"id": prompt.id}

    async def step(self, action: str) -> Step:
        assert self.rollout is not None, "reset comes first"
        return await self.rollout.advance(action)

    async def close(self) -> None:
        """End rollouts that are under way, and release what the environment holds."""
        for tasks in (self.episodes, {self.serving} if self.serving else set()):  # in this order
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class PlayedRollout:
    """One episode of an environment, which verifiers plays in a task. It waits whenever it needs a reply."""

    def __init__(self, owner: VerifiersEnv, task: Any) -> None:
        self.owner = owner
        self.seen: list[Message] = []  # the messages that the policy has read or written
        self.request, self.reply = self._new_future(), self._new_future()  # to the policy, and its reply
        self.episode = asyncio.ensure_future(self._play(task))
        owner.episodes.add(self.episode)
        self.episode.add_done_callback(owner.episodes.discard)

    async def begin(self) -> Mapping[str, Any]:
        """Wait for the first request of the environment, and return it."""
        request = await self._next_request()
        if request is None:
            reason = failure(self.episode.result()) or "it ended"
            raise UserError(f"{self.owner.name}: the episode ended before the first reply of the policy: {reason}")
        self.seen = as_text_messages(request["messages"], tool_text(request.get("tools") or ()))
        return request

    async def advance(self, action: str) -> Step:
        """Pass the policy's reply to the environment; what it says next, or the result of the episode."""
        self.request = self._new_future()
        self.reply.set_result(action)
        request = await self._next_request()
        if request is None:
            return result(self.episode.result())
        messages = as_text_messages(request["messages"], tool_text(request.get("tools") or ()))
        expected = [*self.seen, Message(role="assistant", content=action)]
        if messages[: len(self.seen)] != self.seen or len(messages) <= len(expected):
            raise UserError("the environment changed earlier messages, or added none: such episodes are not supported")
        new = messages[len(expected) :]
        self.seen = [*expected, *new]
        return new, 0.0, False, False, {}

    async def ask(self, request: Mapping[str, Any]) -> str:
        """The reply of the policy, for the environment."""
        self.reply = self._new_future()
        self.request.set_result(request)
        return await self.reply

    async def _next_request(self) -> Mapping[str, Any] | None:
        """The next request to the policy; None if the episode has ended. Raises what the episode raised."""
        await asyncio.wait([self.request, self.episode], return_when=asyncio.FIRST_COMPLETED)
        return self.request.result() if self.request.done() else self.episode.result() and None

    async def _play(self, task: Any) -> Any:
        """Play the episode and return verifiers' record of it."""
        from verifiers.v1.clients import ModelContext  # type: ignore[import-not-found,unused-ignore]

        from assay.integrations.verifiers_policy import CLIENT, MODEL

        ids: list[str] = []

        def connect(trace: Any) -> None:
            if ids:
                raise UserError("the environment runs its agent more than once, which is not supported")
            ids.append(trace.id)
            self.owner.client.ask[trace.id] = self.ask

        try:
            return await self.owner.env.run_episode(task, ModelContext(MODEL, CLIENT), on_trace=connect)
        finally:
            for trace_id in ids:
                del self.owner.client.ask[trace_id]

    def _new_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()


def failure(episode: Any) -> str:
    """The first error of an episode; empty if it has none."""
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    return f"{errors[0].type}: {errors[0].message}" if errors else ""


def result(episode: Any) -> Step:
    """The result of an episode. An error of the environment or of a reward function is an error, not a reward of 0."""
    detail, reward = failure(episode), math.nan
    if not detail:
        (trace,) = episode.traces
        reward = float(trace.reward)
        detail = "" if math.isfinite(reward) else f"the reward is {reward}"
    if detail:
        return "", 0.0, True, False, {"verdict": Verdict(0.0, Status.ERROR, detail=detail)}
    scores = {name: given.score for name, given in trace.rewards.items() if given is not None}
    metrics = {name: float(value) for name, value in trace.metrics.items() if isinstance(value, int | float)}
    status = Status.OK if reward >= THRESHOLD else Status.WRONG
    return "", reward, True, False, {"verdict": Verdict(reward, status, parts=metrics | scores)}


def task_prompt(values: Mapping[str, Any], row: int, name: str, tools: str) -> Prompt:
    """The prompt of a task; without one, the environment opens the conversation when it starts."""
    given, system, answer = (values.get(key) for key in ("prompt", "system_prompt", "answer"))
    messages = [{"role": "user", "content": given or ""}] if isinstance(given, str | None) else list(given)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    try:
        shown = as_text_messages(messages, tools)
    except UserError as error:
        raise UserError(f"{name}[{row}]: {error}") from None
    return Prompt(f"{name}/{ALL}/{row}", tuple(shown), answer if isinstance(answer, str) else "", fields={ROW: row})


# -- messages and tools as text


def as_text_messages(messages: Sequence[Any], tools: str = "") -> list[Message]:
    """Messages with text only. Definitions of tools are added to the system message."""
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
        shown = (call_text(call.get("function") or call) for call in calls)
        content = "\n".join([*([content] if content else []), *shown])
    return Message(role=str(role), content=content)


def call_text(function: Mapping[str, Any]) -> str:
    arguments = json.loads(function["arguments"] or "{}")
    return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': arguments})}\n</tool_call>"


def tool_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The description of tools for the system message; empty without tools."""
    lines = [json.dumps(tool["function"]) for tool in tools]
    return TOOLS % "\n".join(lines) if lines else ""
