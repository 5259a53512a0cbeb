"""Plays groups: each sample of a prompt is a task that samples a turn, steps its environment, and samples the next one.

A group without an environment consists of single completions.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Sequence
from functools import partial
from inspect import isawaitable
from typing import Any, Protocol

from assay.engine.base import Request, RequestError, SampleCounter
from assay.engine.client import EngineClient, ReceiveChunk
from assay.envs.base import Env, Step, error_step, run_in_thread, warn_after
from assay.rollout.episodes import Episode, EpisodeRules
from assay.system.awaiting import awaited, is_async, resolve, submit
from assay.types import Completion, Finish, Prompt

MIN_STEP_S = 1.0  # shortest time limit of a step, even if the limit of an episode is shorter
REPORT_S = 60.0  # a step without a time limit is reported after this time
STEP_THREADS = 8  # for steps of slow environments


class Stepper:
    """Steps environments: actions that are passed at the same time together.

    Steps of `async` environments are awaited concurrently. Steps of a slow environment run in threads, unless `strict`,
    and so do steps with a time limit. `strict`: results are applied in the order of the actions, when all steps that
    began together have ended. Otherwise a long step does not delay others, and the order depends on the clock.

    A step that exceeds the time limit is abandoned and ends its episode with an error. Without a limit, a long step is
    reported and waited for.
    """

    def __init__(self, env: Env, seconds: float = 0.0, strict: bool = True) -> None:
        self.env, self.strict = env, strict
        self.seconds = max(seconds, MIN_STEP_S) if seconds else 0.0
        self.in_threads = not is_async(env.step) and bool(seconds or (env.slow and not strict))
        self._slots = asyncio.Semaphore(STEP_THREADS if env.slow else 1)
        self._pending: list[tuple[Env, str, asyncio.Future[Step]]] = []

    async def step(self, env: Env, action: str) -> Step:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Step] = loop.create_future()
        self._pending.append((env, action, future))
        if len(self._pending) == 1:
            loop.call_soon(self._step_pending)  # after all tasks that continue now have passed their actions
        return await future

    def _step_pending(self) -> None:
        pending = [step for step in self._pending if not step[2].cancelled()]
        self._pending = []
        futures = [future for _, _, future in pending]
        try:
            steps = self._begin([env for env, _, _ in pending], [action for _, action, _ in pending])
        except Exception as error:
            steps = [error] * len(pending)
        if not any(map(isawaitable, steps)):
            set_results(futures, steps)
            return
        tasks = [asyncio.ensure_future(self._awaited(step)) for step in steps]
        for future, task in zip(futures, tasks, strict=True):
            future.add_done_callback(partial(lambda task, _: task.cancel(), task))  # the episode is cancelled
        for part in [slice(None)] if self.strict else [slice(i, i + 1) for i in range(len(tasks))]:
            ended = asyncio.gather(*tasks[part], return_exceptions=True)
            ended.add_done_callback(partial(lambda futures, ended: set_results(futures, ended.result()), futures[part]))

    def _begin(self, envs: Sequence[Env], actions: Sequence[str]) -> list[Any]:
        """Steps, or awaitables of them."""
        if self.in_threads:
            return [self._in_thread(env, action) for env, action in zip(envs, actions, strict=True)]
        with warn_after(REPORT_S, self._report("a step" if len(envs) == 1 else f"a step of {len(envs)} episodes")):
            return self.env.step_all(envs, actions)

    async def _in_thread(self, env: Env, action: str) -> Step:
        async with self._slots:
            step = run_in_thread(lambda: resolve(self.env.step_all([env], [action])[0]))
            return await self._limited(asyncio.wrap_future(step))

    async def _awaited(self, step: Any) -> Step:
        if self.in_threads:
            return await step
        return await self._limited(asyncio.wrap_future(submit(step))) if isawaitable(step) else step

    async def _limited(self, step: asyncio.Future[Step]) -> Step:
        """Await a step within the time limit."""
        try:
            done, _ = await asyncio.wait([step], timeout=self.seconds or REPORT_S)
            if not done and self.seconds:
                return error_step(TimeoutError(f"took longer than {self.seconds:g} s"))
            if not done:
                warnings.warn(self._report("a step"), stacklevel=2)
            return await step
        finally:
            step.cancel()

    def _report(self, what: str) -> str:
        running = f"{self.env.name}: {what} has been running for {REPORT_S:g} s"
        return f"{running}; set env.max_seconds to abandon such steps"


def set_results(futures: Sequence[asyncio.Future[Step]], steps: Sequence[Any]) -> None:
    """Pass steps, or errors, to those who await them."""
    for future, step in zip(futures, steps, strict=True):
        if future.done():
            continue
        if isinstance(step, BaseException):
            future.set_exception(step)
            future.exception()  # retrieved: the group of the first one raises it
        else:
            future.set_result(step)


class Listener(Protocol):
    """Follows the episodes of a group while they are played."""

    def receive(self, episode: Episode, token_ids: Sequence[int]) -> None:
        """The policy has sampled tokens, if the request of the group streams."""

    def stepped(self, episode: Episode) -> None:
        """The environment has taken a step."""


class GroupInPlay:
    """The samples of a prompt that are being played. `result` is done when all of them have ended.

    If requests of some samples fail, the others are played to their end; then `result` raises a `RequestError`. Any
    other error is raised at once.
    """

    def __init__(self, prompt: Prompt, request: Request, listener: Listener | None = None) -> None:
        self.prompt, self.request, self.listener = prompt, request, listener
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.result = asyncio.ensure_future(self._play())
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())  # retrieved
        self.episodes: list[Episode] = []
        self.turns: list[asyncio.Future[Completion]] = []  # the last turn of each sample, which may be being sampled
        self.tasks: Sequence[asyncio.Future[Any]] = ()

    @property
    def completions(self) -> list[Completion]:
        """Of a group without an environment that has ended; empty ones if its request failed."""
        if self.result.exception() is not None:
            return [Completion([], [], [], Finish.STOP) for _ in self.turns]
        return [turn.result() for turn in self.turns]

    def sampled_tokens(self, client: EngineClient) -> list[int]:
        """The number of tokens of each sample so far, as far as it is known."""
        if self.episodes:
            return [episode.sampled_tokens for episode in self.episodes]
        ended = [turn.result() for turn in self.turns if turn.done() and not turn.cancelled() and not turn.exception()]
        return [*(completion.length for completion in ended), *client.sampled_tokens(self.turns)]

    async def _play(self) -> None:
        await self.started
        if errors := await all_ended(self.tasks):
            raise RequestError(errors)

    def start(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Set the tasks that play the samples."""
        self.tasks = tasks
        self.started.set_result(None)

    def cancel(self) -> None:
        for part in (self.started, self.result, *self.tasks, *self.turns):
            part.cancel()


class GroupPlayer:
    """Plays groups through a client. Episodes start in order, whole groups, as many as the engine decodes at once."""

    def __init__(self, client: EngineClient, rules: EpisodeRules | None, counter: SampleCounter | None = None) -> None:
        """`rules`: None for single completions."""
        self.client, self.rules, self.counter = client, rules, counter or SampleCounter(None)
        self.stepper = Stepper(rules.env, rules.limits.seconds, client.strict) if rules is not None else None
        self._active = 0  # episodes that have started and are not over
        self._waiting: deque[GroupInPlay] = deque()

    def start(self, prompt: Prompt, request: Request, listener: Listener | None = None) -> GroupInPlay:
        """Play a group; its episodes start as soon as the engine can decode them beside earlier groups."""
        group = GroupInPlay(prompt, request, listener)
        if self.rules is None:
            group.turns = self.client.submit(request)
            group.start(group.turns)
            for turn in group.turns:
                turn.add_done_callback(self.counter.add_future)
        else:
            self._waiting.append(group)
            self._start_waiting(self.rules)
        return group

    def _start_waiting(self, rules: EpisodeRules) -> None:
        while self._waiting:
            group = self._waiting[0]
            if not group.started.cancelled():
                samples = group.request.params.n
                if self._active and self._active + samples > self.client.info.max_batch:
                    return
                try:
                    self._start_episodes(rules, group)
                except Exception as error:
                    group.started.set_exception(error)
            self._waiting.popleft()

    def _start_episodes(self, rules: EpisodeRules, group: GroupInPlay) -> None:
        group.episodes, request = rules.new_episodes(group.prompt, group.request)
        self._active += len(group.episodes)
        group.turns = self.client.submit(request, self._receiver(group))
        group.start([self.client.spawn(self._play(rules, group, sample)) for sample in range(len(group.episodes))])
        for sample, task in enumerate(group.tasks):
            task.add_done_callback(partial(self._end, rules, group, sample))

    async def _play(self, rules: EpisodeRules, group: GroupInPlay, sample: int) -> None:
        assert self.stepper is not None
        episode = group.episodes[sample]
        await awaited(episode.env.start(episode.prompt))
        while not episode.over:
            if episode.turns:
                (group.turns[sample],) = self.client.submit(rules.next_request(episode), self._receiver(group, sample))
            completion = await self.client.wait(group.turns[sample])
            action = rules.record_completion(episode, completion)
            self.counter.add(completion, finished=0)
            rules.apply_step(episode, await self.stepper.step(episode.env, action))
            if group.listener is not None:
                group.listener.stepped(episode)
        self.counter.finished += 1

    def _end(self, rules: EpisodeRules, group: GroupInPlay, sample: int, task: asyncio.Future[None]) -> None:
        """The task of an episode has ended: release what it holds, and start waiting episodes after all others."""
        episode = group.episodes[sample]
        group.turns[sample].cancel()
        if episode.turns:
            self.client.release([episode.turns[-1].completion.handle])
        del episode.env
        self._active -= 1
        self.client.hold()
        asyncio.get_running_loop().call_soon(self._continue, rules)

    def _continue(self, rules: EpisodeRules) -> None:
        self._start_waiting(rules)
        self.client.unhold()

    def _receiver(self, group: GroupInPlay, sample: int | None = None) -> ReceiveChunk | None:
        """Passes new tokens to the listener. `sample`: of the group, if the request has only this one."""
        if (listener := group.listener) is None:
            return None
        return lambda chunk: listener.receive(
            group.episodes[chunk.sample if sample is None else sample], chunk.token_ids
        )


async def all_ended(tasks: Sequence[asyncio.Future[Any]]) -> dict[int, str]:
    """Wait until all have ended; returns the errors of failed requests. Any other error is raised at once."""
    pending, errors = set(tasks), dict[int, str]()
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        for task in (task for task in tasks if task in done):
            try:
                task.result()
            except RequestError as error:
                errors |= error.errors
    return errors
