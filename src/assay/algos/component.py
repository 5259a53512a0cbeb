"""Base classes of the components of an algorithm; input, output and metrics of a loss; estimators of the KL divergence.

The loss of a batch is the sum over its terms of coefficient * sum over tokens of weight * loss.

Token weights are computed once per global batch, before it is split into micro-batches or over ranks, and losses and
metrics are sums. The result therefore does not depend on the split.

KL estimators compute one value per token from the log-probabilities of sampled tokens. As values, k1 and k3 (within the
limit of its log-ratio) are unbiased estimates of KL(policy || reference). The mean of k2 is a different divergence,
E[log(policy / reference)^2] / 2. It agrees with the KL up to second order near the reference, and may be much larger
far from it.

In a *loss* only the gradient matters, and autograd differentiates the estimate, not the sampling. If tokens are sampled
from the policy that is differentiated, the expected gradient at a token, given the tokens before it, is

- k1: zero. It only adds noise: useful as a metric or in a reward, useless in a loss.
- k2: the gradient of KL(policy || reference) at this token, although the value of k2 is biased.
- k3: the gradient of KL(reference || policy) at this token, which is the same to first order near the reference. It has
  low variance and is used by GRPO. Beyond the limit of its log-ratio the gradient is zero.

This does not hold for tokens of an earlier policy (later updates on a batch, replay), because the estimates contain no
importance ratio. The effect of a token on the divergence of later tokens is not included either, so the sum over an
answer is not the gradient of the KL between whole answers. A KL penalty in the reward is (`credit.RewardKL`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from assay.config import Section
from assay.types import Group, Rollout, UserError, describe_user_error, plural, unknown_name


@dataclass
class Sums:
    """Metrics of a batch as detached scalars, which can be added over micro-batches and ranks."""

    tokens: Tensor
    losses: dict[str, Tensor] = field(default_factory=dict)  # weighted: their sum is the loss of the batch
    per_token: dict[str, Tensor] = field(default_factory=dict)  # to be divided by `tokens`
    largest: dict[str, Tensor] = field(default_factory=dict)  # combined by max; must not be negative

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            tokens=self.tokens + other.tokens,
            losses={key: value + other.losses[key] for key, value in self.losses.items()},
            per_token={key: value + other.per_token[key] for key, value in self.per_token.items()},
            largest={key: torch.maximum(value, other.largest[key]) for key, value in self.largest.items()},
        )

    def and_loss(self, key: str, value: Tensor) -> Sums:
        """A copy with one more loss, added to the total."""
        value = value.detach().to(self.tokens.dtype)
        return replace(self, losses=self.losses | {key: value, "loss/total": self.losses["loss/total"] + value})

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> Sums:
        """The sums over all ranks of `group`. Every rank must have the same keys, also for an empty batch."""
        added = torch.stack([self.tokens, *self.losses.values(), *self.per_token.values()])
        dist.all_reduce(added, op=dist.ReduceOp.SUM, group=group)
        tokens, *values = added.unbind()
        losses = dict(zip(self.losses, values[: len(self.losses)], strict=True))
        per_token = dict(zip(self.per_token, values[len(self.losses) :], strict=True))
        largest = torch.stack(list(self.largest.values()))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return Sums(tokens, losses, per_token, dict(zip(self.largest, largest.unbind(), strict=True)))


def metrics(sums: Sums, updates: int = 1) -> dict[str, float]:
    """Final metrics. Losses are averaged over `updates` optimizer steps."""
    tokens = max(float(sums.tokens), 1.0)
    losses = {key: float(value) / updates for key, value in sums.losses.items()}
    per_token = {key: float(value) / tokens for key, value in sums.per_token.items()}
    largest = {key: float(value) for key, value in sums.largest.items()}
    return losses | per_token | largest


# Limit of the log-ratio in k3, as in TapeAgents: a single token contributes at most exp(10) = 2.2e4.
MAX_LOG_RATIO = 10.0

KLEstimator = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / reference): unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log(policy / reference)^2 / 2: low variance, never negative, biased far from the reference."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r - 1 - log(r) with r = reference / policy: unbiased, low variance, never negative. log(r) is limited to +-10."""
    log_ratio = (ref_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3}


AGGREGATES = ("token", "sequence", "constant")


def token_weights(lengths: Tensor, mode: str, constant_length: int = 0) -> Tensor:
    """Weight of each token of sequence i, float64 [B]; the loss of the batch is sum_i weight_i * sum_t loss_it.

    `lengths` are the numbers of trained tokens, 0 for a masked sequence.

    - "token": 1 / (number of all tokens).
    - "sequence": mean over sequences of the mean over tokens. Masked sequences are not counted, as in "token".
    - "constant": 1 / (B * constant_length), independent of the lengths. Masked sequences are counted, so that masking
      one does not change the weight of the others.
    """
    lengths_B = lengths.to(torch.float64)
    if mode == "token":
        # The clamp avoids 0/0 in a batch without tokens, whose weights are not used.
        return torch.full_like(lengths_B, 1.0) / lengths_B.sum().clamp(min=1)
    if mode == "sequence":
        trained = lengths_B > 0
        return torch.where(trained, 1.0 / (trained.sum().clamp(min=1) * lengths_B.clamp(min=1)), 0.0)
    assert mode == "constant" and constant_length > 0, "constant aggregation needs the length to divide by"
    return torch.full_like(lengths_B, 1.0 / (max(len(lengths_B), 1) * constant_length))


@dataclass(frozen=True)
class LossBatch:
    """Packed 1-D tensors of equal length: the trained tokens of a micro-batch, and only those."""

    logprobs: Tensor  # of the policy being trained, with gradient
    behaviour_logprobs: Tensor  # of the policy that sampled the tokens
    advantages: Tensor
    weights: Tensor  # from token_weights, for the global batch
    entropy: Tensor | None = None  # with gradient if there is an entropy bonus
    ref_logprobs: Tensor | None = None
    engine_logprobs: Tensor | None = None  # set if behaviour_logprobs are the trainer's, to measure the mismatch
    lengths: Sequence[int] | None = None  # trained tokens per sequence, if `Needs.whole_sequences`
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # `TokenInput`s of all terms, by name


@dataclass(frozen=True)
class LossOut:
    total: Tensor  # call backward on it; micro-batches accumulate by addition
    sums: Sums


def sums_of(
    batch: LossBatch, losses: dict[str, Tensor], means: Mapping[str, Tensor], maxima: Mapping[str, Tensor]
) -> Sums:
    """Metrics of a batch. The keys depend on the settings only, not on the batch.

    `mismatch/*` compares the log-probabilities of trainer and engine for the same tokens. If the behaviour
    log-probabilities are the engine's, the trainer's are those of the current policy, so only the first update after
    sampling measures the mismatch alone. For tokens that earlier weights have sampled (replay, asynchronous training)
    the difference includes the change of the policy.
    """
    with torch.no_grad():
        if batch.engine_logprobs is None:
            trainer, engine = batch.logprobs, batch.behaviour_logprobs
        else:
            trainer, engine = batch.behaviour_logprobs, batch.engine_logprobs
        difference = (trainer - engine).abs()
        per_token = {
            **means,
            "policy/logprob": batch.logprobs,
            "mismatch/logprob_abs_diff": difference,
            "mismatch/kl": k3(engine, trainer),  # KL(engine || trainer): the engine is the sampler
        }
        largest = {**maxima, "mismatch/logprob_abs_diff_max": difference}
        return Sums(
            tokens=_precise(torch.ones_like(difference)).sum(),
            losses={key: _precise(value) for key, value in losses.items()},
            per_token={key: _precise(values).sum() for key, values in per_token.items()},
            largest={key: torch.cat([_precise(values), values.new_zeros(1)]).max() for key, values in largest.items()},
        )


def _precise(values: Tensor) -> Tensor:
    """Detached and in float64 if the device supports it (mps does not), so that counts and long sums stay exact."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


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
        raise UserError(f"algo.{low_name} = {low} must not be above algo.{high_name} = {high}.")


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
            table = f"algo.term_args.{cls.__name__}"
            if first["type"] == "extra_forbidden":
                known = cls.section.model_fields
                raise unknown_name("key", str(first["loc"][-1]), known, where=f"in {table}") from None
            key = ".".join([table, *map(str, first["loc"])])
            raise UserError(f"bad value for '{key}': {first['msg']}, not {first['input']!r:.200}") from None
    if unknown := set(args) - {type(term).__name__ for term in terms}:
        raise UserError(f"algo.term_args.{min(unknown)}: there is no such class in algo.terms")
    return terms
