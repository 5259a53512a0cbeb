"""Algorithms, updaters and critics of tiny models, for tests of the learner."""

from __future__ import annotations

from typing import Any

import torch
from train_parts import make_adamw, tiny_decoder

from assay.algos import Algorithm, Scorers, make_algorithm
from assay.algos.credit import CriticCredit, LogRatios
from assay.config import AlgoConfig, CriticConfig
from assay.models import Decoder
from assay.training.learner.critic import Critic, ValueModel
from assay.training.learner.update import Updater
from assay.types import Group

LIMIT = 16
CHANGES: dict[str, dict[str, Any]] = {
    "reinforce": {},
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"updates": 1},
    "grpo with everything": {"recipe": "grpo", "kl_coef": 0.3, "entropy_coef": 0.02, "mask_overlong": True},
    "grpo with k2": {"recipe": "grpo", "kl": "k2", "kl_coef": 0.1},
    "dr_grpo with entropy": {"recipe": "dr_grpo", "entropy_coef": 0.05},
    "reinforce_pp with a reference": {"recipe": "reinforce_pp", "reward_kl_coef": 0.3},
    "gspo": {"updates": 1, "recompute_logprobs": False, "clip_low": 0.05, "clip_high": 0.05},
    "cispo": {"updates": 1, "clip_high": 0.2},
    "gpg": {},
    "bnpo": {},
    "token_truncate": {"recipe": "grpo", "correction": "token_truncate", "correction_high": 1.1},
    "sequence_mask": {"recipe": "grpo", "correction": "sequence_mask", "correction_low": 0.8, "correction_high": 1.3},
    "kl_cov": {"recipe": "grpo", "cov": "kl_cov", "cov_fraction": 0.1},
    "clip_cov": {"recipe": "grpo", "cov": "clip_cov", "cov_fraction": 0.1, "cov_low": 0.1},
}


def algorithm(name: str) -> Algorithm:
    changes = dict(CHANGES[name])
    return make_algorithm(changes.pop("recipe", name), max_new_tokens=LIMIT, **changes)


def updater(algo: Algorithm, **changes: Any) -> Updater:
    policy = tiny_decoder()
    reference = tiny_decoder(seed=9).requires_grad_(False) if algo.needs.reference else None
    return Updater(policy, make_adamw(policy, 1e-2, weight_decay=0.1), reference=reference, **changes)


def critic(token_budget: int = 10**6, policy: Decoder | None = None, **changes: object) -> Critic:
    """With a separate trunk, or on that of `policy`."""
    model = ValueModel(policy or tiny_decoder(seed=3), shared=policy is not None)
    with torch.no_grad():
        model.head.weight.copy_(torch.linspace(-1, 1, 16)[None])
        model.head.bias.fill_(0.3)
    return Critic(model, CriticConfig(lr=1e-2, **changes), token_budget)  # type: ignore[arg-type]


def credit(
    own: Critic, groups: list[Group], ratios: LogRatios | None = None, reward_kl_coef: float = 0.0
) -> dict[str, float]:
    """Advantages from its values, of rewards that have been set."""
    settings = AlgoConfig(critic=True, reward_kl_coef=reward_kl_coef)
    return CriticCredit(settings, own.cfg).assign(groups, ratios, Scorers(values=own.values))
