"""Training that tests start on each of several processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from train_parts import SPEC, make_adamw, make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.config import OptimConfig
from assay.mesh import Mesh, init_mesh
from assay.models.base import fingerprint
from assay.models.spec import ModelSpec
from assay.training.learner.optim import make_optimizer
from assay.training.learner.pack import rows_of
from assay.training.learner.update import Updater
from assay.training.parallel import parallelise
from assay.types import Group

STEPS = 5
# The vocabulary of 23 divides by neither 2 nor 4. Together they have every kind of weight the decoder knows.
SPECS: dict[str, ModelSpec] = {
    "qwen3": SPEC,
    "qwen2": replace(SPEC, family="qwen2", qk_norm=False, qkv_bias=True),
    "llama": replace(SPEC, family="llama", qk_norm=False, tied=False, qkv_bias=True, out_bias=True, mlp_bias=True),
}


@dataclass(frozen=True)
class Case:
    family: str
    mode: str = "ddp"
    tp: int = 1
    double: bool = True

    @property
    def name(self) -> str:
        return f"{self.family}-{self.mode}-tp{self.tp}-{'float64' if self.double else 'float32'}"


def train(case: Case, mesh: Mesh) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Metrics, with the scores of each token, and weights of five updates on replayed rollouts, with reference, entropy
    bonus, decay and clipping.
    """
    dtype = torch.float64 if case.double else torch.float32
    spec = SPECS[case.family]
    policy = parallelise(tiny_decoder(0, dtype, spec), mesh, case.mode)
    reference = parallelise(tiny_decoder(9, dtype, spec).requires_grad_(False), mesh, case.mode)
    algo = make_algorithm("grpo", kl_coef=0.3, entropy_coef=0.02)
    lr = 1e-2 if case.double else 1e-3
    options = {"temperature": 0.8, "max_grad_norm": 0.1, "token_budget": 40}
    optimizer = make_adamw(policy, lr, weight_decay=0.1)
    updater = Updater(policy, optimizer, reference=reference, mesh=mesh, **options)
    found = []
    for step in range(STEPS):
        groups = make_groups(tiny_decoder(), seed=step)
        algo.credit(groups)
        found.append(updater.update(groups, algo, lr) | token_scores(groups))
    return found, {name: weight.detach().clone() for name, weight in policy.weights()}


def token_scores(groups: Sequence[Group]) -> dict[str, float]:
    """Log-probabilities and entropies that the update has stored in the rollouts, one entry per token."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scores = {}
    for name in ("trainer_logprobs", "entropies", "ref_logprobs"):
        values = [float(value) for rollout in rollouts for value in getattr(rollout, name)]
        assert len(values) == sum(rollout.trained for rollout in rollouts)
        scores |= {f"{name}/{number}": value for number, value in enumerate(values)}
    return scores


def train_cases(mesh: Mesh, folder: Path, cases: Sequence[Case]) -> None:
    for case in cases:
        metrics, weights = train(case, init_mesh(case.tp))
        prints = mesh.all_gather_objects(fingerprint(weights.items()))
        if mesh.is_main:
            save_file(weights, folder / f"{case.name}.safetensors")
            (folder / f"{case.name}.json").write_text(json.dumps({"metrics": metrics, "fingerprints": prints}))


def muon_updater(tp: int, mode: str) -> Updater:
    mesh = init_mesh(tp)
    policy = parallelise(tiny_decoder(seed=1), mesh, mode)
    optim = OptimConfig(name="muon", lr=1e-2, matrix_lr=1e-2)  # has all kinds of state
    return Updater(policy, make_optimizer(policy, optim), mesh=mesh)


def trained_muon_updater(tp: int, mode: str) -> Updater:
    algo = make_algorithm("grpo")
    groups = make_groups(tiny_decoder())
    algo.credit(groups)
    updater = muon_updater(tp, mode)
    for _ in range(2):
        updater.step(rows_of(groups, algo), algo, 1e-2)
    return updater
