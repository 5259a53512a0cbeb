"""Plays groups: each sample of a prompt is a task that samples a turn, steps its environment, and samples the next one.

A group without an environment consists of single completions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from assay.engine.base import Request, RequestError, SampleCounter
from assay.engine.client import EngineClient, ReceiveChunk
from assay.envs.base import Env, Step, error_step, run_with_timeout, warn_after
from assay.rollout.episodes import Episode, EpisodeRules
from assay.types import Completion, Finish, Prompt

MIN_STEP_S = 1.0  # shortest time limit of a step, even if the limit of an episode is shorter
REPORT_S = 60.0  # a step without a time limit is reported after this time
LIMITED_STEPS = 8  # concurrent steps of a slow environment with a time limit


class Stepper:
    """Steps environments: actions that are passed at the same time together, or each action in a thread.

    Threads are used if `threads` is not 0 and the environment declares itself slow. A long step then does not delay
    others, and the order of results depends on the clock. A step that exceeds the time limit is abandoned and ends its
    episode with an error. Without a limit, a long step is reported and waited for.
    """

    def __init__(self, env: Env, threads: int, seconds: float = 0.0) -> None:
        self.env = env
        self.seconds = max(seconds, MIN_STEP_S) if seconds else 0.0
        self.pool = ThreadPoolExecutor(threads, "assay-env") if threads and env.slow else None
        self._pending: list[tuple[Env, str, asyncio.Future[Step]]] = []

    async def step(self, env: Env, action: str) -> Step:
        loop = asyncio.get_running_loop()
        if self.pool is not None:
            (step,) = await loop.run_in_executor(self.pool, self._steps, [env], [action])
            return step
        future: asyncio.Future[Step] = loop.create_future()
        self._pending.append((env, action, future))
        if len(self._pending) == 1:
            loop.call_soon(self._step_pending)  # after all tasks that continue now have passed their actions
        return await future

    def _step_pending(self) -> None:
        pending = [one for one in self._pending if not one[2].cancelled()]
        self._pending = []
        try:
            steps = self._steps([env for env, _, _ in pending], [action for _, action, _ in pending])
        except Exception as error:
            for _, _, future in pending:
                future.set_exception(error)
                future.exception()  # retrieved: the group of the first one raises it
            return
        for (_, _, future), step in zip(pending, steps, strict=True):
            future.set_result(step)

    def _steps(self, envs: Sequence[Env], actions: Sequence[str]) -> list[Step]:
        if not self.seconds:
            what = "a step" if len(envs) == 1 else f"a step of {len(envs)} episodes"
            running = f"{self.env.name}: {what} has been running for {REPORT_S:g} s"
            with warn_after(REPORT_S, f"{running}; set env.max_seconds to abandon such steps"):
                return self.env.step_all(envs, actions)
        if self.env.slow and len(envs) > 1:
            with ThreadPoolExecutor(LIMITED_STEPS, "assay-env") as pool:
                return list(pool.map(self._limited, envs, actions))
        return [self._limited(env, action) for env, action in zip(envs, actions, strict=True)]

    def _limited(self, env: Env, action: str) -> Step:
        try:
            return run_with_timeout(self.seconds, lambda: self.env.step_all([env], [action])[0])
        except TimeoutError as error:
            return error_step(error)

    def close(self) -> None:
        """Cancel pending steps. Running steps finish in the background, and their results are ignored."""
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)


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
        self.result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
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
        ended = [one.result() for one in self.turns if one.done() and not one.cancelled() and not one.exception()]
        return [*(completion.length for completion in ended), *client.sampled_tokens(self.turns)]

    def watch(self, tasks: Sequence[asyncio.Future[Any]]) -> None:
        """Set the tasks that play the samples."""
        self.tasks = tasks
        for task in tasks:
            task.add_done_callback(self._on_end)

    def cancel(self) -> None:
        self.result.cancel()
        for part in (*self.tasks, *self.turns):
            part.cancel()

    def _on_end(self, task: asyncio.Future[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.result.done() or task.cancelled():
            return
        if error is not None and not isinstance(error, RequestError):
            self.fail(error)
        elif all(one.done() for one in self.tasks):
            failed = [error for one in self.tasks if isinstance(error := one.exception(), RequestError)]
            if errors := {number: line for error in failed for number, line in error.errors.items()}:
                self.fail(RequestError(errors))
            else:
                self.result.set_result(None)

    def fail(self, error: BaseException) -> None:
        self.result.set_exception(error)
        self.result.exception()  # the group may have no consumer any more: then the error is not reported


class GroupPlayer:
    """Plays groups through a client. Episodes start in order, whole groups, as many as the engine decodes at once."""

    def __init__(
        self, client: EngineClient, rules: EpisodeRules | None, threads: int = 0, counter: SampleCounter | None = None
    ) -> None:
        """`rules`: None for single completions. `threads`: for steps of slow environments."""
        self.client, self.rules, self.counter = client, rules, counter or SampleCounter(None)
        self.stepper = Stepper(rules.env, threads, rules.limits.seconds) if rules is not None else None
        self._active = 0  # episodes that have started and are not over
        self._waiting: deque[GroupInPlay] = deque()

    def start(self, prompt: Prompt, request: Request, listener: Listener | None = None) -> GroupInPlay:
        """Play a group; its episodes start as soon as the engine can decode them beside those of earlier groups."""
        group = GroupInPlay(prompt, request, listener)
        if self.rules is None:
            group.turns = self.client.submit(request)
            group.watch(group.turns)
            for turn in group.turns:
                turn.add_done_callback(self.counter.add_future)
        else:
            self._waiting.append(group)
            self._start_waiting(self.rules)
        return group

    def close(self) -> None:
        if self.stepper is not None:
            self.stepper.close()

    def _start_waiting(self, rules: EpisodeRules) -> None:
        while self._waiting:
            group = self._waiting[0]
            if not group.result.cancelled():
                samples = group.request.params.n
                if self._active and self._active + samples > self.client.info.max_batch:
                    return
                try:
                    self._start_episodes(rules, group)
                except Exception as error:
                    group.fail(error)
            self._waiting.popleft()

    def _start_episodes(self, rules: EpisodeRules, group: GroupInPlay) -> None:
        group.episodes, request = rules.start_episodes(group.prompt, group.request)
        self._active += len(group.episodes)
        group.turns = self.client.submit(request, self._receiver(group))
        group.watch([self.client.spawn(self._play(rules, group, sample)) for sample in range(len(group.episodes))])
        for sample, task in enumerate(group.tasks):
            task.add_done_callback(partial(self._end, rules, group, sample))

    async def _play(self, rules: EpisodeRules, group: GroupInPlay, sample: int) -> None:
        assert self.stepper is not None
        episode = group.episodes[sample]
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


async def all_ended(groups: Sequence[GroupInPlay]) -> None:
    """Wait until all groups have ended, or one has raised another error than a `RequestError`."""
    pending = {group.result for group in groups}
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        for result in done:
            if (error := result.exception()) is not None and not isinstance(error, RequestError):
                raise error
