"""Settings that a run can be made with, but that somebody should know of: those that change nothing, or do harm."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from assay.algos import Algorithm
from assay.algos.losses import ON_POLICY
from assay.config import CriticConfig, EnvConfig, RewardConfig, TrainConfig
from assay.envs import Env
from assay.settings import keys
from assay.tasks import Task

OF_EPISODES = ("algo.discount", "algo.step_credit", "critic.bootstrap")


def idle_settings(cfg: TrainConfig, algo: Algorithm, task: Task | None = None) -> Iterator[str]:
    """A line for each, with what it waits for. `task`: that of the run, or its environment."""
    defaults = {key: field.get_default(call_default_factory=True) for key, field in keys(TrainConfig)}
    for missing, there, names in (*conditions(cfg, algo), *of_rewards(task)):
        for name in names:
            if not there and attrgetter(name)(cfg) != defaults[name]:
                yield f"{name} has no effect: {missing}"


def conditions(cfg: TrainConfig, algo: Algorithm) -> list[tuple[str, bool, list[str]]]:
    """What is missing, whether it is there, and which settings wait for it."""
    of_env = [f"env.{name}" for name in EnvConfig.model_fields if name != "name"]
    moves = algo.update_count(batch_groups(cfg)) * cfg.train.passes > 1 or cfg.replay.groups > 0
    one_update = "each batch is learnt from in one update, before which the policy has not moved (algo.updates = 4)"
    by_rate = algo.pass_rate_low > 0 or algo.pass_rate_high < 1
    return [
        ("no environment is set (env.name)", bool(cfg.env.name), [*of_env, *OF_EPISODES]),
        ("algo.kl_coef and algo.reward_kl_coef are 0", algo.needs_reference, ["algo.reference"]),
        ("algo.reward_kl_coef is 0", algo.kl_in_reward, ["algo.reward_kl_per"]),
        ("algo.correction is not set", bool(algo.correction), ["algo.correction_low", "algo.correction_high"]),
        ("algo.policy_loss is not ppo_clip", algo.policy_loss == "ppo_clip", ["algo.dual_clip"]),
        ("algo.cov is not set", bool(algo.cov), [f"algo.cov_{name}" for name in ("fraction", "coef", "low", "high")]),
        (one_update, algo.cov != "kl_cov" or moves, ["algo.cov"]),
        ("algo.entropy_target is not set", algo.entropy_target is not None, ["algo.entropy_delta"]),
        ("neither algo.pass_rate_low nor algo.pass_rate_high is set", by_rate, ["algo.pass_rate_retry"]),
        ("algo.soft_overlong_buffer is 0", algo.soft_overlong_buffer > 0, ["algo.soft_overlong_weight"]),
        ("algo.critic is off", algo.critic, [f"critic.{name}" for name in CriticConfig.model_fields]),
        ("the critic gives credit (algo.critic)", not algo.critic, ["algo.advantage"]),
    ]


def batch_groups(cfg: TrainConfig) -> int:
    """Largest number of groups in a batch: those sampled in the step, and those replayed."""
    return cfg.train.prompts + cfg.replay.groups


def of_rewards(task: Task | None) -> list[tuple[str, bool, list[str]]]:
    """The same for an environment that gives all rewards itself."""
    if not isinstance(task, Env):
        return []
    missing = f"all rewards come from {task.name} (one that leaves answers to the judge says so: judged = True)"
    of_pool = ("workers", "timeout_s")
    return [(missing, task.judged, [f"reward.{name}" for name in RewardConfig.model_fields if name not in of_pool])]


def risky_settings(cfg: TrainConfig, algo: Algorithm) -> Iterator[str]:
    """A line for what learning suffers from, with what to do about it."""
    if cfg.sampling.top_k or cfg.sampling.top_p < 1 or cfg.sampling.min_p or cfg.sampling.min_new_tokens:
        yield (
            "sampling is truncated (top_k, top_p, min_p or min_new_tokens): importance ratios are inexact; "
            "see sampling/kept_mass"
        )
    updates = algo.update_count(batch_groups(cfg)) * cfg.train.passes
    if updates > 1 and algo.policy_loss in ON_POLICY:
        yield (
            f"algo.policy_loss = {algo.policy_loss!r} has no ratio: all but the first of {updates} updates a step "
            "learn from answers of an earlier policy, uncorrected; set algo.updates = 1 (and algo.minibatch_size = 0) "
            "and train.passes = 1, or algo.policy_loss = 'ppo_clip'"
        )
