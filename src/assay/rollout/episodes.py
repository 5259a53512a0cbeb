"""Runs many episodes of an environment concurrently through one engine.

In each turn the policy samples an action up to the end of its reply or a stop string, the environment steps, and the
observation is appended as tokens with loss mask 0. The sequence then continues while other episodes are still sampling.
The order of events depends on tokens only, unless environments are stepped in threads.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from assay.engine.base import (
    ANOTHER_CONSUMER,
    CountReport,
    Engine,
    Event,
    Failed,
    Finished,
    Request,
    RequestError,
    SampleCounter,
    SamplingParams,
)
from assay.envs.base import Env, Observation, Step, as_messages, error_step, is_masked, run_with_timeout, warn_after
from assay.text import Renderer
from assay.types import Completion, Finish, Group, Message, Prompt, Rollout, Status, Turn, UserError, Verdict, plural

MIN_STEP_S = 1.0  # shortest time limit of a step, even if the limit of an episode is shorter
REPORT_S = 60.0  # a step without a time limit is reported after this time
LIMITED_STEPS = 8  # concurrent steps of a slow environment with a time limit


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


class Stepper:
    """Steps environments: all pending actions together in `done`, or each in a thread.

    Threads are used if `threads` is not 0 and the environment declares itself slow. A long step then does not delay
    others, and the order of results depends on the clock. A step that exceeds the time limit is abandoned and ends its
    episode with an error. Without a limit, a long step is reported and waited for.
    """

    def __init__(self, env: Env, threads: int, seconds: float = 0.0) -> None:
        self.env = env
        self.seconds = max(seconds, MIN_STEP_S) if seconds else 0.0
        self.pool = ThreadPoolExecutor(threads, "assay-env") if threads and env.slow else None
        self.pending: list[tuple[Episode, str]] = []
        self.running: list[tuple[Episode, Future[Sequence[Step]]]] = []

    @property
    def busy(self) -> bool:
        return bool(self.pending or self.running)

    def add(self, episode: Episode, action: str) -> None:
        if self.pool is None:
            self.pending.append((episode, action))
        else:
            self.running.append((episode, self.pool.submit(self._steps, [episode.env], [action])))

    def done(self, wait_for_one: bool) -> list[tuple[Episode, Step]]:
        """Return completed steps in the order of their actions; with `wait_for_one`, wait until there is one."""
        if not self.busy:
            return []
        if self.pool is None:
            pending, self.pending = self.pending, []
            steps = self._steps([episode.env for episode, _ in pending], [action for _, action in pending])
            return [(episode, step) for (episode, _), step in zip(pending, steps, strict=True)]
        if wait_for_one:
            wait([future for _, future in self.running], return_when=FIRST_COMPLETED)
        running, self.running, completed = self.running, [], []
        for episode, future in running:
            if future.done():
                completed.append((episode, future.result()[0]))
            else:
                self.running.append((episode, future))
        return completed

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
    dropped: bool = False  # a step of it that is under way is ignored

    @property
    def over(self) -> bool:
        return self.answer is not None or self.verdict is not None or bool(self.cut_off)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        """The whole sequence, including the context of the next turn."""
        parts = [part for turn in self.turns for part in (turn.context_ids, turn.completion.token_ids)]
        return [token for part in (*parts, self.next_context_ids) for token in part]

    @property
    def length(self) -> int:
        """Number of tokens of the sequence, including the context of the next turn."""
        return sum(len(turn.context_ids) for turn in self.turns) + self.sampled_tokens + len(self.next_context_ids)


@dataclass
class EpisodeRunner:
    """Runs episodes of `env` with the policy that `engine` serves."""

    engine: Engine
    renderer: Renderer
    env: Env
    limits: Limits = field(default_factory=Limits)
    threads: int = 0  # for steps of slow environments

    def run(self, requests: Sequence[tuple[Prompt, Request]], report: CountReport | None = None) -> list[list[Episode]]:
        """Return the finished episodes of each prompt, one per sample; episodes with an `answer` are not judged yet.

        A request's `max_new_tokens` limits the tokens that the policy samples in a whole episode. At most as many
        episodes run concurrently as the engine decodes. The caller must be the only consumer of the engine's events.
        `report`: receives the number of finished episodes and of sampled tokens from time to time.
        """
        batch = EpisodeBatch(self, requests, report)
        try:
            with batch.counter.watching(self.engine):
                batch.run()
        except BaseException:
            batch.abort()
            raise
        finally:
            batch.stepper.close()
        return batch.groups

    def start_episodes(self, prompt: Prompt, first: Request) -> tuple[list[Episode], Request]:
        """Start an episode for each sample of a prompt; return the episodes and the request of their first turn."""
        episodes = []
        for sample in range(first.params.n):
            env = self.env.copy()
            env.start(prompt)
            episodes.append(Episode(prompt, first, sample, env, next_context_ids=list(first.prompt_ids)))
        return episodes, replace(first, params=self._params(first, 0, first.params.n), keep=self._keep(1))

    def record_completion(self, episode: Episode, completion: Completion) -> str:
        """Append a turn; return the action, which is the text that the completion adds to the reply."""
        reached_limit = len(completion.token_ids) == self.limits.step_tokens and not self.env.inline
        if reached_limit and completion.finish is Finish.LENGTH:
            completion.finish = Finish.ACTION
        episode.reply += completion.token_ids
        text = self.renderer.decode(episode.reply)
        action = added_text(self.renderer, episode.reply_text, text, completion.token_ids)
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
        last = episode.turns[-1].completion.token_ids[-1]
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
        context = self.engine.info.max_length
        if episode.length >= context:
            return f"cut off at the end of the context of {context} tokens"
        late = 0 < self.limits.seconds <= time.monotonic() - episode.began
        return f"cut off after {self.limits.seconds:g} s" if late else ""

    def _may_continue(self, turns: int) -> bool:
        return turns < (self.limits.steps or self.env.max_steps)

    def _keep(self, turns: int) -> bool:
        """Whether the engine should keep a sequence that has this number of turns."""
        return self.engine.info.capabilities.handles and self._may_continue(turns)

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


class EpisodeBatch:
    """The episodes of one call of `EpisodeRunner.run`: passes completions to environments and steps to episodes."""

    def __init__(
        self,
        runner: EpisodeRunner,
        requests: Sequence[tuple[Prompt, Request]],
        report: CountReport | None = None,
    ) -> None:
        self.runner, self.engine = runner, runner.engine
        self.counter = SampleCounter(report)
        self.waiting = deque(requests)  # prompts whose episodes have not started
        self.stepper: Stepper = Stepper(runner.env, runner.threads, runner.limits.seconds)
        self.groups: list[list[Episode]] = []
        self.active = 0  # episodes that have started and are not over
        self.requests: dict[int, dict[int, Episode]] = {}  # episodes by request id and sample, while they are sampling
        self.finished: list[tuple[Finished, Episode]] = []  # completions not yet recorded in their episodes
        self.errors: dict[int, str] = {}  # by request id

    def run(self) -> None:
        """Run all episodes to their end; then raise a `RequestError` if some of their requests have failed."""
        self.start_episodes()
        while self.requests or self.stepper.busy:
            if self.requests:
                wait = not self.stepper.busy
                events = self.engine.step(wait)
                assert events or not wait, "the engine has no work left, but some requests are unfinished"
                self.process(events)
            self.apply_steps(wait=not self.requests)
            self.start_episodes()
            self.counter.show()
        if self.errors:
            raise RequestError(self.errors)
        assert not (self.active or self.waiting), "some episodes have neither a request nor a step under way"

    def abort(self) -> None:
        """Abort the requests of this batch and release the sequences that the engine has kept for it."""
        self.engine.abort(self.requests)
        self.engine.release(
            [
                *kept_handles(episode for group in self.groups for episode in group),
                *(handle for event, _ in self.finished if (handle := event.completion.handle) is not None),
            ]
        )

    def drop(self, episodes: Iterable[Episode]) -> None:
        """Abandon episodes: abort their requests, and ignore the steps of their environments that are under way."""
        unwanted = {id(episode): episode for episode in episodes if not episode.over}
        for episode in unwanted.values():
            episode.dropped = True
        ids = [one for one, samples in self.requests.items() if any(id(e) in unwanted for e in samples.values())]
        for request_id in ids:
            del self.requests[request_id]
        self.engine.abort(ids)
        self.engine.release(kept_handles(unwanted.values()))
        self.active -= len(unwanted)

    def process(self, events: Iterable[Event]) -> None:
        """Pass new completions to the environments, in the order of requests and samples."""
        foreign = False
        for event in events:
            if event.request_id not in self.requests:
                foreign = True  # raised after the loop, so that `abort` knows all sequences that were kept
            elif isinstance(event, Finished):
                samples = self.requests[event.request_id]
                self.finished.append((event, samples.pop(event.sample)))
                if not samples:
                    del self.requests[event.request_id]
            elif isinstance(event, Failed):
                self._fail(event)
        if foreign:
            raise RuntimeError(ANOTHER_CONSUMER)
        self.finished.sort(key=lambda pair: (pair[0].request_id, pair[0].sample), reverse=True)
        while self.finished:
            event, episode = self.finished[-1]
            action = self.runner.record_completion(episode, event.completion)
            self.counter.add(event.completion, finished=0)
            self.finished.pop()
            self.stepper.add(episode, action)

    def _fail(self, event: Failed) -> None:
        """Drop the episodes of a request that has failed."""
        self.errors[event.request_id] = event.error
        episodes = self.requests.pop(event.request_id).values()
        self.active -= len(episodes)
        self.engine.release(kept_handles(episodes))

    def apply_steps(self, wait: bool) -> None:
        """Apply completed environment steps and request the next turns."""
        stepped = [(episode, step) for episode, step in self.stepper.done(wait) if not episode.dropped]
        for episode, step in stepped:
            self.runner.apply_step(episode, step)
        over = [episode for episode, _ in stepped if episode.over]
        if over:
            self.engine.release(kept_handles(over))
            self.active -= len(over)
            self.counter.finished += len(over)
            for episode in over:
                del episode.env
        for episode, _ in stepped:
            if not episode.over:
                self._add(self.runner.next_request(episode), [episode])

    def start_episodes(self) -> None:
        """Start waiting episodes that the engine can decode besides the active ones; samples of a prompt together."""
        while self.waiting:
            prompt, first = self.waiting[0]
            if self.active and self.active + first.params.n > self.engine.info.max_batch:
                return
            self.waiting.popleft()
            episodes, request = self.runner.start_episodes(prompt, first)
            self.groups.append(episodes)
            self.active += len(episodes)
            self._add(request, episodes)

    def _add(self, request: Request, episodes: Sequence[Episode]) -> None:
        self.requests[self.engine.add(request)] = dict(enumerate(episodes))


def added_text(renderer: Renderer, before: str, text: str, token_ids: Sequence[int]) -> str:
    """The text that tokens add to a reply, which was `before` and is now `text`."""
    if text.startswith(before):
        return text.removeprefix(before)
    return renderer.decode(token_ids)  # the last character of `before` was incomplete and is now complete


def kept_handles(episodes: Iterable[Episode]) -> list[int]:
    """Handles of the sequences that the engine may still keep for these episodes."""
    last = [episode.turns[-1].completion.handle for episode in episodes if episode.turns]
    return [handle for handle in last if handle is not None]


def as_group(prompt: Prompt, episodes: Sequence[Episode]) -> Group:
    """The rollouts of finished and judged episodes."""
    return Group(prompt, [_rollout(prompt, episode) for episode in episodes])


def _rollout(prompt: Prompt, episode: Episode) -> Rollout:
    verdict = episode.verdict or Verdict(0.0, Status.NO_ANSWER, detail=episode.cut_off)
    verdict = replace(verdict, reward=sum(turn.reward for turn in episode.turns))
    for turn in episode.turns:
        turn.completion.handle = None  # no longer valid, and it would differ in a resumed run
    rollout = Rollout(prompt, episode.sample, episode.turns, verdict, verdict.reward)
    rollout.cut_off, rollout.bootstrap_ids = bool(episode.cut_off), episode.bootstrap_ids
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
