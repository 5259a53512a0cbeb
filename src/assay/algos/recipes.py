"""Named bundles of settings, with the source of their defaults. A recipe is data: a new one needs no code."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from assay.algos.algorithm import Algorithm, pick

RECIPES: dict[str, Algorithm] = {
    # Williams 1992, with the batch's mean reward as baseline: works with one sample a prompt.
    "reinforce": Algorithm(advantage="batch_mean", policy_loss="reinforce", aggregate="token"),
    # DeepSeekMath (arXiv 2402.03300): group mean and std, per-sequence means, one update a rollout, k3 with
    # coefficient 0.04. The clip range is PPO's 0.2. Later practice (TRL's default, DAPO, Dr. GRPO) drops the KL and
    # saves the reference model, so the coefficient is 0 here: set kl_coef = 0.04 for the paper's.
    "grpo": Algorithm(
        advantage="group_norm", policy_loss="ppo_clip", aggregate="sequence", clip_low=0.2, clip_high=0.2, kl="k3"
    ),
    # "Understanding R1-Zero-like training" (arXiv 2503.20783): GRPO without its two biases, the division by the group's
    # std and by each answer's length; the constant is the generation limit. No KL.
    "dr_grpo": Algorithm(
        advantage="group_mean", policy_loss="ppo_clip", aggregate="constant", clip_low=0.2, clip_high=0.2
    ),
    # DAPO (arXiv 2503.14476): clip-higher 0.2/0.28, token-level loss, no KL, dynamic sampling, soft punishment over the
    # last 4,096 of 20,480 tokens = 0.2 of the limit, weight 1. The final recipe punishes overlong answers rather than
    # masking them. Rounds of sampling: 10 in all in verl's script. The paper makes 16 updates from a rollout of 512
    # prompts; 4 keeps mini-batches useful with some dozens of prompts.
    "dapo": Algorithm(
        advantage="group_norm",
        policy_loss="ppo_clip",
        aggregate="token",
        clip_low=0.2,
        clip_high=0.28,
        drop_zero_variance=True,
        resample=9,
        soft_overlong_buffer=0.2,
        soft_overlong_weight=1.0,
        updates=4,
    ),
    # Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740): leave-one-out baseline, REINFORCE on whole sequences:
    # a sequence's log-probability is a sum over its tokens, and its length must not divide it. Constant aggregation
    # does that, up to a constant factor. Their KL sits in the reward (reward_kl_coef); it is off here.
    "rloo": Algorithm(advantage="leave_one_out", policy_loss="reinforce", aggregate="constant"),
    # nanochat's chat_rl: "simplified GRPO": on-policy, reward minus group mean, token-level, no KL and no clip.
    "simple": Algorithm(advantage="group_mean", policy_loss="reinforce", aggregate="token"),
}


def make_algorithm(recipe: str, **overrides: Any) -> Algorithm:
    """A recipe's algorithm with some settings changed; whatever is unknown or invalid is a UserError that names it."""
    pick("recipe", recipe, RECIPES)
    settings = [field.name for field in fields(Algorithm)]
    for name in overrides:
        pick("algorithm setting", name, settings)
    return replace(RECIPES[recipe], **overrides)
