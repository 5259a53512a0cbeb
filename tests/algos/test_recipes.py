"""Recipes are valid, distinct, and changed only by settings that exist."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("recipe", "overrides", "named"),
    [
        ("gpro", {}, "did you mean 'grpo'"),
        ("zzz", {}, "known: reinforce, grpo"),
        ("grpo", {"clip_hihg": 0.3}, "did you mean 'clip_high'"),
        ("grpo", {"advantage": "group_nrom"}, "did you mean 'group_norm'"),
        ("grpo", {"policy_loss": "ppo"}, "policy_loss 'ppo'"),
        ("grpo", {"aggregate": "tokens"}, "did you mean 'token'"),
        ("grpo", {"kl": "k4"}, "'kl'"),
        ("grpo", {"clip_low": -0.1}, "'clip_low'"),
        ("grpo", {"clip_high": float("nan")}, "'clip_high'"),
        ("grpo", {"clip_high": "0.2"}, "'clip_high'"),
        ("grpo", {"dual_clip": 0.9}, "dual_clip = 0.9"),
        ("grpo", {"updates": 0}, "'updates'"),
        ("grpo", {"updates": True}, "'updates'"),
        ("grpo", {"minibatch_size": -1}, "'minibatch_size'"),
        ("dapo", {"resample": -1}, "'resample'"),
        ("dapo", {"drop_zero_variance": False}, "set resample = 0, or drop_zero_variance = true"),
        ("dapo", {"soft_overlong_buffer": 4096}, "'soft_overlong_buffer'"),
        ("gspo", {"ratio": "sequences"}, "'ratio'"),
        ("grpo", {"correction": "truncate"}, "'correction'"),
        ("grpo", {"correction_low": 3.0}, "correction_low = 3.0"),
        ("grpo", {"pass_rate_low": 0.9, "pass_rate_high": 0.5}, "pass_rate_low = 0.9"),
        ("grpo", {"cov": "cov"}, "'cov'"),
        ("grpo", {"cov_fraction": 2}, "'cov_fraction'"),
        ("grpo", {"entropy_target": "much"}, "'entropy_target'"),
        ("simple", {"discount": 1.5}, "discount"),
        ("simple", {"kl_coef": 0.1}, "kl_coef = 0.1"),
        ("reinforce_pp", {"kl_coef": 0.1}, "reward_kl_coef"),
        ("reinforce_pp", {"advantage": "batch_norm", "reward_kl_coef": 0.1}, "batch_mean, token_norm, none"),
        ("reinforce_pp", {"reward_kl_coef": 0.01, "step_credit": True}, "step_credit or discount"),
        ("reinforce_pp", {"reward_kl_coef": 0.01, "discount": 0.9}, "step_credit or discount"),
        ("ppo", {"step_credit": True}, "step_credit, discount or greedy_baseline"),
        ("remax", {"critic": True}, "step_credit, discount or greedy_baseline"),
        ("bnpo", {"reward_kl_coef": 0.1}, "reward_kl_coef"),
        ("bnpo", {"soft_overlong_buffer": 0.2}, "soft_overlong_buffer = 0"),
        ("bnpo", {"greedy_baseline": True}, "greedy_baseline = false"),
        ("rloo", {"reward_kl_per": "tokens"}, "'reward_kl_per'"),
        ("rloo", {"reward_kl_coef": -0.1}, "'reward_kl_coef'"),
    ],
)
def test_invalid_settings_are_reported(recipe: str, overrides: dict, named: str) -> None:
    with pytest.raises(UserError) as error:
        make_algorithm(recipe, **overrides)
    assert named in str(error.value) and "\n" not in str(error.value)
