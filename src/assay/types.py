"""Core data types. Standard library only, so that every package can import them."""

from __future__ import annotations

import re
import sysconfig
import traceback
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, Self, TypedDict, TypeVar

T = TypeVar("T")
DISTRIBUTION = "assay-rl"  # name of the package in the package index


class Closeable(ABC):
    """Has resources; a `with` block closes it at its end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do about it."""

    what: str
    remedy: str = ""  # empty: `what` says it

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}" if self.remedy else self.what


class UserError(ValueError):
    """A mistake that the user can fix: a text or a `Problem`. The command line prints it as one line and exits with
    code 2.
    """

    @property
    def problem(self) -> Problem:
        first = self.args[0] if self.args else ""
        return first if isinstance(first, Problem) else Problem(str(self))


class Progress(Protocol):
    """Receives how far a long operation is; `Console.progress` shows it. Called often, so it must return quickly.

    `what` names the operation, e.g. "sampling"; it is over when `done` equals `total`. `unit`: what is counted.
    `tokens`: number of tokens so far, if `unit` is not tokens. `most_tokens`: upper bound of that number at the end.
    """

    def __call__(
        self, what: str, done: int, total: int, unit: str = "", tokens: int = 0, most_tokens: int = 0
    ) -> None: ...


def describe_error(error: BaseException, limit: int = 300) -> str:
    """Describe an exception in one line of limited length: its type and message."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # the __str__ of users' exceptions may fail
        text = ""
    return clip(f"{type(error).__name__}: {text}" if text else type(error).__name__, limit)


def clip(text: str, limit: int) -> str:
    """The beginning of a text that is longer than `limit` characters, with dots."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def excerpt(text: str, limit: int = 300) -> str:
    """The beginning of a text as one line. A question mark replaces each character that cannot be printed."""
    line = " ".join(text[: 4 * limit].split())
    return clip("".join(char if char.isprintable() else "?" for char in line), limit)


LIBRARY_PATHS = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")


def describe_user_error(error: BaseException) -> str:
    """Describe an exception of a user's code in one line: type, message, and the file and line that raised it."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    user_frames = [f"{file}:{line}" for file, line in frames if not file.startswith(LIBRARY_PATHS)]
    return describe_error(error) + (f" ({user_frames[-1]})" if user_frames else "")


def hide_credentials(text: str) -> str:
    """A text in which `***` replaces user names, passwords and queries of URLs, which may contain keys."""
    text = re.sub(r"(\b[a-z][a-z0-9+.-]*://)[^\s'\"]*@", r"\1***@", text, flags=re.I)
    return re.sub(r"(\b[a-z][a-z0-9+.-]*://[^\s'\"?]*\?)[^\s'\"]+", r"\1***", text, flags=re.I)


MAX_REWARD = 1e15  # in size: squares of much larger rewards overflow
INVALID_REWARD = f"is not a finite number of at most {MAX_REWARD:g}"


def is_valid_reward(reward: float) -> bool:
    """Return whether a reward is finite and not too large to train with."""
    return abs(reward) <= MAX_REWARD


def plural(count: int, noun: str) -> str:
    """A number and its noun: 1 step, 2 steps, 1,000 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def extra_commands(extra: str) -> tuple[str, str]:
    """The commands that install an extra: in a checkout, and from the package index."""
    return f"pip install -e '.[{extra}]'", f"pip install '{DISTRIBUTION}[{extra}]'"


def missing_extra(purpose: str, extra: str, advice: str = "") -> UserError:
    """Return the error for a feature whose optional dependencies are not installed; `advice` is another way out."""
    checkout, index = extra_commands(extra)
    ways = [f"{checkout} in a checkout", f"or {index}"]
    return UserError(f"{purpose} needs the {extra} extra: {', '.join([*ways, advice] if advice else ways)}")


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, where: str = "", listed: Iterable[str] | None = None
) -> UserError:
    """Return the error for a name that is not one of `known`: it suggests the most similar one and lists all.

    `listed` is printed instead of `known`. With a suggestion, a long list (above 20 names) is left out.
    """
    valid = list(known)
    what = f"unknown {kind} '{name}'" + (f" {where}" if where else "")
    names = ", ".join(valid if listed is None else listed) or "none"
    suggestion = closest(name, valid)
    if suggestion is None:
        return UserError(f"{what}; known: {names}")
    return UserError(Problem(what, f"did you mean '{suggestion}'?" + f" known: {names}" * (len(valid) <= 20)))


def closest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most similar to `name`, or None if all are too different.

    Of dotted names the last part counts most, so that a key in the wrong section is found. Swapped letters count as
    the most likely mistake. Of equally similar names, the first is returned.
    """
    section, _, last = name.lower().rpartition(".")

    def similarity(candidate: str) -> tuple[float, bool]:
        other_section, _, other_last = candidate.lower().rpartition(".")
        of_last = SequenceMatcher(None, other_last, last).ratio()
        of_section = SequenceMatcher(None, other_section, section).ratio() if section or other_section else of_last
        if (section or other_section) and of_section < 0.6:
            of_section = 0.4  # different sections, or none given: all of them are equally likely
        return of_last + 0.5 * of_section + (of_last == 1), sorted(candidate) == sorted(name)

    best = max(known, key=similarity, default=None)
    return best if best is not None and similarity(best)[0] > 0.9 else None


TASK_LABEL = "task_label"  # the prompt field with the label of its task, if several tasks are mixed


class Message(TypedDict):
    role: str  # system, user, assistant or tool
    content: str


class Finish(StrEnum):
    """Why the engine ended a completion."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_new_tokens, or the end of the context
    ACTION = "action"  # the token limit of one environment step (env.max_tokens)


class Status(StrEnum):
    """Outcome of judging. A failed judge is reported as TIMEOUT or ERROR, never as a silent zero."""

    OK = "ok"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # no final answer was found
    UNPARSABLE = "unparsable"  # the final answer cannot be parsed
    TIMEOUT = "timeout"  # the judge exceeded its time limit
    ERROR = "error"  # the judge or the environment failed; see `detail`


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a task: the messages of the prompt, and the information that its judge needs."""

    id: str  # stable across runs, e.g. "gsm8k/train/17"
    messages: tuple[Message, ...]
    answer: str = ""  # the gold answer
    solution: str | None = None  # a worked solution, for SFT and few-shot examples
    fields: Mapping[str, Any] = field(default_factory=dict)  # task-specific: nums, target, level, ...
    # A worked episode of an environment, for SFT: actions, each with what follows it (messages; text if inline).
    episode: tuple[tuple[str, str | tuple[Message, ...]], ...] = ()

    @property
    def question(self) -> str:
        """The last user message."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")

    @property
    def worked_text(self) -> str | None:
        """What SFT trains on: the solution, or the actions of the worked episode; None without either."""
        return " ".join(action for action, _ in self.episode) if self.episode else self.solution


@dataclass(slots=True)
class Verdict:
    """Result of judging one completion."""

    reward: float
    status: Status
    parsed: str | None = None  # the extracted answer
    parts: dict[str, float] = field(default_factory=dict)  # components of the reward, before weighting
    detail: str = ""  # explanation in one line

    @property
    def correct(self) -> bool:
        return self.status is Status.OK


@dataclass(slots=True)
class Completion:
    """One sampled completion. Log-probabilities are those of the sampled tokens, one per token id.

    Completions of endpoints that return text have neither token ids nor log-probabilities.
    """

    token_ids: list[int]
    engine_logprobs: list[float]  # at the sampling temperature, before top-k/top-p/min-p truncation
    sampling_logprobs: list[float]  # after truncation: what the token was really drawn with
    finish: Finish
    version: int = 0  # version of the weights that sampled the first token
    # Means over the tokens; None if the engine does not report them.
    kept_mass: float | None = None  # probability mass left by truncation and forbidden tokens
    entropy: float | None = None  # of the distribution that `engine_logprobs` belong to
    handle: int | None = None  # for continuing the sequence in the engine, if requested
    version_spans: tuple[tuple[int, int], ...] = ()  # (version, number of tokens), if weights changed during sampling
    text: str | None = None  # of an endpoint that returns text
    text_tokens: int = 0  # of this text, as the endpoint counts them

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids) if self.text is None else self.text_tokens

    @property
    def appended(self) -> list[Any]:
        """What follows the context in a sequence: token ids, or a text (see `assay.text.render`)."""
        return self.token_ids if self.text is None else [self.text]

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(weights version, number of tokens sampled with it), in the order of the tokens."""
        return self.version_spans or ((self.version, len(self.token_ids)),)

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)


@dataclass(slots=True)
class Turn:
    """Context tokens (a prompt or an observation; never trained on), followed by a completion of the policy."""

    context_ids: list[int]
    completion: Completion
    text: str  # the decoded completion, without special tokens
    reward: float = 0.0  # of this environment step, before shaping; 0 if only the whole episode is judged
    masked: bool = False  # excluded from the loss by the environment: context only
    inserted: str = ""  # decoded context that the environment put into the policy's reply, such as a tool's result

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return 0 if self.masked else len(self.completion.token_ids)


@dataclass(slots=True)
class Rollout:
    """One sampled answer or episode with its verdict."""

    prompt: Prompt
    sample: int  # index within its group
    turns: list[Turn]
    verdict: Verdict | None = None
    reward: float = 0.0  # the verdict's reward after shaping
    advantage: float = 0.0
    token_advantages: list[float] | None = None  # per trained token, if credit differs between steps or tokens
    inputs: dict[str, list[float]] = field(default_factory=dict)  # of loss terms, per trained token
    masked: bool = False  # excluded from the loss (truncated answers, by a filter; answers that were not judged)
    cut_off: bool = False  # ended by a limit of the environment (steps, tokens, time, context)
    bootstrap_ids: list[int] | None = None  # context after the last turn, if a limit ended the episode
    # Values per trained token, as a list or array, if they were computed: log-probabilities and entropies (in nats) by
    # the trainer in the first update that used the rollout, and log-probabilities by the reference model.
    trainer_logprobs: Collection[float] | None = field(default=None, compare=False)
    entropies: Collection[float] | None = field(default=None, compare=False)
    ref_logprobs: Collection[float] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """One line: the values of all tokens would fill pages."""
        facts = f"sample={self.sample}, reward={self.reward:g}, {plural(self.length, 'token')}"
        return f"Rollout({self.prompt.id!r}, {facts}, {excerpt(self.text, 60)!r})"

    @property
    def text(self) -> str:
        """All turns, with what the environment inserted into the reply."""
        return "".join(turn.inserted + turn.text for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        return turn_by_turn((turn.context_ids, turn.completion.token_ids) for turn in self.turns)

    @property
    def loss_mask(self) -> list[int]:
        """1 for tokens sampled by the policy, 0 for context tokens and masked turns."""
        marks = [(turn, 0 if turn.masked else 1) for turn in self.turns]
        return turn_by_turn(
            ([0] * len(turn.context_ids), [mark] * len(turn.completion.token_ids)) for turn, mark in marks
        )

    @property
    def engine_logprobs(self) -> list[float]:
        """Aligned with `token_ids`; 0 for context tokens."""
        return turn_by_turn(([0.0] * len(turn.context_ids), turn.completion.engine_logprobs) for turn in self.turns)

    @property
    def length(self) -> int:
        """Number of tokens sampled by the policy."""
        return sum(turn.completion.length for turn in self.turns)

    @property
    def trained(self) -> int:
        """Number of trained tokens (if the rollout is not masked)."""
        return sum(turn.trained for turn in self.turns)

    @property
    def failed(self) -> bool:
        """Whether its reward is unknown, because the judge or the environment failed: it is not trained on."""
        return self.verdict is not None and self.verdict.status is Status.ERROR

    @property
    def truncated(self) -> bool:
        return self.cut_off or self.turns[-1].completion.finish is Finish.LENGTH

    @property
    def learns(self) -> bool:
        """Whether any trained token has a nonzero advantage."""
        return any([self.advantage and self.trained] if self.token_advantages is None else self.token_advantages)


@dataclass(slots=True)
class Group:
    """All rollouts of one prompt in one step; group baselines compare them."""

    prompt: Prompt
    rollouts: list[Rollout]
    baseline: float | None = None  # reward of a greedy answer, subtracted from the rewards

    def __repr__(self) -> str:
        rewards = ", ".join(f"{reward:g}" for reward in self.rewards)
        return f"Group({self.prompt.id!r}, {plural(len(self.rollouts), 'rollout')}, rewards [{rewards}])"

    @property
    def judged(self) -> list[Rollout]:
        """The rollouts whose reward is known; only these are compared."""
        return [rollout for rollout in self.rollouts if not rollout.failed]

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


def turn_by_turn(turns: Iterable[tuple[list[T], list[T]]]) -> list[T]:
    """Concatenate context and completion of all turns. Copies whole lists: a step has 100,000s of tokens."""
    result: list[T] = []
    for context, completion in turns:
        result += context
        result += completion
    return result
