"""What an environment is: seeded `reset`, `step` with text, as in Gymnasium; and prompts that episodes begin with.

A limit on the time of code that is not ours, or a report of how long it takes.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread, Timer
from typing import Any, Self, TypeVar

from assay.rewards import Judge
from assay.rewards.judge import judge_safely, one_line
from assay.tasks.base import UNLIMITED, LazyPrompts, Task, check_split, stable_hash
from assay.types import Message, Prompt, Status, UserError, Verdict

Observation = str | Sequence[Message]
Info = dict[str, Any]
Step = tuple[Observation, float, bool, bool, Info]  # observation, reward, terminated, truncated, info
SEED = "episode_seed"  # the field of a prompt that says how its episode is to be reset


@dataclass(frozen=True)
class NoJudge:
    """For environments that give all rewards themselves."""

    def __call__(self, completion: str, answer: str, fields: Mapping[str, Any]) -> Verdict:
        return Verdict(0.0, Status.WRONG)


class Env(Task, ABC):
    """One episode at a time, begun by `reset`. All that an episode changes is set there: copies play side by side.

    `info` of a step may hold `verdict` (of the whole episode; without one it is right if its rewards add up to `full`)
    or `answer` (a text for the run's judge, whose reward is added to the step's); and `masked`: true if the action just
    made is context only, which stays in the episode but out of the loss.
    """

    name = "env"
    role = "user"  # of an observation that is plain text
    inline = False  # observations go on within the policy's reply (a tool's result), not in a message of their own
    stop: tuple[str, ...] = ()  # strings that end an action, besides the end of the reply
    max_steps = 16  # after which an episode is cut off, unless the settings say otherwise
    slow = False  # whether `step` may take long and can run in threads, of several episodes at a time
    full = 1.0  # what the rewards of a perfect episode add up to
    judged = False  # whether it leaves answers to the run's judge, so that the settings of rewards have a say

    @abstractmethod
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begin an episode; the same seed begins the same one."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """What the policy wrote, up to its end or a stop string, which is part of it."""

    def gold_action(self) -> str | None:
        """What a perfect policy would write now; None if the environment cannot tell."""
        return None

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Episodes without end, told apart by their seeds; splits share none."""
        check_split(split)
        return LazyPrompts(partial(self._seeded, split), UNLIMITED)

    def _seeded(self, split: str, index: int) -> Prompt:
        seed = stable_hash(f"{self.name}/{split}/{index}") >> 33  # 31 bits, which any generator takes
        observation, _ = safe_reset(self.fresh(), seed)
        return Prompt(f"{self.name}/{split}/{index}", as_messages(observation, self.role), fields={SEED: seed})

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return NoJudge()

    def fresh(self) -> Self:
        """Another one like this, to play an episode of its own. What was made once, by `__init__`, is shared."""
        return copy.copy(self)

    def alone(self) -> Self:
        """Another one like this, to be played without a run: it leaves no answer to a run's judge."""
        return self.fresh()

    def start(self, prompt: Prompt) -> tuple[Observation, Info]:
        """Begin the episode of a prompt. What the policy reads is the prompt's: it must be what `reset` says again."""
        observation, info = safe_reset(self, prompt.fields.get(SEED), {"prompt": prompt})
        if as_messages(observation, self.role) != tuple(prompt.messages):
            raise UserError(
                f"{prompt.id}: reset gives another observation than the prompt's messages: "
                "begin the same episode for the same seed"
            )
        return observation, info

    def step_all(self, episodes: Sequence[Env], actions: Sequence[str]) -> list[Step]:
        """A step of many episodes at once. A tool with processes of its own can do better than one after the other."""
        return [safe_step(episode, action) for episode, action in zip(episodes, actions, strict=True)]

    def close(self) -> None:
        """Let go of processes and files, once all episodes are over."""


class TaskEnv(Env):
    """Episodes about the problems of a task. Here: one answer, judged. The easy case, and what tools build upon."""

    name = "single"
    max_steps = 1
    judged = True
    default_task = ""  # what is solved if the user names no task

    def __init__(self, task: Task) -> None:
        self.task = task
        self.default_extract, self.instruction, self.has_all = task.default_extract, task.instruction, task.has_all
        self.deferred = False  # whether answers are left to the run's judge, which has processes and time limits
        if words := getattr(task, "words", None):
            self.words = lambda: [*dict.fromkeys([*words(), *self.own_words()])]
        self._judge = task.judge()
        self._train = task.prompts("train")

    def own_words(self) -> Sequence[str]:
        """Words that the environment writes, or wants written, beyond those of the task."""
        return ()

    def prompts(self, split: str) -> Sequence[Prompt]:
        return self.task.prompts(split)

    def judge(self, extract: str | None = None, strict: bool = True) -> Judge:
        return self.task.judge(extract, strict)

    def gold_completion(self, prompt: Prompt) -> str:
        return self.task.gold_completion(prompt)

    def alone(self) -> Self:
        found = self.fresh()
        found.deferred = False
        return found

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        given = (options or {}).get("prompt")
        self.prompt: Prompt = given or self._train[(seed or 0) % len(self._train)]
        self.said = ""  # the reply so far, results of tools included
        return self.prompt.messages, {"id": self.prompt.id}

    def step(self, action: str) -> Step:
        self.said += action
        return self.answered(self.said)

    def answered(self, text: str, reward: float = 0.0) -> Step:
        """The end of an episode: `text` is judged, here or by the run."""
        if self.deferred:
            return "", reward, True, False, {"answer": text}
        verdict = judge_safely(self._judge, text, self.prompt.answer, self.prompt.fields)
        return "", reward + verdict.reward, True, False, {"verdict": verdict}

    def gold_action(self) -> str | None:
        """The rest of the worked solution, up to where an action ends."""
        whole = self.gold_completion(self.prompt)
        return up_to_stop(whole.removeprefix(self.said), self.stop) if whole.startswith(self.said) else None


def up_to_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to and with the first stop string."""
    ends = [place + len(stop) for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(ends, default=len(text))]


def as_messages(observation: Any, role: str) -> tuple[Message, ...]:
    if isinstance(observation, str):
        return ({"role": role, "content": observation},)
    messages = tuple(observation) if isinstance(observation, Iterable) else ()
    if not messages or not all(map(is_message, messages)):
        raise UserError(f"an observation must be text, or messages with role and content, not {observation!r:.80}")
    return messages


def is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def safe_reset(episode: Env, seed: int | None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
    """An episode that cannot begin, or not as it has to, is a mistake that ends the run: there is nothing to judge."""
    try:
        found: Any = episode.reset(seed=seed, options=options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{episode.name}: reset(seed={seed}) failed: {one_line(error)}") from error
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        raise UserError(f"{episode.name}: reset must return (observation, info), not {found!r:.80}")
    return found


def safe_step(episode: Env, action: str) -> Step:
    """A step that fails ends its episode with a verdict that says so: a broken environment is not a wrong answer."""
    try:
        return checked(episode.step(action))
    except (Exception, SystemExit) as error:
        return failed_step(error)


def failed_step(error: BaseException) -> Step:
    return "", 0.0, True, False, {"verdict": Verdict(0.0, Status.ERROR, detail=one_line(error))}


def checked(step: Any) -> Step:
    """What an author's `step` returned, if it is what it has to be."""
    if not isinstance(step, tuple) or len(step) != 5:
        raise TypeError(f"step must return (observation, reward, terminated, truncated, info), not {step!r:.80}")
    observation, reward, terminated, truncated, info = step
    try:
        reward = float(reward)
    except (TypeError, ValueError):
        raise TypeError(f"step must return a number as reward, not {reward!r:.80}") from None
    if not math.isfinite(reward):
        raise ValueError(f"step gave the reward {reward}, which is not finite")
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
    """Whether the action that it answers is to be left out of the loss."""
    return bool(step[4].get("masked"))


def check_attributes(env: Env) -> Env:
    """The same, if what its class says of it can be meant."""
    stop: Any = env.stop
    if isinstance(stop, str) or not all(isinstance(end, str) and end for end in stop):
        raise UserError(f'{env.name}: stop must be a tuple of strings, such as ("</tool>",), not {stop!r:.80}')
    if isinstance(env.max_steps, bool) or not isinstance(env.max_steps, int) or env.max_steps < 1:
        raise UserError(f"{env.name}: max_steps must be a whole number of at least 1, not {env.max_steps!r:.80}")
    if not isinstance(env.role, str) or not isinstance(env.full, int | float) or not math.isfinite(env.full):
        raise UserError(f"{env.name}: role must be text and full a number, not {env.role!r:.40} and {env.full!r:.40}")
    return env


T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` gives, or TimeoutError. 0: however long it takes.

    A thread cannot be ended: one that hangs is left behind, and does not keep the program from ending.
    """
    if not seconds:
        return work()
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, name="assay-limited", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"took longer than {seconds:g} s")
    return found[0]


@contextmanager
def reported_after(seconds: float, text: str) -> Iterator[None]:
    """A warning if the block is still running after so many seconds. It goes on."""
    timer = Timer(seconds, warnings.warn, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
