"""What every component of an algorithm has: settings, needs, per-token inputs, checks and, where needed, state."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from assay.types import Group, Rollout, UserError

Loader = Callable[[str], Any]  # from "file.py:name" to the object


@dataclass(frozen=True)
class Needs:
    """What the trainer has to provide. The needs of an algorithm are the union of those of its components."""

    ref_logprobs_in_loss: bool = False  # LossBatch.ref_logprobs
    ref_logprobs_in_credit: bool = False  # Scorers.ref_logprobs
    values: bool = False  # Scorers.values, of a critic that learns the returns
    greedy_rollouts: bool = False  # one greedy rollout per group, for its baseline
    trainer_logprobs: bool = False  # behaviour log-probabilities recomputed by the trainer before its first update
    entropy_gradient: bool = False  # LossBatch.entropy with gradient; without, it is given for the metrics
    whole_sequences: bool = False  # a loss of whole sequences, which cannot be computed on a slice of the tokens
    every_rollout: bool = False  # rollouts with advantage 0 too: they have a gradient, or affect what is measured

    @property
    def reference(self) -> bool:
        """Whether there has to be a reference model."""
        return self.ref_logprobs_in_loss or self.ref_logprobs_in_credit

    def __or__(self, other: Needs) -> Needs:
        return Needs(*(getattr(self, one.name) or getattr(other, one.name) for one in fields(Needs)))


@dataclass(frozen=True)
class LengthLimits:
    """Length limits of the run, in tokens; 0: unknown."""

    max_new_tokens: int = 0  # of an answer
    max_length: int = 0  # of a whole sequence, which may end an answer earlier


@dataclass(frozen=True)
class RunFacts:
    """What decides, outside of the algorithm, whether a setting has an effect."""

    episodes: bool = False  # whether rollouts are episodes of an environment
    updates: int = 1  # optimizer steps per batch of rollouts, over all passes
    replay: bool = False


@dataclass(frozen=True)
class Scorers:
    """Functions of the trainer that a credit rule may call; each has to be given where `Needs` asks for it.

    Both return one list per rollout, with one number per trained token. `values` returns one more for a rollout that
    is bootstrapped: the value of the state after its last token.
    """

    ref_logprobs: Callable[[Sequence[Group]], list[list[float]]] | None = None
    values: Callable[[Sequence[Rollout]], list[list[float]]] | None = None


class TokenRow(Protocol):
    """A sequence of an optimizer step, as a `TokenInput` sees it."""

    @property
    def sampled_logprobs(self) -> list[float]: ...  # of the trained tokens, by the policy that sampled them

    @property
    def token_advantages(self) -> list[float]: ...

    @property
    def inputs(self) -> Mapping[str, Sequence[float]]: ...


@dataclass(frozen=True)
class TokenInput:
    """Numbers that a loss term needs, one per trained token; the term finds them in `LossBatch.inputs[name]`.

    They are computed from one rollout at a time, or from all rows of an optimizer step, before these are split.
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
            raise UserError(f"the token input {self.name!r} has {len(given)} lists for {len(rows)} sequences")
        return [self._checked(own, len(row.token_advantages)) for own, row in zip(given, rows, strict=True)]

    def _checked(self, values: Sequence[float], tokens: int) -> list[float]:
        if len(values) != tokens:
            raise UserError(
                f"the token input {self.name!r} has {len(values)} values for {tokens} trained tokens: give one for each"
            )
        return list(values)


class Component:
    """A part of an algorithm. Settings are declared in its section, and nowhere else."""

    name: ClassVar[str] = ""  # by which its state is saved

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def inputs(self) -> Sequence[TokenInput]:
        """Numbers per trained token beyond those of every `LossBatch`."""
        return ()

    def check(self) -> None:
        """Raise a UserError if settings contradict each other."""

    def check_replay(self) -> None:
        """Raise a UserError if the component cannot deal with groups that an earlier policy has sampled."""

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        """Why settings have no effect in this run, and which ones."""
        yield from ()

    def warnings(self, run: RunFacts) -> Iterator[str]:
        """Settings that are likely to harm learning, and what to do about them."""
        yield from ()

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        """Update the state from a step's sampled groups and metrics; returns metrics of the component itself."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def require_name(kind: str, name: str, names: Iterable[str]) -> None:
    """Raise a UserError that suggests the closest valid name, unless `name` is valid."""
    valid = list(names)
    if name in valid:
        return
    nearest = difflib.get_close_matches(str(name).lower(), valid, n=3)
    nearest.sort(key=lambda one: sorted(one) != sorted(str(name)))  # swapped letters are the likeliest slip
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise UserError(f"unknown {kind} {name!r}: {hint}There are {', '.join(valid)}.")


def check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if low > high:
        raise UserError(f"{low_name} = {low} must not be above {high_name} = {high}.")


def find_function(kind: str, choice: Any, named: Mapping[str, Any], load: Loader) -> Any:
    """The function that a setting names, by its name in `named` or by a path; or the function given as it is."""
    if not isinstance(choice, str):
        return choice
    if ":" in choice:
        return load(choice)
    require_name(kind, choice, named)
    return named[choice]
