"""Recipes are valid, distinct, and changed only by settings that exist."""

from __future__ import annotations

import pytest
import torch

from assay.algos.recipes import RECIPES, make_algorithm
from assay.types import UserError


def test_recipe_names_and_defining_settings() -> None:
    new = {"ppo", "reinforce_pp", "remax", "gspo", "cispo", "gpg", "bnpo"}
    assert set(RECIPES) == {"reinforce", "grpo", "dr_grpo", "dapo", "rloo", "simple"} | new
    made = {name: make_algorithm(name) for name in RECIPES}
    recipes = {name: algo.settings for name, algo in made.items()}
    defining = {n: (a.advantage, a.policy_loss, a.aggregate, a.clip_low, a.clip_high) for n, a in recipes.items()}
    assert defining["grpo"] == ("group_norm", "ppo_clip", "sequence", 0.2, 0.2)
    assert defining["dr_grpo"] == ("group_mean", "ppo_clip", "constant", 0.2, 0.2)
    assert defining["dapo"] == ("group_norm", "ppo_clip", "token", 0.2, 0.28)
    assert defining["simple"][:3] == ("group_mean", "reinforce", "token")
    assert defining["rloo"][:3] == ("leave_one_out", "reinforce", "constant")
    assert defining["reinforce"][:3] == ("batch_mean", "reinforce", "token")
    assert defining["reinforce_pp"] == ("token_norm", "ppo_clip", "token", 0.2, 0.2)
    assert defining["ppo"] == ("none", "ppo_clip", "token", 0.2, 0.2)
    assert defining["remax"][:3] == ("none", "reinforce", "constant")
    assert defining["gspo"] == ("group_norm", "ppo_clip", "sequence", 3e-4, 4e-4)
    assert defining["cispo"] == ("group_norm", "cispo", "token", 1.0, 4.0)
    assert defining["gpg"][:3] == ("group_mean_rescaled", "reinforce", "token")
    assert defining["bnpo"] == ("beta_norm", "ppo_clip", "constant", 0.2, 0.28)
    assert {name: recipe.dual_clip for name, recipe in recipes.items() if recipe.dual_clip} == {"bnpo": 10.0}
    assert all(recipe.correction is None for recipe in recipes.values())
    gspo = made["gspo"]
    assert gspo.settings.ratio == "sequence" and gspo.needs.whole_sequences and gspo.needs.trainer_logprobs
    assert [name for name, recipe in recipes.items() if recipe.greedy_baseline] == ["remax"]
    assert [name for name, recipe in recipes.items() if recipe.critic] == ["ppo"]
    assert recipes["dapo"].drop_zero_variance
    assert all(not algo.needs.reference for algo in made.values())
    assert [name for name, algo in made.items() if algo.needs.values] == ["ppo"]


def test_overrides_do_not_change_the_recipe() -> None:
    changed = make_algorithm("grpo", kl_coef=0.04, max_new_tokens=64)
    assert (changed.settings.kl, changed.settings.kl_coef, changed.limits.max_new_tokens) == ("k3", 0.04, 64)
    assert changed.needs.reference
    assert make_algorithm("grpo").settings.kl_coef == 0.0
    assert changed.replace(kl_coef=0.0).settings == make_algorithm("grpo").settings


def test_user_defined_functions_are_accepted() -> None:
    def halved(rewards: list[torch.Tensor]) -> list[torch.Tensor]:
        return [rewards_G / 2 for rewards_G in rewards]

    assert make_algorithm("simple", advantage=halved).settings.advantage is halved


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("gpro", {}, "unknown recipe 'gpro': did you mean 'grpo'"),
        ("GRPO", {}, "did you mean 'grpo'"),
        ("zzz", {}, "known: reinforce, grpo"),
        ("grpo", {"clip_hihg": 0.3}, "unknown key 'clip_hihg' in the settings: did you mean 'clip_high'"),
        ("grpo", {"advantage": "group_nrom"}, "unknown advantage 'group_nrom': did you mean 'group_norm'"),
        ("grpo", {"policy_loss": "ppo"}, "unknown policy_loss 'ppo'"),
        ("grpo", {"aggregate": "tokens"}, "did you mean 'token'"),
        ("grpo", {"kl": "k4"}, "'kl' in the settings: input should be 'k1', 'k2' or 'k3', not 'k4'"),
        (
            "grpo",
            {"clip_low": -0.1},
            "'clip_low' in the settings: input should be greater than or equal to 0, not -0.1",
        ),
        (
            "grpo",
            {"clip_high": float("nan")},
            "'clip_high' in the settings: input should be greater than or equal to 0, not nan",
        ),
        ("grpo", {"clip_high": "0.2"}, "'clip_high' in the settings: input should be a valid number, not '0.2'"),
        ("grpo", {"dual_clip": 0.9}, "dual_clip = 0.9 must be above 1, e.g. 3, or 0 for none"),
        (
            "grpo",
            {"dual_clip": -3.0},
            "'dual_clip' in the settings: input should be greater than or equal to 0, not -3.0",
        ),
        ("reinforce_pp", {"advantage": "batch_norm", "reward_kl_coef": 0.1}, "batch_mean, token_norm, none"),
        ("grpo", {"updates": 0}, "'updates' in the settings: input should be greater than or equal to 1, not 0"),
        ("grpo", {"updates": 1.5}, "'updates' in the settings: input should be a valid integer, not 1.5"),
        ("grpo", {"updates": True}, "'updates' in the settings: input should be a valid integer, not True"),
        (
            "grpo",
            {"minibatch_size": -1},
            "'minibatch_size' in the settings: input should be greater than or equal to 0, not -1",
        ),
        ("dapo", {"resample": -1}, "'resample' in the settings: input should be greater than or equal to 0, not -1"),
        ("dapo", {"drop_zero_variance": False}, "set resample = 0, or drop_zero_variance = true"),
        (
            "dapo",
            {"soft_overlong_buffer": 4096},
            "'soft_overlong_buffer' in the settings: input should be less than or equal to 1, not 4096",
        ),
        ("simple", {"kl_coef": 0.1}, "needs an estimator"),
        (
            "gspo",
            {"ratio": "sequences"},
            "'ratio' in the settings: input should be 'token' or 'sequence', not 'sequences'",
        ),
        (
            "grpo",
            {"correction": "truncate"},
            "'correction' in the settings: input should be 'token_truncate', 'token_mask'",
        ),
        ("grpo", {"correction_low": 3.0}, "correction_low = 3.0 must not be above correction_high = 2.0"),
        ("grpo", {"pass_rate_low": 0.9, "pass_rate_high": 0.5}, "pass_rate_low = 0.9 must not be above"),
        ("grpo", {"cov": "cov"}, "'cov' in the settings: input should be 'kl_cov' or 'clip_cov', not 'cov'"),
        ("grpo", {"cov_fraction": 2}, "'cov_fraction' in the settings: input should be less than or equal to 1, not 2"),
        (
            "grpo",
            {"entropy_target": "much"},
            "'entropy_target' in the settings: input should be a valid number, not 'much'",
        ),
        ("ppo", {"step_credit": True}, "cannot be combined"),
        ("remax", {"critic": True}, "step_credit, discount or greedy_baseline"),
        ("reinforce_pp", {"kl_coef": 0.1}, "or reward_kl_coef instead"),
        ("grpo", {"reward_kl_coef": 0.1, "reward_kl_per": "token"}, "use group_mean, leave_one_out, batch_mean"),
        ("bnpo", {"reward_kl_coef": 0.1}, "success rates"),
        ("bnpo", {"soft_overlong_buffer": 0.2}, "success rates: set soft_overlong_buffer = 0"),
        ("dapo", {"advantage": "beta_norm"}, "success rates: set soft_overlong_buffer = 0"),
        ("bnpo", {"greedy_baseline": True}, "success rates: set greedy_baseline = false"),
        ("rloo", {"reward_kl_per": "tokens"}, "input should be 'sequence' or 'token', not 'tokens'"),
        ("rloo", {"reward_kl_coef": -0.1}, "input should be greater than or equal to 0, not -0.1"),
    ],
)
def test_invalid_settings_are_reported(recipe: str, overrides: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        make_algorithm(recipe, **overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
