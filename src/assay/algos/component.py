"""Base classes of the components of an algorithm: settings, needs, per-token inputs, checks and state.

The loss of a batch is the sum over its terms of coefficient * sum over tokens of weight * loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from assay.algos.batch import LossBatch
from assay.config import Section
from assay.types import Group, Rollout, UserError, describe_user_error, plural, unknown_name

Loader = Callable[[str], Any]  # "file.py:name" -> object


@dataclass(frozen=True)
class Needs:
    """What the trainer must provide. The needs of an algorithm are the union of the needs of its components."""

    ref_logprobs_in_loss: bool = False  # LossBatch.ref_logprobs
    ref_logprobs_in_credit: bool = False  # Scorers.ref_logprobs
    values: bool = False  # Scorers.values, from a critic that is trained on the returns
    greedy_rollouts: bool = False  # one greedy rollout per group, for its baseline
    trainer_logprobs: bool = False  # log-probabilities recomputed by the trainer before the first update
    entropy_gradient: bool = False  # LossBatch.entropy with gradient, not only as a metric
    whole_sequences: bool = False  # the loss cannot be computed on a slice of a sequence
    every_rollout: bool = False  # also rollouts with advantage 0, which have a gradient or affect metrics

    @property
    def reference(self) -> bool:
        """Whether a reference model is needed."""
        return self.ref_logprobs_in_loss or self.ref_logprobs_in_credit

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, need.name) or getattr(other, need.name) for need in fields(Needs)))


@dataclass(frozen=True)
class LengthLimits:
    """Length limits of the run, in tokens; 0: unknown."""

    max_new_tokens: int = 0  # of an answer
    max_length: int = 0  # of prompt and answer together


@dataclass(frozen=True)
class RunFacts:
    """Properties of the run that determine whether a setting of the algorithm has an effect."""

    episodes: bool = False  # whether rollouts are episodes of an environment
    updates: int = 1  # optimizer steps per batch of rollouts, over all passes
    stale_ratios: bool = False  # whether even the first update on a batch has ratios other than 1


@dataclass(frozen=True)
class Scorers:
    """Functions of the trainer that a credit rule may call; set if `Needs` asks for them.

    Both return one list per rollout with one number per trained token. For a bootstrapped rollout, `values` returns
    one more: the value of the state after the last token.
    """

    ref_logprobs: Callable[[Sequence[Group]], list[list[float]]] | None = None
    values: Callable[[Sequence[Rollout]], list[list[float]]] | None = None


class TokenRow(Protocol):
    """A sequence of an optimizer step, as a `TokenInput` sees it."""

    @property
    def sampled_logprobs(self) -> list[float]: ...  # of the trained tokens, from the policy that sampled them

    @property
    def token_advantages(self) -> list[float]: ...

    @property
    def inputs(self) -> Mapping[str, Sequence[float]]: ...


@dataclass(frozen=True)
class TokenInput:
    """One number per trained token for a loss term, available as `LossBatch.inputs[name]`.

    Computed from one rollout at a time, or from all rows of an optimizer step before they are split.
    """

    name: str
    from_rollout: Callable[[Rollout], Sequence[float]] | None = None
    from_rows: Callable[[Sequence[TokenRow]], Sequence[Sequence[float]]] | None = None

    def of_rollout(self, rollout: Rollout) -> list[float]:
        assert self.from_rollout is not None
        return self._checked(self.from_rollout(rollout), rollout.trained)

    def of_rows(self, rows: Sequence[TokenRow]) -> list[list[float]]:
        assert self.from_rows is not None
        given = self.from_rows(rows)
        if len(given) != len(rows):
            raise UserError(
                f"token input {self.name!r} has {len(given)} lists for {len(rows)} sequences: return one per sequence"
            )
        return [self._checked(values, len(row.token_advantages)) for values, row in zip(given, rows, strict=True)]

    def _checked(self, values: Sequence[float], tokens: int) -> list[float]:
        if len(values) != tokens:
            raise UserError(
                f"token input {self.name!r} has {len(values)} values for {tokens} trained tokens: return one per token"
            )
        return list(values)


S = TypeVar("S", bound=Section)


class Component(Generic[S]):
    """A part of an algorithm. Its settings are declared in its config section only."""

    name: ClassVar[str] = ""  # key of its saved state
    parts: Sequence[Component[Any]] = ()  # further components, which this one applies

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def inputs(self) -> Sequence[TokenInput]:
        """Per-token inputs in addition to the fields of `LossBatch`."""
        return ()

    def check(self) -> None:
        """Raise a UserError if settings contradict each other."""

    def check_replay(self) -> None:
        """Raise a UserError if the component cannot be used with groups of an earlier policy."""

    def check_staleness(self) -> None:
        """Raise a UserError if the component cannot be used with groups that earlier weights have sampled."""

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        """Pairs of a reason and the settings that have no effect because of it."""
        yield from ()

    def warnings(self, run: RunFacts) -> Iterator[str]:
        """Warnings about settings that are likely to harm learning, with a remedy."""
        yield from ()

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the state from the groups and metrics of a step. Returns metrics of the component."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """State of the component for checkpoints, as JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def require_name(kind: str, name: str, names: Iterable[str]) -> None:
    """Raise a UserError that suggests the closest valid name, unless `name` is valid."""
    valid = list(names)
    if name not in valid:
        raise unknown_name(kind, str(name), valid)


def check_order(settings: Section, low_name: str, high_name: str) -> None:
    low, high = getattr(settings, low_name), getattr(settings, high_name)
    if low > high:
        raise UserError(f"{low_name} = {low} must not be above {high_name} = {high}.")


def find_function(kind: str, choice: Any, named: Mapping[str, Any], load: Loader) -> Any:
    """The function that a setting names: a key of `named`, a path, or the function itself."""
    if not isinstance(choice, str):
        return choice
    if ":" in choice:
        return load(choice)
    require_name(kind, choice, named)
    return named[choice]


def call_user_code(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that may be the user's. Exceptions of users' code become a UserError with their position.

    Out-of-memory errors are passed on: the trainer repeats the update with smaller micro-batches.
    """
    if str(getattr(function, "__module__", "")).partition(".")[0] == "assay":
        return function(*args)
    try:
        return function(*args)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise
        raise UserError(f"{what} failed: {describe_user_error(error)}") from error


@dataclass(frozen=True)
class TermOutput:
    """Output of a loss term for the N trained tokens of a micro-batch; every tensor has shape [N]."""

    losses: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)  # metrics, logged as means over tokens
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # metrics, logged as maxima; must not be negative


class LossTerm(Component[S]):
    """A term of the loss, logged as `loss/<name>`.

    A subclass sets `name` and `section`, the class of its settings, and implements `per_token`. Built-in terms have
    their section in `AlgoConfig` and are listed in `terms.TERMS`; others are named by path in `algo.terms`.
    """

    section: ClassVar[type[Section]] = Section

    def __init__(self, settings: S, load: Loader) -> None:
        super().__init__(settings)

    @property
    def coef(self) -> float:
        """Factor of this term in the loss."""
        return 1.0

    @property
    def active(self) -> bool:
        """Whether the settings enable this term."""
        return True

    def per_token(self, batch: LossBatch) -> TermOutput:
        raise NotImplementedError


def checked_output(term: LossTerm[Any], out: Any, tokens: int) -> TermOutput:
    """The output of a term, possibly user-defined, after checking its shapes."""
    if not isinstance(out, TermOutput):
        raise UserError(f"the loss term {term.name!r} returned {type(out).__name__}: return a TermOutput.")
    for what, values in [("", out.losses), *out.means.items(), *out.maxima.items()]:
        check_per_token(f"the loss term {term.name!r}", what, values, tokens)
    return out


def check_per_token(who: str, statistic: str, values: Any, tokens: int) -> None:
    """Raise a UserError unless there is a tensor with one value per token: a mean would be averaged twice."""
    what = f"for its statistic {statistic!r}, " if statistic else ""
    if not isinstance(values, Tensor):
        raise UserError(f"{who} returned {type(values).__name__}: {what}return a tensor with one value per token.")
    if tuple(values.shape) != (tokens,):
        raise UserError(
            f"{who} returned shape {tuple(values.shape)} for {plural(tokens, 'token')}: "
            f"{what}return one value per token."
        )


def own_terms(paths: Sequence[str], args: Mapping[str, Mapping[str, Any]], load: Loader) -> list[LossTerm[Any]]:
    """User-defined terms. `args` holds their settings by class name."""
    terms: list[LossTerm[Any]] = []
    for path in paths:
        cls = load(path)
        if not (isinstance(cls, type) and issubclass(cls, LossTerm)):
            raise UserError(f"algo.terms: {path} is not a subclass of assay.algos.LossTerm")
        try:
            terms.append(cls(cls.section.model_validate(args.get(cls.__name__, {})), load))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(["algo.term_args", cls.__name__, *map(str, first["loc"])])
            raise UserError(f"bad value for '{key}': {first['msg']}, not {first['input']!r:.200}") from None
    if unknown := set(args) - {type(term).__name__ for term in terms}:
        raise UserError(f"algo.term_args.{min(unknown)}: there is no such class in algo.terms")
    return terms
