"""Settings -> task or environment, prompts, demonstrations, and the algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from assay.algos import Algorithm, make_algorithm
from assay.config import (
    EnvConfig,
    TaskConfig,
    TrainConfig,
)
from assay.envs import Env, TaskEnv, make_env
from assay.rewards.importing import load_object, normalized
from assay.runs.console import Console
from assay.tasks import Task, make_task
from assay.tasks.base import UNLIMITED, FilteredPrompts, LazyPrompts
from assay.tasks.registry import MixedPrompts
from assay.text import Renderer
from assay.types import Prompt, UserError, plural


def build_task(cfg: TaskConfig, **changes: object) -> Task:
    if not cfg.name:
        raise UserError(
            "no task: set task.name to gsm8k, math, countdown, abacus, code, jsonl, or your own, e.g. --task gsm8k"
        )
    return make_task(cfg.name, cfg.path or None, **{**cfg.args, **changes})


def build_problems(task: TaskConfig, env: EnvConfig) -> Task:
    """The task, or the environment if there is one. Both provide prompts."""
    if not env.name:
        return build_task(task)
    made = make_env(env.name, env.path or None, build_task(task) if task.name else None, **env.args)
    if isinstance(made, TaskEnv):
        made.defer_judging = True
    return made


def build_demonstrations(cfg: TrainConfig, renderer: Renderer, console: Console) -> Sequence[Prompt]:
    """Problems with the worked solutions that the warm start trains on."""
    if not cfg.sft.steps:
        return ()
    if cfg.env.name and not cfg.task.name:
        return gold_episodes(make_env(cfg.env.name, cfg.env.path or None, **{**cfg.env.args, **cfg.sft.args}))
    prompts = build_task(cfg.task, **cfg.sft.args).prompts("train")
    return select_prompts(prompts, cfg, renderer, console, "prompts of the warm start")


def gold_episodes(env: Env) -> Sequence[Prompt]:
    """Train prompts of an environment with worked episodes."""
    prompts = env.prompts("train")
    if not env.gold_episode(prompts[0]):
        raise UserError(
            f"the environment {env.name} has no worked episodes: define gold_action(), or set sft.steps = 0"
        )
    return LazyPrompts(lambda index: replace(prompts[index], episode=env.gold_episode(prompts[index])), len(prompts))


def take(prompts: Sequence[Prompt], count: int, split: str, endless: bool = False) -> Sequence[Prompt]:
    """The first `count` prompts (0: all). `endless`: whether a split without an end is allowed."""
    if not len(prompts):
        raise UserError(f"the {split} split is empty: check task.path")
    if not count and not endless and len(prompts) >= UNLIMITED:
        raise UserError(
            f"the {split} split is generated and endless: "
            "set the number of problems to use (eval.examples, eval.final_examples)"
        )
    return prompts[:count] if count else prompts


def select_prompts(
    prompts: Sequence[Prompt], cfg: TrainConfig, renderer: Renderer, console: Console, what: str = "train prompts"
) -> Sequence[Prompt]:
    """The prompts to train on: without few-shot examples of the train split, and without prompts that are too long."""
    if cfg.prompt.few_shot and not cfg.prompt.few_shot_file:
        prompts = drop_examples(prompts, renderer, console, what)
    return drop_long_prompts(prompts, renderer, cfg.train.max_prompt_tokens, console, what)


def drop_examples(prompts: Sequence[Prompt], renderer: Renderer, console: Console, what: str) -> Sequence[Prompt]:
    """The prompts without the few-shot examples, which would be asked together with their own solution."""
    shown = {question for question, _ in renderer.few_shot}

    def others(own: Sequence[Prompt]) -> Sequence[Prompt]:
        if len(own) >= UNLIMITED:
            filtered = FilteredPrompts(own, lambda prompt: prompt.question not in shown, "prompt.few_shot: lower it")
            return LazyPrompts(filtered.__getitem__, len(own))  # whose `rejected` counts long prompts only
        kept = [prompt for prompt in own if prompt.question not in shown]
        if not kept:
            raise UserError(f"all {len(own):,} {what} are few-shot examples: lower prompt.few_shot")
        return kept

    console.note(f"left the {plural(len(shown), 'few-shot example')} out of the {what} (prompt.few_shot)")
    return prompts.filtered(others) if isinstance(prompts, MixedPrompts) else others(prompts)


def drop_long_prompts(
    prompts: Sequence[Prompt], renderer: Renderer, limit: int, console: Console, what: str
) -> Sequence[Prompt]:
    """The prompts with at most `limit` tokens (0: all of them); reports how many are dropped.

    Of an endless split, longer prompts are replaced when they are drawn.
    """
    if not limit:
        return prompts
    if isinstance(prompts, MixedPrompts):
        return prompts.filtered(lambda own: drop_long_prompts(own, renderer, limit, console, what))
    if len(prompts) >= UNLIMITED:
        rule = f"train.max_prompt_tokens = {limit}: raise it, or generate shorter problems (task.args)"
        return FilteredPrompts(prompts, lambda prompt: len(renderer.prompt_ids(prompt)) <= limit, rule)
    given = list(prompts)
    kept = [prompt for prompt, ids in zip(given, renderer.all_prompt_ids(given), strict=True) if len(ids) <= limit]
    if not kept:
        raise UserError(f"all {len(given):,} {what} have more than train.max_prompt_tokens = {limit} tokens")
    if dropped := len(given) - len(kept):
        console.note(
            f"dropped {dropped:,} of {len(given):,} {what} with more than {limit} tokens (train.max_prompt_tokens)"
        )
    return kept


def build_algorithm(cfg: TrainConfig) -> Algorithm:
    """The recipe with the user's changes. Code that settings name by path is imported."""
    own = cfg.algo.model_fields_set - {"recipe"}
    changes = {name: with_absolute_paths(getattr(cfg.algo, name)) for name in own}
    algo = make_algorithm(
        cfg.algo.recipe,
        max_new_tokens=cfg.sampling.max_new_tokens,
        critic_settings=cfg.critic,
        load=load_object,
        **changes,
    )
    algo.check_samples(cfg.train.samples)
    if cfg.replay.groups:
        algo.check_replay()
    if cfg.source.name == "async" and cfg.source.max_staleness:
        algo.check_staleness()
    return algo


def with_absolute_paths(value: Any) -> Any:
    """The setting, with paths of code that are valid in every working directory."""
    if isinstance(value, list):
        return [with_absolute_paths(one) for one in value]
    return normalized(value) if isinstance(value, str) else value
