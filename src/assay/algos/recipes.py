"""Recipes: named settings, with the source of each value. A recipe is data: a new one needs no code."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from assay.algos.algorithm import Algorithm, no_paths
from assay.algos.component import LengthLimits, Loader, require_name
from assay.config import AlgoConfig, CriticConfig
from assay.config.settings import explain
from assay.types import UserError

RECIPES: dict[str, dict[str, Any]] = {
    # Williams 1992, with the batch's mean reward as baseline: works with one sample per prompt.
    "reinforce": {"advantage": "batch_mean", "policy_loss": "reinforce", "aggregate": "token"},
    # DeepSeekMath (arXiv 2402.03300): group mean and std, per-sequence means, one update per batch, k3 with
    # coefficient 0.04. The clip range is PPO's 0.2. Later practice (TRL's default, DAPO, Dr. GRPO) drops the KL and
    # saves the reference model, so the coefficient is 0 here: set kl_coef = 0.04 for the paper's.
    "grpo": {
        "advantage": "group_norm",
        "policy_loss": "ppo_clip",
        "aggregate": "sequence",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl": "k3",
    },
    # PPO (arXiv 1707.06347) as language models are trained with it (InstructGPT, arXiv 2203.02155): a critic gives
    # each token its advantage, so one sample per prompt is enough; clip 0.2, four mini-batches per batch. The KL
    # penalty per token in the reward is off here; reward_kl_coef > 0 enables it. GAE's gamma and lambda
    # are settings of the critic section.
    "ppo": {
        "advantage": "none",
        "policy_loss": "ppo_clip",
        "aggregate": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "reward_kl_per": "token",
        "critic": True,
        "updates": 4,
    },
    # "Understanding R1-Zero-like training" (arXiv 2503.20783): GRPO without its two biases, the division by the group's
    # std and by each answer's length; the constant is the generation limit. No KL.
    "dr_grpo": {
        "advantage": "group_mean",
        "policy_loss": "ppo_clip",
        "aggregate": "constant",
        "clip_low": 0.2,
        "clip_high": 0.2,
    },
    # DAPO (arXiv 2503.14476): clip-higher 0.2/0.28, token-level loss, no KL, dynamic sampling, soft penalty over the
    # last 4,096 of 20,480 tokens = 0.2 of the limit, weight 1. The final recipe penalises overlong answers instead of
    # masking them. At most 10 sampling rounds, as in verl's script. The paper makes 16 updates per batch of 512
    # prompts; 4 keeps mini-batches useful with a few dozen prompts.
    "dapo": {
        "advantage": "group_norm",
        "policy_loss": "ppo_clip",
        "aggregate": "token",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "drop_zero_variance": True,
        "resample": 9,
        "soft_overlong_buffer": 0.2,
        "soft_overlong_weight": 1.0,
        "updates": 4,
    },
    # Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740): leave-one-out baseline, REINFORCE on whole sequences:
    # the log-probability of a sequence is the sum over its tokens, not divided by the length. Constant aggregation
    # does that, up to a constant factor. Their KL penalty is part of the reward (reward_kl_coef); it is off here.
    "rloo": {"advantage": "leave_one_out", "policy_loss": "reinforce", "aggregate": "constant"},
    # nanochat's chat_rl: "simplified GRPO": on-policy, reward minus group mean, token-level, no KL and no clip.
    "simple": {"advantage": "group_mean", "policy_loss": "reinforce", "aggregate": "token"},
    # REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole batch, so one sample per prompt is enough,
    # and PPO's clip. Its KL penalty per token is off here; reward_kl_coef > 0 enables it. Mean and std are over all
    # tokens, as in the authors' OpenRLHF and in verl. With several samples per prompt the paper's "-baseline"
    # is advantage = "group_mean_token_norm".
    "reinforce_pp": {
        "advantage": "token_norm",
        "policy_loss": "ppo_clip",
        "aggregate": "token",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "reward_kl_per": "token",
    },
    # ReMax (arXiv 2310.10505): the reward of one greedy answer, which is not trained on, is the baseline. As in "rloo"
    # the log-probability of a sequence is the sum over its tokens. Their KL penalty is part of the reward; off here.
    "remax": {"advantage": "none", "policy_loss": "reinforce", "aggregate": "constant", "greedy_baseline": True},
    # GSPO (arXiv 2507.18071): the ratio of a whole sequence, clipped to 3e-4 and 4e-4, and four mini-batches per
    # batch in the paper's runs. In such narrow ranges differences between engine and trainer matter, so the
    # trainer recomputes log-probabilities.
    "gspo": {
        "advantage": "group_norm",
        "policy_loss": "ppo_clip",
        "aggregate": "sequence",
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "recompute_logprobs": True,
        "updates": 4,
    },
    # CISPO (MiniMax-M1, arXiv 2506.13585): clipped ratios as weights without a gradient, group-relative advantages,
    # token-level loss, no KL. The paper tunes the upper bound alone; a weight of at most 5 is what TRL recommends after
    # ScaleRL (arXiv 2510.13786). With one update per batch nothing is clipped, hence 4 as in "dapo".
    "cispo": {
        "advantage": "group_norm",
        "policy_loss": "cispo",
        "aggregate": "token",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "updates": 4,
    },
    # GPG (arXiv 2504.02546): the plain policy gradient with the group's mean as baseline and no division by its std;
    # a factor compensates for groups with equal rewards.
    "gpg": {"advantage": "group_mean_rescaled", "policy_loss": "reinforce", "aggregate": "token"},
    # BNPO (arXiv 2506.02864): rewards normalised by a Beta density fitted to the batch. The rest is from the
    # authors' run.sh: clip 0.2 and 0.28, dual clip 10, and the loss of an answer is the sum over its tokens, which is
    # "constant" up to a constant factor. (TRL's "bnpo" is an aggregation, here "token".)
    "bnpo": {
        "advantage": "beta_norm",
        "policy_loss": "ppo_clip",
        "aggregate": "constant",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "dual_clip": 10.0,
    },
}


def complete_settings(recipe: str, **changes: Any) -> AlgoConfig:
    """Defaults, overridden by the recipe, overridden by `changes`. Raises a UserError for invalid settings."""
    require_name("recipe", recipe, RECIPES)
    if changes.get("updates") and changes.get("minibatch_size"):
        raise UserError(
            f"algo.updates = {changes['updates']} and algo.minibatch_size = {changes['minibatch_size']} both define "
            "how a batch is split: remove algo.updates, or set algo.minibatch_size = 0"
        )
    try:
        return AlgoConfig.model_validate({**RECIPES[recipe], **changes, "recipe": recipe}, strict=True)
    except ValidationError as error:
        raise UserError(explain(error, AlgoConfig, "", {})) from None


def make_algorithm(
    recipe: str,
    *,
    max_new_tokens: int = 0,
    max_length: int = 0,
    critic_settings: CriticConfig | None = None,
    load: Loader = no_paths,
    **changes: Any,
) -> Algorithm:
    """The algorithm of a recipe with changed settings."""
    limits = LengthLimits(max_new_tokens, max_length)
    return Algorithm(complete_settings(recipe, **changes), critic_settings, limits, load)
