"""KL divergence from the reference model as a loss term."""

from __future__ import annotations

from assay.algos.batch import KL, LossBatch
from assay.algos.component import LossTerm, Needs, TermOutput, loss_term
from assay.config.algorithm import ReferenceKLConfig
from assay.types import UserError


@loss_term
class ReferenceKL(LossTerm[ReferenceKLConfig]):
    name, section, order = "kl", ReferenceKLConfig, 1

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
