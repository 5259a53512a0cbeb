"""Plays groups: each sample of a prompt is a task that samples a turn, steps its environment, and samples the next one.

In each turn the policy samples an action up to the end of its reply or a stop string, the environment steps, and the
observation is appended as tokens with loss mask 0 (`EpisodeRules`). A group without an environment consists of single
completions.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import isawaitable
from typing import Any, Protocol

from assay.engine.base import EngineInfo, Request, RequestError, SampleCounter, SamplingParams
from assay.engine.client import EngineClient, ReceiveChunk
from assay.envs.base import Env, Observation, Step, as_messages, error_step, is_masked
from assay.system.awaiting import awaited, is_async, resolve, run_in_thread, submit, warn_after
from assay.text import Renderer
from assay.types import Completion, Finish, Group, Message, Prompt, Rollout, Status, Turn, UserError, Verdict, plural


def request_seed(run_seed: int, step: int, prompt_id: str, turn: int = 0) -> int:
    """A 64-bit seed that depends on these arguments only, so that a sample can be reproduced in any batch."""
    key = f"{run_seed}|{step}|{prompt_id}|{turn}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Limits:
    """Limits of an episode besides `max_new_tokens` of its request, which counts the sampled tokens of all turns."""

    steps: int = 0  # 0: `max_steps` of the environment
    step_tokens: int = 0  # tokens per action; 0: no limit
    seconds: float = 0.0  # per episode; 0: no limit


@dataclass
class Episode:
    """One episode: its turns so far, and how it ended."""

    prompt: Prompt
    first: Request  # request of the first turn, shared by all samples of the prompt
    sample: int
    env: Env  # deleted when the episode is over, so that the environment can release what it holds
    turns: list[Turn] = field(default_factory=list)
    next_context_ids: list[int] = field(default_factory=list)  # tokens between the last turn and the next one
    reply: list[int] = field(default_factory=list)  # tokens since the policy's reply began, with inline observations
    reply_text: str = ""
    inserted: str = ""  # text of `next_context_ids`, if it continues the reply
    observation: Observation = ""  # of the last step
    answer: str | None = None  # left to the run's judge
    verdict: Verdict | None = None
    cut_off: str = ""  # the limit that ended it
    bootstrap_ids: list[int] | None = None  # context that would have followed without the limit
    began: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.answer is not None or self.verdict is not None or bool(self.cut_off)

    @property
    def sampled_tokens(self) -> int:
        return sum(turn.completion.length for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        """The whole sequence, including the context of the next turn."""
        parts = [part for turn in self.turns for part in (turn.context_ids, turn.completion.appended)]
        return [token for part in (*parts, self.next_context_ids) for token in part]

    @property
    def length(self) -> int:
        """Number of tokens of the sequence, including the context of the next turn."""
        return sum(len(turn.context_ids) for turn in self.turns) + self.sampled_tokens + len(self.next_context_ids)


@dataclass
class EpisodeRules:
    """How episodes of `env` proceed with the policy that an engine serves."""

    info: EngineInfo
    renderer: Renderer
    env: Env
    limits: Limits = field(default_factory=Limits)

    def new_episodes(self, prompt: Prompt, first: Request) -> tuple[list[Episode], Request]:
        """Return an episode for each sample of a prompt, not started yet, and the request of their first turn."""
        episodes = [
            Episode(prompt, first, sample, self.env.copy(), next_context_ids=list(first.prompt_ids))
            for sample in range(first.params.n)
        ]
        return episodes, replace(first, params=self._params(first, 0, first.params.n), keep=self._keep(1))

    def record_completion(self, episode: Episode, completion: Completion) -> str:
        """Append a turn; return the action, which is the text that the completion adds to the reply."""
        reached_limit = completion.length == self.limits.step_tokens and not self.env.inline
        if reached_limit and completion.finish is Finish.LENGTH:
            completion.finish = Finish.ACTION
        episode.reply += completion.appended
        text = self.renderer.decode(episode.reply)
        action = added_text(self.renderer, episode.reply_text, text, completion.appended)
        episode.turns.append(Turn(episode.next_context_ids, completion, action, inserted=episode.inserted))
        episode.next_context_ids, episode.reply_text, episode.inserted = [], text, ""
        return action

    def apply_step(self, episode: Episode, step: Step) -> None:
        """Record what the environment returned: the reward, and the end of the episode or its next context."""
        observation, reward, terminated, truncated, info = step
        episode.turns[-1].reward, episode.turns[-1].masked = reward, is_masked(step)
        episode.observation = observation
        if terminated or truncated:
            episode.answer, episode.verdict = info.get("answer"), info.get("verdict")
            if episode.answer is None and episode.verdict is None:
                total = sum(turn.reward for turn in episode.turns)
                correct = terminated and total >= self.env.max_return - 1e-9
                episode.verdict = Verdict(total, Status.OK if correct else Status.WRONG)
            if truncated:
                episode.cut_off = "the environment cut it off"
            if truncated and not terminated and observation:
                episode.bootstrap_ids = self.observation_ids(episode.prompt, episode.reply, observation)
            return
        episode.next_context_ids = self.observation_ids(episode.prompt, episode.reply, observation)
        if self.env.inline:
            episode.reply += episode.next_context_ids
            text = self.renderer.decode(episode.reply)
            episode.inserted = added_text(self.renderer, episode.reply_text, text, episode.next_context_ids)
            episode.reply_text = text
        else:
            episode.reply, episode.reply_text = [], ""
        last = episode.turns[-1].completion.appended[-1]
        if self.env.inline and last in self.renderer.stop_token_ids:
            episode.cut_off = "the reply has ended"  # ended by the policy, not by a limit: nothing to bootstrap from
        elif limit := self._limit(episode):
            episode.cut_off, episode.bootstrap_ids = limit, episode.next_context_ids

    def observation_ids(self, prompt: Prompt, reply: Sequence[int], observation: Observation) -> list[int]:
        """Tokens of an observation after a reply, including the header of the policy's next turn."""
        messages: Sequence[Message] = as_messages(observation, self.env.role)
        if self.env.inline:
            return self.renderer.inline_ids("".join(message["content"] for message in messages))
        return self.renderer.next_turn_ids(prompt, reply, messages)

    def _limit(self, episode: Episode) -> str:
        """Description of the limit that an episode has reached; empty if none."""
        if not self._may_continue(len(episode.turns)):
            return f"cut off after {plural(len(episode.turns), 'step')}"
        if episode.sampled_tokens >= episode.first.params.max_new_tokens:
            return f"cut off after {plural(episode.sampled_tokens, 'token')}"
        context = self.info.max_length
        if episode.length >= context:
            return f"cut off at the end of the context of {context} tokens"
        late = 0 < self.limits.seconds <= time.monotonic() - episode.began
        return f"cut off after {self.limits.seconds:g} s" if late else ""

    def _may_continue(self, turns: int) -> bool:
        return turns < (self.limits.steps or self.env.max_steps)

    def _keep(self, turns: int) -> bool:
        """Whether the engine should keep a sequence that has this number of turns."""
        return self.info.capabilities.handles and self._may_continue(turns)

    def _params(self, first: Request, sampled: int, n: int = 1) -> SamplingParams:
        left = first.params.max_new_tokens - sampled
        tokens = min(self.limits.step_tokens or left, left)
        least = min(first.params.min_new_tokens, tokens)
        return replace(first.params, n=n, max_new_tokens=tokens, min_new_tokens=least)

    def next_request(self, episode: Episode) -> Request:
        """The request of the next turn: a continuation if the engine has kept the sequence, otherwise all its tokens.

        From the second turn on, each sample is a separate request with its own seed.
        """
        turn, first = len(episode.turns), episode.first
        handle = episode.turns[-1].completion.handle
        return Request(
            episode.token_ids if handle is None else episode.next_context_ids,
            self._params(first, episode.sampled_tokens),
            request_seed(first.seed, episode.sample, episode.prompt.id, turn),
            first.name,
            keep=self._keep(turn + 1),
            continues=handle,
            stream=first.stream,
        )


def added_text(renderer: Renderer, before: str, text: str, token_ids: Sequence[int]) -> str:
    """The text that tokens add to a reply, which was `before` and is now `text`."""
    if text.startswith(before):
        return text.removeprefix(before)
    return renderer.decode(token_ids)  # the last character of `before` was incomplete and is now complete


def as_group(prompt: Prompt, episodes: Sequence[Episode]) -> Group:
    """The rollouts of finished and judged episodes."""
    return Group(prompt, [_rollout(prompt, episode) for episode in episodes])


def _rollout(prompt: Prompt, episode: Episode) -> Rollout:
    verdict = episode.verdict or Verdict(0.0, Status.NO_ANSWER, detail=episode.cut_off)
    verdict = replace(verdict, reward=sum(turn.reward for turn in episode.turns))
    for turn in episode.turns:
        turn.completion.handle = None  # no longer valid, and it would differ in a resumed run
        if turn.completion.text is not None:
            turn.context_ids = []  # it consists of messages and texts
    rollout = Rollout(prompt, episode.sample, episode.turns, verdict, verdict.reward)
    is_text = any(turn.completion.text is not None for turn in episode.turns)
    rollout.cut_off, rollout.bootstrap_ids = bool(episode.cut_off), None if is_text else episode.bootstrap_ids
    return rollout


def check_history(renderer: Renderer, env: Env, prompt: Prompt) -> str:
    """Return a warning if the chat template rewrites earlier replies; raise if it cannot continue a conversation."""
    if env.inline or env.max_steps == 1:
        return ""
    next_message: Message = {"role": env.role, "content": "?"}
    if not renderer.next_turn_ids(prompt, (), [next_message]):
        raise UserError("the chat template adds no tokens between two replies: set prompt.template to another one")
    how = renderer.rewritten_history()
    return how and (
        f"the chat template rewrites earlier replies ({how}): episodes keep earlier replies as they were sampled, "
        "so later turns see another history than in a conversation rendered by the template"
    )


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
    """Set steps, or errors, as the results of the futures."""
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
