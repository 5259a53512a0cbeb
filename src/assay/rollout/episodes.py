"""What happens to the tokens of an episode in each turn: `rollout.play` plays episodes by these rules.

In each turn the policy samples an action up to the end of its reply or a stop string, the environment steps, and the
observation is appended as tokens with loss mask 0.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from assay.engine.base import EngineInfo, Request, SamplingParams
from assay.envs.base import Env, Observation, Step, as_messages, is_masked
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
