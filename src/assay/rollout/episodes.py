"""Many episodes of an environment, advanced together through one engine, each at its own pace.

A step is: the policy writes until it ends its reply or a stop string, the environment answers, the answer is appended
as tokens that are not trained on, and the same sequence goes on from what the engine kept of it, while the others are
still writing. In which order things happen depends on tokens alone, unless environments are stepped in threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from assay.engine.base import Engine, Request, SamplingParams
from assay.envs.base import Env, Observation, Step, as_messages, is_masked
from assay.rollout.seeding import request_seed
from assay.rollout.stepping import Stepper
from assay.text import Renderer
from assay.types import Completion, Finish, Group, Message, Prompt, Rollout, Status, Turn, UserError, Verdict


@dataclass(frozen=True)
class Limits:
    """Where an episode is cut off. What the policy may write in all is `max_new_tokens` of the sampling."""

    steps: int = 0  # 0: the environment's own
    step_tokens: int = 0  # that one action may have; 0: all that is left
    seconds: float = 0.0  # since it began; 0: none


@dataclass
class Episode:
    prompt: Prompt
    first: Request  # that all samples of the prompt began with
    sample: int
    env: Env
    turns: list[Turn] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)  # context of the next turn
    reply: list[int] = field(default_factory=list)  # tokens since the policy's turn began, tools' results included
    shown: str = ""  # their text
    answer: str | None = None  # left to the run's judge
    verdict: Verdict | None = None
    cut_off: str = ""  # by which limit
    following: list[int] | None = None  # what the limit kept from it
    began: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        return self.answer is not None or self.verdict is not None or bool(self.cut_off)

    @property
    def written(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def length(self) -> int:
        """Tokens of the sequence, with the context that comes next."""
        return sum(len(turn.context_ids) for turn in self.turns) + self.written + len(self.coming)


@dataclass
class Player:
    """Plays episodes of `env` with the policy that `engine` serves."""

    engine: Engine
    renderer: Renderer
    env: Env
    limits: Limits = field(default_factory=Limits)
    threads: int = 0  # for steps of slow environments

    def play(self, asked: Sequence[tuple[Prompt, Request]]) -> list[list[Episode]]:
        """For each prompt the episodes of its samples, to their end; those with an `answer` are yet to be judged.

        A request's `max_new_tokens` is what the policy may write in a whole episode. As many episodes go on at once as
        the engine decodes at once: it keeps all that was computed of these, and whoever is done makes room for others.
        """
        game = Game(self, asked)
        try:
            self.engine.generate([], on_finish=game.written, more=game.more)
        except BaseException:  # nobody will come back for what the engine has kept
            self.engine.release(kept(episode for group in game.groups for episode in group))
            raise
        finally:
            game.stepper.close()
        assert not (game.going or game.asked), "the engine ended before all episodes were over"
        return game.groups

    def begun(self, prompt: Prompt, first: Request) -> tuple[list[Episode], Request]:
        """Episodes of all samples of a prompt, and what is asked of the engine to begin with."""
        episodes = []
        for sample in range(first.params.n):
            env = self.env.fresh()
            env.start(prompt)
            episodes.append(Episode(prompt, first, sample, env, coming=list(first.prompt_ids)))
        return episodes, replace(first, params=self._params(first, 0, first.params.n), keep=self._goes_on(1))

    def took(self, episode: Episode, completion: Completion) -> str:
        """Note what was written; its text is what it adds to the text of the reply."""
        whole = len(completion.token_ids) == self.limits.step_tokens and not self.env.inline
        if whole and completion.finish is Finish.LENGTH:
            completion.finish = Finish.ACTION
        episode.reply += completion.token_ids
        text = self.renderer.decode(episode.reply)
        action = text.removeprefix(episode.shown)
        if not text.startswith(episode.shown):  # half a character before, a whole one now
            action = self.renderer.decode(completion.token_ids)
        episode.turns.append(Turn(episode.coming, completion, action))
        episode.coming, episode.shown = [], text
        return action

    def answered(self, episode: Episode, step: Step) -> None:
        observation, reward, terminated, truncated, info = step
        episode.turns[-1].reward, episode.turns[-1].masked = reward, is_masked(step)
        if terminated or truncated:
            episode.answer, episode.verdict = info.get("answer"), info.get("verdict")
            if episode.answer is None and episode.verdict is None:
                total = sum(turn.reward for turn in episode.turns)
                right = terminated and total >= self.env.full - 1e-9
                episode.verdict = Verdict(total, Status.OK if right else Status.WRONG)
            if truncated:
                episode.cut_off = "the environment cut it off"
            if truncated and not terminated and observation:
                episode.following = self._given(episode, observation)
            return
        episode.coming = self._given(episode, observation)
        if self.env.inline:
            episode.reply += episode.coming
            episode.shown = self.renderer.decode(episode.reply)
        else:
            episode.reply, episode.shown = [], ""
        last = episode.turns[-1].completion.token_ids[-1]
        if self.env.inline and last in self.renderer.stop_token_ids:
            episode.cut_off = "the reply has ended"  # which is the policy's doing
        elif limit := self._limit(episode):
            episode.cut_off, episode.following = limit, episode.coming

    def _given(self, episode: Episode, observation: Observation) -> list[int]:
        """An observation as tokens, with what stands before the policy's next words."""
        messages: Sequence[Message] = as_messages(observation, self.env.role)
        if self.env.inline:
            return self.renderer.inline_ids("".join(message["content"] for message in messages))
        return self.renderer.next_turn_ids(episode.prompt, episode.reply, messages)

    def _limit(self, episode: Episode) -> str:
        """What keeps an episode from going on, in words."""
        if not self._goes_on(len(episode.turns)):
            return f"cut off after {len(episode.turns)} steps"
        if episode.written >= episode.first.params.max_new_tokens:
            return f"cut off after {episode.written} tokens"
        if episode.length >= self.engine.max_length:
            return f"cut off at the end of the context of {self.engine.max_length} tokens"
        late = 0 < self.limits.seconds <= time.monotonic() - episode.began
        return f"cut off after {self.limits.seconds:g} s" if late else ""

    def _goes_on(self, turns: int) -> bool:
        return turns < (self.limits.steps or self.env.max_steps)

    def _params(self, first: Request, written: int, n: int = 1) -> SamplingParams:
        left = first.params.max_new_tokens - written
        tokens = min(self.limits.step_tokens or left, left)
        least = min(first.params.min_new_tokens, tokens)
        return replace(first.params, n=n, max_new_tokens=tokens, min_new_tokens=least)

    def next_request(self, episode: Episode) -> Request:
        """The next turn. Samples are requests of their own by now, so each has a seed of its own."""
        turn, first = len(episode.turns), episode.first
        return Request(
            episode.coming,
            self._params(first, episode.written),
            request_seed(first.seed, episode.sample, episode.prompt.id, turn),
            first.name,
            keep=self._goes_on(turn + 1),
            continues=episode.turns[-1].completion.handle,
        )


class Game:
    """Episodes on their way through one call of the engine: it tells what was written, and asks for what comes next."""

    def __init__(self, player: Player, asked: Sequence[tuple[Prompt, Request]]) -> None:
        self.player, self.asked = player, deque(asked)
        self.stepper: Stepper[Episode] = Stepper(player.env, player.threads, player.limits.seconds)
        self.groups: list[list[Episode]] = []
        self.going = 0  # episodes that have begun and are not over
        self.writers: list[list[Episode]] = []  # of each request, by sample
        self.actions: list[tuple[int, int, Completion]] = []  # written since the engine last asked

    def written(self, request: int, sample: int, completion: Completion) -> None:
        self.actions.append((request, sample, completion))

    def more(self, idle: bool) -> list[Request]:
        """Take what was written to the environments; requests of those whose turn it is, then of newcomers."""
        requests = self._next(wait=False)
        while idle and not requests and self.stepper.busy:
            requests = self._next(wait=True)
        return requests

    def _next(self, wait: bool) -> list[Request]:
        player = self.player
        ended = sorted(self.actions, key=lambda action: action[:2])  # the order of requests, whoever ended first
        self.actions = []
        for request, sample, completion in ended:
            episode = self.writers[request][sample]
            self.stepper.add(episode, player.took(episode, completion))
        answered = self.stepper.done(wait)
        for episode, step in answered:
            player.answered(episode, step)
        over = [episode for episode, _ in answered if episode.over]
        player.engine.release(kept(over))
        self.going -= len(over)
        going_on = [episode for episode, _ in answered if not episode.over]
        self.writers += [[episode] for episode in going_on]
        return [*(player.next_request(episode) for episode in going_on), *self._newcomers()]

    def _newcomers(self) -> list[Request]:
        requests = []
        while self.asked:
            prompt, first = self.asked[0]
            if self.going and self.going + first.params.n > self.player.engine.max_batch:
                break
            self.asked.popleft()
            episodes, request = self.player.begun(prompt, first)
            self.groups.append(episodes)
            self.writers.append(episodes)
            self.going += len(episodes)
            requests.append(request)
        return requests


def kept(episodes: Iterable[Episode]) -> list[int]:
    """What the engine may still hold of them."""
    last = [episode.turns[-1].completion.handle for episode in episodes if episode.turns]
    return [handle for handle in last if handle is not None]


def as_group(prompt: Prompt, episodes: Sequence[Episode]) -> Group:
    """Rollouts of episodes that are over and judged."""
    return Group(prompt, [_rollout(prompt, episode) for episode in episodes])


def _rollout(prompt: Prompt, episode: Episode) -> Rollout:
    verdict = episode.verdict or Verdict(0.0, Status.NO_ANSWER, detail=episode.cut_off)
    verdict = replace(verdict, reward=sum(turn.reward for turn in episode.turns))
    for turn in episode.turns:
        turn.completion.handle = None  # of no use to anybody from now on, and not the same in a run that is resumed
    rollout = Rollout(prompt, episode.sample, episode.turns, verdict, verdict.reward)
    rollout.cut_off, rollout.following = bool(episode.cut_off), episode.following
    return rollout


def check_history(renderer: Renderer, env: Env, prompt: Prompt) -> str:
    """A warning if the chat template rewrites earlier replies; a UserError if episodes cannot go on in it at all."""
    if env.inline or env.max_steps == 1:
        return ""
    next_message: Message = {"role": env.role, "content": "?"}
    if not renderer.next_turn_ids(prompt, (), [next_message]):
        raise UserError("the chat template writes nothing between two replies: give prompt.template another one")
    how = renderer.rewritten_history()
    return how and (
        f"the chat template rewrites earlier replies ({how}): episodes keep them as they were sampled, "
        "which is not what the template shows a model later"
    )
