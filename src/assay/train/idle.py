"""Settings that a run accepts but that the user should know about: without effect, or likely to do harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from assay.algos import Algorithm, RunFacts, complete_settings
from assay.config import EnvConfig, RewardConfig, TrainConfig
from assay.envs import Env
from assay.settings import keys
from assay.tasks import Task


def unused_settings(cfg: TrainConfig, algo: Algorithm, task: Task | None = None) -> Iterator[str]:
    """A line for each setting that differs from its default without any effect. `task`: the run's, or its environment.

    A setting of the algorithm has the default of the recipe.
    """
    defaults = {key: field.get_default(call_default_factory=True) for key, field in keys(TrainConfig)}
    defaults |= {f"algo.{name}": value for name, value in complete_settings(cfg.algo.recipe)}
    own = {f"algo.{name}" for name in cfg.algo.model_fields_set}
    for reason, names in (*_without_environment(cfg), *algo.unused(run_facts(cfg, algo)), *_without_judge(task)):
        for name in names:
            is_set = name in own or not name.startswith("algo.")
            if is_set and attrgetter(name)(cfg) != defaults[name]:
                yield f"{name} has no effect: {reason}"


def risky_settings(cfg: TrainConfig, algo: Algorithm) -> Iterator[str]:
    """A line for each setting that harms learning, with what to do about it."""
    if cfg.sampling.top_k or cfg.sampling.top_p < 1 or cfg.sampling.min_p or cfg.sampling.min_new_tokens:
        yield (
            "sampling is truncated (top_k, top_p, min_p or min_new_tokens): importance ratios are inexact; "
            "see sampling/kept_mass"
        )
    yield from algo.warnings(run_facts(cfg, algo))


def run_facts(cfg: TrainConfig, algo: Algorithm) -> RunFacts:
    largest_batch = cfg.train.prompts + cfg.replay.groups
    updates = algo.update_count(largest_batch) * cfg.train.passes
    return RunFacts(episodes=bool(cfg.env.name), updates=updates, replay=cfg.replay.groups > 0)


def _without_environment(cfg: TrainConfig) -> Iterator[tuple[str, Sequence[str]]]:
    if not cfg.env.name:
        yield "no environment is set (env.name)", [f"env.{name}" for name in EnvConfig.model_fields if name != "name"]


def _without_judge(task: Task | None) -> Iterator[tuple[str, Sequence[str]]]:
    """Settings of rewards, for an environment that gives all rewards itself."""
    if isinstance(task, Env) and not task.judged:
        of_pool = ("workers", "timeout_s")
        yield (
            f"all rewards come from {task.name} (one that leaves answers to the judge says so: judged = True)",
            [f"reward.{name}" for name in RewardConfig.model_fields if name not in of_pool],
        )
