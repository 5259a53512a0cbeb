"""The policy loss, with optional importance correction and covariance control."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from assay.algos.batch import LossBatch
from assay.algos.component import (
    Loader,
    LossTerm,
    Needs,
    RunFacts,
    TermOutput,
    TokenInput,
    check_per_token,
    find_function,
    loss_term,
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
from assay.types import UserError


@loss_term
class PolicyGradient(LossTerm[AlgoConfig]):
    name, section, order = "policy", AlgoConfig, 0

    def __init__(self, settings: AlgoConfig, load: Loader) -> None:
        super().__init__(settings, load)
        self.function = find_function("policy_loss", settings.policy_loss, LOSSES, load)
        self.correction = ImportanceCorrection(settings)
        self.modifiers = (self.correction, CovarianceControl(settings))

    @property
    def needs(self) -> Needs:
        own = Needs(
            whole_sequences=self.settings.ratio == "sequence",
            every_rollout=self.settings.policy_loss not in LOSSES,  # a user-defined loss may not vanish at advantage 0
        )
        for modifier in self.modifiers:
            own |= modifier.needs
        return own

    @property
    def inputs(self) -> Sequence[TokenInput]:
        return [one for modifier in self.modifiers for one in modifier.inputs]

    def check(self) -> None:
        if 0 < self.settings.dual_clip <= 1:
            raise UserError(f"dual_clip = {self.settings.dual_clip} must be above 1, e.g. 3, or 0 for none.")
        for modifier in self.modifiers:
            modifier.check()

    def check_replay(self) -> None:
        settings = self.settings
        if settings.correction is not None or not (settings.recompute_logprobs or settings.policy_loss in ON_POLICY):
            return
        why = (
            "algo.recompute_logprobs discards the log-probabilities of the policy that sampled"
            if settings.recompute_logprobs
            else f"algo.policy_loss = {settings.policy_loss!r} has no importance ratio"
        )
        raise UserError(
            f"{why}, so groups of earlier steps cannot be replayed: "
            "set algo.correction = 'token_truncate', or algo.policy_loss = 'ppo_clip' without algo.recompute_logprobs"
        )

    def unused(self, run: RunFacts) -> Iterator[tuple[str, Sequence[str]]]:
        if self.settings.policy_loss != "ppo_clip":
            yield "algo.policy_loss is not ppo_clip", ["algo.dual_clip"]
        for modifier in self.modifiers:
            yield from modifier.unused(run)

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
        given = self.function(logprobs, behaviour, batch.advantages, settings.clip_low, settings.clip_high)
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
