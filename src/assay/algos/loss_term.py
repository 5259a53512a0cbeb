"""Loss terms: the loss of a batch is the sum over its terms of coefficient * sum over tokens of weight * loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import ValidationError
from torch import Tensor

from assay.algos.batch import LossBatch
from assay.algos.component import Component, Loader
from assay.config import Section
from assay.types import UserError

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class TermOutput:
    """What a term computes for the N trained tokens of a micro-batch; every tensor has shape [N]."""

    losses: Tensor
    means: Mapping[str, Tensor] = field(default_factory=dict)  # logged under these names as means over tokens
    maxima: Mapping[str, Tensor] = field(default_factory=dict)  # logged as maxima; none may be negative


class LossTerm(Component, Generic[S]):
    """A term of the loss, logged as `loss/<name>`.

    A subclass sets `name` and `section`, the class of its settings, and implements `per_token`. Built-in terms have
    their section in `AlgoConfig` and are registered by `@loss_term`; others are named by path in `algo.terms`.
    """

    section: ClassVar[type[Section]] = Section
    order: ClassVar[int] = 100  # position in the sum, which is fixed because addition of floats is not associative

    def __init__(self, settings: S, load: Loader) -> None:
        self.settings = settings

    @property
    def coef(self) -> float:
        """Factor of this term in the loss."""
        return 1.0

    @property
    def active(self) -> bool:
        """Whether the settings ask for this term at all."""
        return True

    def per_token(self, batch: LossBatch) -> TermOutput:
        raise NotImplementedError


TERMS: list[type[LossTerm[Any]]] = []


def loss_term(cls: type[LossTerm[Any]]) -> type[LossTerm[Any]]:
    """Register a built-in term; it takes part in every algorithm whose settings make it `active`."""
    TERMS.append(cls)
    return cls


def checked_output(term: LossTerm[Any], out: Any, tokens: int) -> TermOutput:
    """Output of a term, which may be the user's, after checking its shapes."""
    if not isinstance(out, TermOutput):
        raise UserError(f"the loss term {term.name!r} returned {type(out).__name__}: return a TermOutput.")
    for what, values in _tensors(out):
        check_per_token(f"the loss term {term.name!r}", what, values, tokens)
    return out


def _tensors(out: TermOutput) -> Iterator[tuple[str, Any]]:
    yield "", out.losses
    yield from (*out.means.items(), *out.maxima.items())


def check_per_token(who: str, statistic: str, values: Any, tokens: int) -> None:
    """A mean in place of one number per token would be averaged twice."""
    shape = tuple(getattr(values, "shape", ()))
    if shape != (tokens,):
        what = f"for its statistic {statistic!r}, " if statistic else ""
        raise UserError(f"{who} gave shape {shape} for {tokens} tokens: {what}give one number for each.")


def own_terms(paths: Sequence[str], args: Mapping[str, Mapping[str, Any]], load: Loader) -> list[LossTerm[Any]]:
    """The user's terms, each with its settings from `args`, by class name."""
    found: list[LossTerm[Any]] = []
    for path in paths:
        cls = load(path)
        if not (isinstance(cls, type) and issubclass(cls, LossTerm)):
            raise UserError(f"algo.terms: {path} is not a subclass of assay.algos.LossTerm")
        try:
            found.append(cls(cls.section.model_validate(args.get(cls.__name__, {})), load))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(["algo.term_args", cls.__name__, *map(str, first["loc"])])
            raise UserError(f"bad value for '{key}': {first['msg']}, not {first['input']!r:.200}") from None
    if unknown := set(args) - {type(term).__name__ for term in found}:
        raise UserError(f"algo.term_args.{min(unknown)}: there is no such class in algo.terms")
    return found
