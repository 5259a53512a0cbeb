"""The built-in loss terms: policy gradient, KL divergence from the reference model, entropy bonus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from assay.algos.batch import KL, LossBatch
from assay.algos.component import (
    Loader,
    LossTerm,
    Needs,
    RunFacts,
    TermOutput,
    call_user_code,
    check_per_token,
    find_function,
)
from assay.algos.losses import (
    LOSSES,
    ON_POLICY,
    CovarianceControl,
    ImportanceCorrection,
    dual_clip,
    importance_ratio,
    sequence_logprobs,
)
from assay.config import AlgoConfig
from assay.config.algorithm import EntropyConfig, ReferenceKLConfig
from assay.types import Group, UserError

MAX_COEF = 1.0  # upper limit of an adaptive entropy coefficient


class PolicyGradient(LossTerm[AlgoConfig]):
    name, section = "policy", AlgoConfig

    def __init__(self, settings: AlgoConfig, load: Loader) -> None:
        super().__init__(settings, load)
        self.function = find_function("policy_loss", settings.policy_loss, LOSSES, load)
        self.modifiers = ImportanceCorrection(settings), CovarianceControl(settings)
        self.parts = self.modifiers

    @property
    def needs(self) -> Needs:
        return Needs(
            whole_sequences=self.settings.ratio == "sequence",
            every_rollout=self.settings.policy_loss not in LOSSES,  # a user-defined loss may not vanish at advantage 0
        )

    def check(self) -> None:
        if 0 < self.settings.dual_clip <= 1:
            raise UserError(f"dual_clip = {self.settings.dual_clip} must be above 1, e.g. 3, or 0 for none.")

    def check_replay(self) -> None:
        self._check_ratio("so groups of earlier steps cannot be replayed: set")

    def check_staleness(self) -> None:
        self._check_ratio("so groups of earlier weights cannot be trained on: set source.max_staleness = 0,")

    def _check_ratio(self, consequence: str) -> None:
        settings = self.settings
        if settings.correction is not None or not (settings.recompute_logprobs or settings.policy_loss in ON_POLICY):
            return
        why = (
            "algo.recompute_logprobs discards the log-probabilities of the policy that sampled"
            if settings.recompute_logprobs
            else f"algo.policy_loss = {settings.policy_loss!r} has no importance ratio"
        )
        raise UserError(
            f"{why}, {consequence} algo.correction = 'token_truncate', or algo.policy_loss = 'ppo_clip' without "
            "algo.recompute_logprobs"
        )

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.policy_loss != "ppo_clip":
            yield "algo.policy_loss is not ppo_clip", ["algo.dual_clip"]

    def warnings(self, run: RunFacts) -> Iterator[str]:
        if run.updates > 1 and self.settings.policy_loss in ON_POLICY:
            yield (
                f"algo.policy_loss = {self.settings.policy_loss!r} has no importance ratio: all but the first of "
                f"{run.updates} updates per step train on answers of an earlier policy without correction. "
                "Set algo.updates = 1, algo.minibatch_size = 0 and train.passes = 1, or algo.policy_loss = 'ppo_clip'"
            )

    def per_token(self, batch: LossBatch) -> TermOutput:
        settings, logprobs, behaviour = self.settings, batch.logprobs, batch.behaviour_logprobs
        if settings.ratio == "sequence":
            assert batch.lengths is not None, "needs.whole_sequences"
            logprobs = sequence_logprobs(logprobs, behaviour, batch.lengths)
        args = logprobs, behaviour, batch.advantages, settings.clip_low, settings.clip_high
        given = call_user_code("the loss function", self.function, *args)
        losses_N, stats = _checked(given, len(batch.logprobs))
        means = {f"policy/{name}": values for name, values in stats.items()}
        if settings.dual_clip and settings.policy_loss == "ppo_clip":
            losses_N, means["policy/dual_clip_fraction"] = dual_clip(losses_N, batch.advantages, settings.dual_clip)
        for modifier in self.modifiers:
            losses_N, more = modifier.apply(losses_N, batch)
            means |= more
        ratio = importance_ratio(logprobs.detach(), behaviour)
        return TermOutput(losses_N, means | {"policy/ratio_mean": ratio}, {"policy/ratio_max": ratio})


def _checked(given: Any, tokens: int) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Losses and statistics of a loss function, possibly user-defined, after checking their form."""
    if not (isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], Mapping)):
        raise UserError(
            f"the loss function returned {type(given).__name__}: return losses and statistics ({{}} for none)."
        )
    losses, stats = given
    for name, values in {"": losses, **stats}.items():
        check_per_token("the loss function", name, values, tokens)
    return losses, stats


class ReferenceKL(LossTerm[ReferenceKLConfig]):
    name, section = "kl", ReferenceKLConfig

    @property
    def active(self) -> bool:
        return self.settings.kl_coef > 0

    @property
    def coef(self) -> float:
        return self.settings.kl_coef

    @property
    def needs(self) -> Needs:
        return Needs(ref_logprobs_in_loss=True, every_rollout=True)

    def check(self) -> None:
        if self.settings.kl is None:
            raise UserError(
                f'kl_coef = {self.settings.kl_coef} needs an estimator: set kl = "k3" or "k2" '
                "(or reward_kl_coef instead, for a KL in the reward)."
            )

    def per_token(self, batch: LossBatch) -> TermOutput:
        assert self.settings.kl is not None and batch.ref_logprobs is not None, "needs.ref_logprobs_in_loss"
        kl_N = KL[self.settings.kl](batch.logprobs, batch.ref_logprobs)
        return TermOutput(kl_N, {"policy/kl": kl_N})


@dataclass(frozen=True)
class EntropyControl:
    """Coefficient of an entropy bonus that grows while the entropy is below a target and shrinks above it."""

    coef: float
    entropy: float | None = None  # last measured

    def applied(self, target: float) -> float:
        """The coefficient in use: 0 while entropy is above the target."""
        return self.coef if self.entropy is None or self.entropy <= target else 0.0

    def after(self, entropy: float, target: float, delta: float) -> EntropyControl:
        coef = self.coef + delta if entropy <= target else self.coef - delta
        return EntropyControl(min(max(coef, 0.0), MAX_COEF), entropy)


class EntropyBonus(LossTerm[EntropyConfig]):
    """Always part of the loss, because the entropy is always logged."""

    name, section = "entropy", EntropyConfig

    def __init__(self, settings: EntropyConfig, load: Loader) -> None:
        super().__init__(settings, load)
        self.control = EntropyControl(settings.entropy_coef)

    @property
    def coef(self) -> float:
        target = self.settings.entropy_target
        return -(self.settings.entropy_coef if target is None else self.control.applied(target))

    @property
    def needs(self) -> Needs:
        used = self.coef != 0
        return Needs(entropy_gradient=used, every_rollout=used or self.settings.entropy_target is not None)

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.entropy_target is None:
            yield "algo.entropy_target is not set", ["algo.entropy_delta"]

    def per_token(self, batch: LossBatch) -> TermOutput:
        if batch.entropy is None:
            assert not self.needs.entropy_gradient, "needs.entropy_gradient"
            return TermOutput(torch.zeros_like(batch.weights))
        return TermOutput(batch.entropy, {"policy/entropy": batch.entropy})

    def end_step(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> dict[str, float]:
        target = self.settings.entropy_target
        if target is None or "policy/entropy" not in metrics:
            return {}
        used = self.control.applied(target)
        self.control = self.control.after(metrics["policy/entropy"], target, self.settings.entropy_delta)
        return {"policy/entropy_coef": used}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.settings.entropy_target is None else asdict(self.control)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.control = EntropyControl(**state)


# In the order of the sum, which is fixed because floating-point addition is not associative.
TERMS: tuple[type[LossTerm[Any]], ...] = (
    PolicyGradient,
    ReferenceKL,
    EntropyBonus,
)
