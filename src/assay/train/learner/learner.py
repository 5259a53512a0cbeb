"""The learner: advantages, the update, the reference that follows the policy, and the learning rate."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from assay.algos import Algorithm, Scorers
from assay.config import TrainConfig
from assay.mesh import Mesh, reshard
from assay.models import PolicyModel
from assay.train.learner.critic import Critic
from assay.train.learner.optim import lr_factor
from assay.train.learner.update import Updater
from assay.train.state import RunState, Schedule
from assay.types import Group


@dataclass
class Learner:
    """Computes advantages and updates the policy. `updater` holds the policy, its optimizer and the reference."""

    cfg: TrainConfig
    algo: Algorithm
    updater: Updater
    schedule: Schedule
    critic: Critic | None = None

    @property
    def policy(self) -> PolicyModel:
        return self.updater.policy

    @property
    def mesh(self) -> Mesh:
        return self.updater.mesh

    def credit(self, groups: list[Group]) -> dict[str, float]:
        """Set the advantages of the groups; the algorithm uses the reference and the critic if it needs them."""
        ref_logprobs = partial(self.updater.ref_logprobs, algo=self.algo)
        return self.algo.credit(groups, Scorers(ref_logprobs, self.critic.values if self.critic else None))

    def update(self, batch: list[Group], state: RunState) -> dict[str, float]:
        """Train one step on groups with advantages. Increments `state.step` and updates a dynamic reference."""
        started = time.perf_counter()
        self.updater.expects_more = not self.schedule.done(state, ahead=1)
        lr = self.learning_rate(state)
        metrics = self.updater.update(batch, self.algo, lr, self.cfg.train.passes)
        if self.critic:
            metrics |= self.critic.learn(batch)
        state.step += 1
        self._update_reference(state.step)
        return metrics | {"time/train": time.perf_counter() - started}

    def _update_reference(self, step: int) -> None:
        """After `step` steps: a moving average of the policies, or a copy of the policy every N steps."""
        cfg = self.cfg.algo
        if cfg.reference_ema:
            self.updater.update_reference(cfg.reference_ema)
        elif cfg.refresh_reference and step % cfg.refresh_reference == 0:
            self.updater.update_reference(0.0)

    def learning_rate(self, state: RunState) -> float:
        cfg = self.cfg.optim
        progress, steps = self.schedule.progress(state), self.schedule.total_steps
        return cfg.lr * cfg.initial * lr_factor(cfg.schedule, progress, steps, cfg.warmup, cfg.final)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the policy; weights and optimizer state of the critic."""
        reshard(self.policy)
        return chain(self.policy.named_parameters(), self.critic.tensors().items() if self.critic else ())

    def state_dict(self) -> dict[str, Any]:
        """Everything except tensors, which `checkpoint.save` writes."""
        return {"algorithm": self.algo.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.algo.load_state_dict(saved.get("algorithm", {}))
