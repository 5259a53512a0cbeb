"""Learning from sampled groups: advantages, the update, and what adapts from step to step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from assay.algos import Algorithm
from assay.algos.entropy import EntropyControl
from assay.algos.reward_kl import log_ratios
from assay.config import TrainConfig
from assay.mesh import Mesh
from assay.models import PolicyModel
from assay.models.collectives import gather_back
from assay.train.critic import Critic
from assay.train.optim import rate
from assay.train.reference import move_reference
from assay.train.state import RunState, Schedule
from assay.train.update import Updater
from assay.types import Group


@dataclass
class Learner:
    """Computes advantages and updates the policy; `updater` holds the policy, its optimizer and the reference."""

    cfg: TrainConfig
    algo: Algorithm
    updater: Updater
    schedule: Schedule
    critic: Critic | None = None
    entropy_control: dict[str, float] | None = None  # coefficient and last entropy, where a target is set

    @property
    def policy(self) -> PolicyModel:
        return self.updater.policy

    @property
    def mesh(self) -> Mesh:
        return self.updater.mesh

    def credit(self, groups: list[Group]) -> dict[str, float]:
        """Set the advantages of the groups from their rewards, the KL penalty and the critic; return metrics."""
        algo, metrics = self.algo, dict[str, float]()
        penalties: list[list[float]] | None = None
        if algo.kl_in_reward:
            ref_logprobs = self.updater.ref_logprobs(groups, algo)
            algo.credit(groups, ref_logprobs)
            ratios = log_ratios(groups, ref_logprobs)
            metrics["reward/kl"] = sum(map(sum, ratios)) / max(len(ratios), 1)
            if algo.kl_by_token:
                penalties = [[algo.reward_kl_coef * ratio for ratio in own] for own in ratios]
        else:
            algo.credit(groups)
        return metrics | self.critic.credit(groups, penalties) if self.critic else metrics

    def update(self, batch: list[Group], state: RunState) -> dict[str, float]:
        """Train one step on groups with advantages. Increments `state.step`; a moving reference follows the policy."""
        started = time.perf_counter()
        self.updater.expects_more = not self.schedule.done(state, ahead=1)
        lr = self.learning_rate(state)
        metrics = self.updater.update(batch, self._with_entropy_coef(), lr, self.cfg.train.passes)
        if self.critic:
            metrics |= self.critic.learn()
        state.step += 1
        move_reference(self.updater, self.cfg.algo, state.step)
        metrics |= self._adapt_entropy_coef(metrics)
        return metrics | {"time/train": time.perf_counter() - started}

    def learning_rate(self, state: RunState) -> float:
        cfg = self.cfg.optim
        progress, steps = self.schedule.progress(state), self.schedule.total_steps
        return cfg.lr * cfg.initial * rate(cfg.schedule, progress, steps, cfg.warmup, cfg.final)

    def _with_entropy_coef(self) -> Algorithm:
        """The algorithm with the entropy coefficient of this step."""
        if self.algo.entropy_target is None or self.entropy_control is None:
            return self.algo
        control = EntropyControl(**self.entropy_control)
        return replace(self.algo, entropy_coef=control.applied(self.algo.entropy_target))

    def _adapt_entropy_coef(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Move the entropy coefficient towards the target; return the one that this step used."""
        algo = self.algo
        if algo.entropy_target is None or "policy/entropy" not in metrics:
            return {}
        control = EntropyControl(**(self.entropy_control or {"coef": algo.entropy_coef}))
        used = control.applied(algo.entropy_target)
        control = control.after(metrics["policy/entropy"], algo.entropy_target, algo.entropy_delta)
        self.entropy_control = asdict(control)
        return {"policy/entropy_coef": used}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the policy, and weights and moments of the critic."""
        gather_back(self.policy)
        return chain(self.policy.named_parameters(), self.critic.tensors() if self.critic else ())

    def state_dict(self) -> dict[str, Any]:
        """Everything but tensors, which `checkpoint.save` writes."""
        return {"entropy_control": self.entropy_control}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.entropy_control = saved.get("entropy_control")
