"""The environment interface: seeded `reset` and `step` with text, as in Gymnasium, and prompts that start episodes."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self

from assay.rewards import Judge
from assay.rewards.judge import judge_safely, judged_fields
from assay.system.awaiting import attempt, is_async, resolve, then
from assay.tasks.base import UNLIMITED, LazyPrompts, Task, check_split, is_message, stable_hash
from assay.types import MAX_REWARD, Message, Prompt, Status, UserError, Verdict, describe_user_error, is_valid_reward

Observation = str | Sequence[Message]
Info = dict[str, Any]
Step = tuple[Observation, float, bool, bool, Info]  # observation, reward, terminated, truncated, info
GoldEpisode = tuple[tuple[str, str | tuple[Message, ...]], ...]
SEED = "episode_seed"  # the prompt field with the seed of its episode
PLAIN_METHODS = ("words", "gold_action", "gold_episode", "gold_completion", "judge", "copy", "step_all")
RENAMED = {"full": "max_return", "fresh": "copy", "alone": "standalone"}  # former members


@dataclass(frozen=True)
class NoJudge:
    """For environments that give all rewards themselves."""

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return Verdict(0.0, Status.WRONG)


class Env(Task, ABC):
    """An environment with one episode at a time, started by `reset`.

    `reset`, `step` and `close` may be `async`: steps of many episodes then run concurrently, in one event loop.

    All state of an episode must be set in `reset`: shallow copies run concurrently. The `info` of a step may have
    `verdict` (of the whole episode; without one, an episode is correct if its rewards sum to `max_return`), `answer` (a
    text for the run's judge, whose reward is added to the step's), and `masked` (true: the last action stays in the
    context but is not trained on).
    """

    name = "env"
    role = "user"  # of an observation that is plain text
    inline = False  # observations continue the policy's reply (a tool's result) instead of being a separate message
    stop: tuple[str, ...] = ()  # strings that end an action, besides the end of the reply
    max_steps = 16  # after which an episode is truncated, unless the settings override it
    slow = False  # whether `step` may take long; steps of several episodes then run in threads
    max_return = 1.0  # the sum of rewards of a perfect episode
    judged = False  # whether it leaves answers to the run's judge, so that the section `reward` applies

    @abstractmethod
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info] | Awaitable[tuple[Observation, Info]]:
        """Start an episode; the same seed starts the same episode."""

    @abstractmethod
    def step(self, action: str) -> Step | Awaitable[Step]:
        """Apply what the policy wrote, up to the end of its reply or a stop string (included)."""

    def gold_action(self) -> str | None:
        """Return the action of a perfect policy in the current state; None if unknown."""
        return None

    def gold_episode(self, prompt: Prompt) -> GoldEpisode:
        """Return a worked episode for SFT: actions, each with what follows it (messages, or text if inline).

        By default, `gold_action` returns the actions. Empty if they are unknown.
        """
        env, turns = self.standalone(), list[tuple[str, str | tuple[Message, ...]]]()
        resolve(env.start(prompt))
        for _ in range(self.max_steps):
            action = env.gold_action()
            if action is None:
                return ()
            observation, _, terminated, truncated, _ = validate_step(resolve(env.step(action)))
            if terminated or truncated:
                return (*turns, (action, ""))
            messages = as_messages(observation, self.role)
            turns.append((action, "".join(m["content"] for m in messages) if self.inline else messages))
        return tuple(turns)

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return unlimited episodes that differ in their seeds; splits share no seed."""
        check_split(split)
        return LazyPrompts(partial(self._seeded_prompt, split), UNLIMITED)

    def _seeded_prompt(self, split: str, index: int) -> Prompt:
        seed = stable_hash(f"{self.name}/{split}/{index}") >> 33  # 31 bits, which every generator accepts
        observation, _ = resolve(safe_reset(self.copy(), seed))
        return Prompt(f"{self.name}/{split}/{index}", as_messages(observation, self.role), fields={SEED: seed})

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return NoJudge()

    def copy(self) -> Self:
        """Return a copy for another episode; what `__init__` created is shared."""
        return copy.copy(self)

    def standalone(self) -> Self:
        """Return a copy for use without a run: it leaves no answer to a run's judge."""
        return self.copy()

    def start(self, prompt: Prompt) -> Any:
        """Start the episode of a prompt. `reset` must return the prompt's messages, which the policy reads.

        Returns what `reset` returned; an awaitable if `reset` is `async`.
        """

        def check(result: tuple[Observation, Info]) -> tuple[Observation, Info]:
            if as_messages(result[0], self.role) != tuple(prompt.messages):
                raise UserError(
                    f"{prompt.id}: reset returned another observation than the prompt's messages: "
                    "start the same episode for the same seed"
                )
            return result

        return then(safe_reset(self, prompt.fields.get(SEED), {"prompt": prompt}), check)

    def step_all(self, episodes: Sequence[Env], actions: Sequence[str]) -> list[Any]:
        """Step several episodes; steps that are `async` have to be awaited.

        An environment with worker processes can override this to step episodes in parallel.
        """
        return [safe_step(episode, action) for episode, action in zip(episodes, actions, strict=True)]

    def close(self) -> Awaitable[None] | None:
        """Release processes and files, including those shared with copies. Called after the last episode, on the
        environment that was copied; may be called more than once."""
        return None


class TaskEnv(Env):
    """Episodes on the problems of a task. This class: one answer, which is judged. Base class of tools."""

    name = "single"
    max_steps = 1
    judged = True
    default_task = ""  # used if the user names no task

    def __init__(self, task: Task) -> None:
        self.task = task
        self.default_extract, self.instruction, self.has_all = task.default_extract, task.instruction, task.has_all
        self.defer_judging = False  # leave answers to the run's judge, which has worker processes and time limits
        if words := getattr(task, "words", None):
            self.words = lambda: [*dict.fromkeys([*words(), *self.extra_words()])]
        self._judge = task.judge()
        self._train = task.prompts("train")

    def extra_words(self) -> Sequence[str]:
        """Return words that the environment writes or expects, in addition to the words of the task."""
        return ()

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self.task.prompts(split)

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return self.task.judge(extract, strict)

    def gold_completion(self, prompt: Prompt) -> str:
        return self.task.gold_completion(prompt)

    def standalone(self) -> Self:
        env = self.copy()
        env.defer_judging = False
        return env

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        given = (options or {}).get("prompt")
        self.prompt: Prompt = given or self._train[(seed or 0) % len(self._train)]
        self.reply = ""  # so far, including results of tools
        return self.prompt.messages, {"id": self.prompt.id}

    def step(self, action: str) -> Step:
        self.reply += action
        return self.finish(self.reply)

    def finish(self, answer: str, reward: float = 0.0) -> Step:
        """End the episode: the answer is judged here, or by the run."""
        if self.defer_judging:
            return "", reward, True, False, {"answer": answer}
        fields = judged_fields(self._judge, self.prompt)
        verdict = judge_safely(self._judge, answer, self.prompt.answer, fields)
        return "", reward + verdict.reward, True, False, {"verdict": verdict}

    def gold_action(self) -> str | None:
        """Return the rest of the worked solution, up to the end of an action."""
        gold = self.gold_completion(self.prompt)
        return up_to_stop(gold.removeprefix(self.reply), self.stop) if gold.startswith(self.reply) else None


ATTRIBUTES = (  # that an environment may set in `__init__`
    *("name", "role", "inline", "stop", "slow", "max_steps", "max_return", "judged"),
    *("default_extract", "instruction"),
)


class EnvWrapper(Env):
    """Steps the episodes of another environment in its own way. Everything else is that of `env`."""

    def __init__(self, env: Env) -> None:
        self.env = env
        for name in ATTRIBUTES:
            setattr(self, name, getattr(env, name))

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # not set yet, e.g. in copy.copy
            raise AttributeError(name)
        return getattr(self.env, name)

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self.env.prompts(split)

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return self.env.judge(extract, strict)

    def close(self) -> None:
        resolve(self.env.close())


class StepLimit(EnvWrapper):
    """Truncates the episodes of another environment after `max_steps` steps, as Gymnasium's TimeLimit does.

    A run limits episodes by itself; this is for loops that step an environment. Its methods are plain, even if `env`
    has `async` methods.
    """

    def __init__(self, env: Env, max_steps: int) -> None:
        super().__init__(env)
        self.max_steps, self.taken = max_steps, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        self.taken = 0
        return resolve(self.env.reset(seed=seed, options=options))

    def step(self, action: str) -> Step:
        self.taken += 1
        observation, reward, terminated, truncated, info = resolve(self.env.step(action))
        return observation, reward, terminated, truncated or (self.taken >= self.max_steps and not terminated), info

    def gold_action(self) -> str | None:
        return self.env.gold_action()

    def copy(self) -> Self:
        other = super().copy()
        other.env = self.env.copy()
        return other


def up_to_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text up to and including the first stop string."""
    ends = [start + len(stop) for stop in stops if (start := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def as_messages(observation: Any, role: str) -> tuple[Message, ...]:
    if isinstance(observation, str):
        return ({"role": role, "content": observation},)
    messages = tuple(observation) if isinstance(observation, Iterable) else ()
    if not messages or not all(map(is_message, messages)):
        raise UserError(f"an observation must be text, or messages with role and content, not {observation!r:.80}")
    return messages


def safe_reset(episode: Env, seed: int | None, options: dict[str, Any] | None = None) -> Any:
    """Call `reset`. If it fails or returns an invalid value, raise a UserError: there is no episode to judge.

    Returns (observation, info); an awaitable if `reset` is `async`.
    """

    def check(result: Any) -> tuple[Observation, Info]:
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise UserError(f"{episode.name}: reset must return (observation, info), not {result!r:.80}")
        return result

    def fail(error: BaseException) -> NoReturn:
        if isinstance(error, UserError):
            raise error
        raise UserError(f"{episode.name}: reset(seed={seed}) failed: {describe_user_error(error)}") from error

    return then(attempt(lambda: episode.reset(seed=seed, options=options), fail), check)


def safe_step(episode: Env, action: str) -> Any:
    """Call `step`. If it fails, the episode ends with an error verdict: that is not a wrong answer.

    Returns a `Step`; an awaitable if `step` is `async`.
    """
    return attempt(lambda: then(episode.step(action), validate_step), error_step)


def error_step(error: BaseException) -> Step:
    return "", 0.0, True, False, {"verdict": Verdict(0.0, Status.ERROR, detail=describe_user_error(error))}


def validate_step(step: Any) -> Step:
    """Return what an author's `step` returned; raise TypeError or ValueError if it is invalid."""
    if not isinstance(step, tuple) or len(step) != 5:
        raise TypeError(f"step must return (observation, reward, terminated, truncated, info), not {step!r:.80}")
    observation, reward, terminated, truncated, info = step
    try:
        reward = float(reward)
    except (TypeError, ValueError):
        raise TypeError(f"step must return a number as reward, not {reward!r:.80}") from None
    if not is_valid_reward(reward):
        raise ValueError(f"step returned the reward {reward}, which is not finite or above {MAX_REWARD:g}")
    if terminated not in (True, False) or truncated not in (True, False):
        raise TypeError(f"terminated and truncated must be true or false, not {terminated!r:.40} and {truncated!r:.40}")
    if not isinstance(info, dict):
        raise TypeError(f"step must return a dict as info, not {info!r:.80}")
    for key, kind in (("verdict", Verdict), ("answer", str)):
        if not isinstance(info.get(key), kind | None):
            raise TypeError(f"info[{key!r}] must be a {kind.__name__}, not {info[key]!r:.80}")
    if info.get("masked", False) not in (True, False):
        raise TypeError(f"info['masked'] must be true or false, not {info['masked']!r:.40}")
    if isinstance(observation, Iterator):
        observation = tuple(observation)  # it is read more than once
    if not (terminated or (truncated and not observation)):
        as_messages(observation, "user")
    return observation, reward, bool(terminated), bool(truncated), info


def is_masked(step: Step) -> bool:
    """Return whether the action before this step's observation is left out of the loss."""
    return bool(step[4].get("masked"))


def check_attributes(env: Env) -> Env:
    """Return the environment; raise a UserError if one of its attributes is invalid."""
    for old, new in RENAMED.items():
        if callable(member := getattr(type(env), old, None)) or isinstance(member, int | float):
            raise UserError(f"{env.name}: '{old}' of environments was renamed: use '{new}'")
    for name in PLAIN_METHODS:
        if is_async(getattr(env, name, None)):
            raise UserError(f"{env.name}: {name} must be a plain function: only reset, step and close may be async")
    stop, steps, total = env.stop, env.max_steps, env.max_return
    valid = {
        'stop must be a tuple of strings, such as ("</tool>",)': not isinstance(stop, str)
        and all(isinstance(end, str) and end for end in stop),
        "max_steps must be an integer of at least 1": type(steps) is int and steps >= 1,
        "role must be text": isinstance(env.role, str),
        "max_return must be a finite number": isinstance(total, int | float) and math.isfinite(total),
    }
    for sentence, holds in valid.items():
        if not holds:
            raise UserError(f"{env.name}: {sentence}, not {getattr(env, sentence.split()[0])!r:.80}")
    return env
