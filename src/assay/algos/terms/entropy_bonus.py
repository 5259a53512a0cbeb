"""An entropy bonus against premature determinism, with a fixed coefficient or one that follows a target entropy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from assay.algos.batch import LossBatch
from assay.algos.component import Loader, LossTerm, Needs, RunFacts, TermOutput, loss_term
from assay.config.algorithm import EntropyConfig
from assay.types import Group

MAX_COEF = 1.0  # upper limit of an adaptive coefficient


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


@loss_term
class EntropyBonus(LossTerm[EntropyConfig]):
    """Always part of the loss, because the entropy is always logged."""

    name, section, order = "entropy", EntropyConfig, 2

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
