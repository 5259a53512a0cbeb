"""The nouns of the house. Standard library only, so that every room can speak them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any, TypedDict, TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """A mistake that the user can fix. The command line prints it as one line and exits with code 2."""


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, where: str = "", listed: Iterable[str] | None = None
) -> UserError:
    """Return the error for a name that is not one of `known`: it suggests the most similar one and lists all.

    `listed` is printed instead of `known`. With a suggestion, a long list (above 20 names) is left out.
    """
    valid = list(known)
    text = f"unknown {kind} '{name}'" + (f" {where}" if where else "")
    suggestion = closest(name, valid)
    if suggestion is not None:
        text += f": did you mean '{suggestion}'?"
    if suggestion is None or len(valid) <= 20:
        names = ", ".join(valid if listed is None else listed) or "none"
        text += f"{';' if suggestion is None else ''} known: {names}"
    return UserError(text)


def closest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name most similar to `name`, or None if all are too different.

    Of dotted names the last part counts most, so that a key in the wrong section is found. Swapped letters count as
    the most likely mistake.
    """

    def similarity(candidate: str) -> tuple[float, bool]:
        last = SequenceMatcher(None, candidate.lower().rpartition(".")[2], wanted.rpartition(".")[2]).ratio()
        whole = SequenceMatcher(None, candidate.lower(), wanted).ratio()
        return last + 0.5 * whole, sorted(candidate) == sorted(name)

    wanted = name.lower()
    best = max(known, key=similarity, default=None)
    return best if best is not None and similarity(best)[0] > 0.9 else None


class Message(TypedDict):
    role: str  # system, user, assistant or tool
    content: str


class Finish(StrEnum):
    """Why the engine stopped writing a completion."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_new_tokens, or the end of the context
    ACTION = (
        "action"  # the limit of one action in an environment (env.max_tokens), which ends it as a stop string would
    )


class Status(StrEnum):
    """What a judge found. A judge that failed is data too: never a silent zero."""

    OK = "ok"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # nothing that looks like a final answer
    UNPARSABLE = "unparsable"  # there is an answer, but it cannot be read
    TIMEOUT = "timeout"  # the judge ran past its time limit
    ERROR = "error"  # the judge itself failed, or the environment; `detail` says how


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a task: what is asked, and what its judge needs to know."""

    id: str  # stable over runs, e.g. "gsm8k/train/17"
    messages: tuple[Message, ...]
    answer: str = ""  # the gold answer
    solution: str | None = None  # a worked solution, for SFT and few-shot examples
    fields: Mapping[str, Any] = field(default_factory=dict)  # anything else: nums, target, level, ...

    @property
    def question(self) -> str:
        """The last user message."""
        return next((m["content"] for m in reversed(self.messages) if m["role"] == "user"), "")


@dataclass(slots=True)
class Verdict:
    """What a judge says of one completion."""

    reward: float
    status: Status
    parsed: str | None = None  # the answer as it was extracted
    parts: dict[str, float] = field(default_factory=dict)  # the reward's components, before weighting
    detail: str = ""  # one line, for people

    @property
    def correct(self) -> bool:
        return self.status is Status.OK


@dataclass(slots=True)
class Completion:
    """What the engine wrote for one sample. Log-probabilities are of the sampled tokens, one for each token id."""

    token_ids: list[int]
    engine_logprobs: list[float]  # at the sampling temperature, before top-k/top-p: what the trainer recomputes
    sampling_logprobs: list[float]  # after truncation: what the token was really drawn with
    finish: Finish
    version: int = 0  # of the weights that sampled its first token
    kept_mass: float = 1.0  # mean probability of what could be drawn; 1 without truncation and forbidden tokens
    entropy: float = 0.0  # mean over its tokens, of the distribution that `engine_logprobs` belong to
    handle: int | None = None  # by which the engine can continue it, where that was asked for
    version_spans: tuple[tuple[int, int], ...] = ()  # (version, tokens), if the weights changed while it was sampled

    @property
    def versions(self) -> tuple[tuple[int, int], ...]:
        """(weights version, number of tokens that it sampled), in the order of the tokens."""
        return self.version_spans or ((self.version, len(self.token_ids)),)

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)


@dataclass(slots=True)
class Turn:
    """Tokens given to the policy (a prompt, a tool's answer: never trained on), then what it wrote."""

    context_ids: list[int]
    completion: Completion
    text: str  # the completion, decoded, without special tokens
    reward: float = 0.0  # of this step of an environment, before any shaping; 0 where only the whole is judged
    masked: bool = False  # its environment wants it as context only: nothing is learnt from what was written in it

    @property
    def trained(self) -> int:
        """Tokens of it that are in the loss."""
        return 0 if self.masked else len(self.completion.token_ids)


@dataclass(slots=True)
class Rollout:
    """One attempt at a prompt, from the first token to the verdict."""

    prompt: Prompt
    sample: int  # index within its group
    turns: list[Turn]
    verdict: Verdict | None = None
    reward: float = 0.0  # what the algorithm learns from: the verdict's reward after shaping
    advantage: float = 0.0
    token_advantages: list[float] | None = None  # of each token in the loss, where steps or tokens differ in credit
    inputs: dict[str, list[float]] = field(default_factory=dict)  # per trained token, from a credit rule to the loss
    masked: bool = False  # a filter took it out of the loss (e.g. cut off at the length limit)
    cut_off: bool = False  # an environment's limit (steps, tokens, time, context) ended it
    following: list[int] | None = field(default=None, compare=False)  # tokens that this kept from it; in no file

    @property
    def text(self) -> str:
        return "".join(turn.text for turn in self.turns)

    @property
    def token_ids(self) -> list[int]:
        return turn_by_turn((turn.context_ids, turn.completion.token_ids) for turn in self.turns)

    @property
    def loss_mask(self) -> list[int]:
        """1 for each token that the policy sampled, 0 for what it was given and for turns that are masked."""
        marks = [(turn, 0 if turn.masked else 1) for turn in self.turns]
        return turn_by_turn(
            ([0] * len(turn.context_ids), [mark] * len(turn.completion.token_ids)) for turn, mark in marks
        )

    @property
    def engine_logprobs(self) -> list[float]:
        """Aligned with `token_ids`; 0 for what the policy was given."""
        return turn_by_turn(([0.0] * len(turn.context_ids), turn.completion.engine_logprobs) for turn in self.turns)

    @property
    def length(self) -> int:
        """Tokens written by the policy."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def trained(self) -> int:
        """Those of them that are in the loss, unless a filter takes out the whole."""
        return sum(turn.trained for turn in self.turns)

    @property
    def truncated(self) -> bool:
        return self.cut_off or self.turns[-1].completion.finish is Finish.LENGTH

    @property
    def learns(self) -> bool:
        """Whether any of its tokens in the loss has an advantage."""
        return any([self.advantage and self.trained] if self.token_advantages is None else self.token_advantages)


@dataclass(slots=True)
class Group:
    """All attempts at one prompt in one step: what group baselines compare."""

    prompt: Prompt
    rollouts: list[Rollout]
    baseline: float | None = None  # reward of a greedy answer, which is taken off the others' where there is one

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward for rollout in self.rollouts]


def turn_by_turn(turns: Iterable[tuple[list[T], list[T]]]) -> list[T]:
    """What was given and what was written, turn after turn. Lists are copied whole: a step has 100,000s of tokens."""
    found: list[T] = []
    for given, written in turns:
        found += given
        found += written
    return found
