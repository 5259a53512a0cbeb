"""Training steps of a tiny policy, each with a weight sync that is verified."""

from __future__ import annotations

import tomllib
from pathlib import Path

import torch
from train_parts import make_adamw, make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.engine import Engine, make_engine
from assay.mesh import Mesh
from assay.models import PolicyModel
from assay.training import sync
from assay.training.learner.update import Updater
from assay.training.sync import SyncError, WeightSync, probe_sequences

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.toml"
LR = float(tomllib.loads(DEMO.read_text())["optim"]["lr"])


class Learning:
    """A policy that is trained, and an engine that serves it."""

    def __init__(
        self,
        policy: PolicyModel,
        method: sync.Method = "probe",
        dtype: torch.dtype = torch.float32,
        lr: float = LR,
        mesh: Mesh | None = None,
        length: int = 16,
        engine: Engine | None = None,
        trainer_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`engine`: serves the policy's weights as version 0. `trainer_dtype`: in which the trainer computes."""
        self.mesh, self.lr, self.step = mesh or Mesh(), lr, 0
        self.policy, self.algo = policy, make_algorithm("grpo")
        group = self.mesh.tp_group
        self.engine = engine or make_engine("auto", policy, device="cpu", dtype=dtype, max_batch=8, group=group)
        sequences = [ids[:length] for ids in probe_sequences([], 23, 33, seed=0)]
        self.updater = Updater(policy, make_adamw(policy, lr), mesh=self.mesh, dtype=trainer_dtype)
        self.weight_sync = WeightSync(self.updater, self.engine, method, sequences=sequences)
        self.weight_sync.verify(0)

    def update(self) -> dict[str, float]:
        """One training step and a weight sync."""
        groups = make_groups(tiny_decoder(), groups=2, seed=self.step)
        self.algo.credit(groups)
        self.updater.update(groups, self.algo, self.lr)
        self.step += 1
        return self.weight_sync.sync(self.step)

    def steps_to_error(self, limit: int = 20) -> tuple[int, str]:
        """Number of steps until the sync error, and its text."""
        for _ in range(limit):
            try:
                self.update()
            except SyncError as error:
                return self.step, str(error)
        raise AssertionError(f"not detected in {limit} steps")
