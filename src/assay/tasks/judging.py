"""The judge of a task as the sections [reward] and [judge] of the settings describe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from assay.config import JudgeConfig, RewardConfig
from assay.rewards import FunctionJudge, Judge, JudgePanel, JudgePool, Judging, RewardMix
from assay.rewards.reward_model import make_model_judge
from assay.tasks.base import Task
from assay.types import UserError

TASK_JUDGE, MODEL_JUDGE = "task", "judge"  # in reward.functions


def build_judge_pool(cfg: RewardConfig, task: Task | None, judge: JudgeConfig | None = None) -> Judging:
    """What judges answers: verifiers and reward functions in worker processes, a model (`judge`) at its endpoint.

    `task`: None if the settings name reward functions only.
    """
    paths, weights = reward_functions(cfg)
    if MODEL_JUDGE not in paths:
        return judge_pool(build_judge(cfg, task), cfg)
    place = paths.index(MODEL_JUDGE)
    part_names(paths)  # refuses repeated functions
    model, weight = make_model_judge(judge or JudgeConfig()), weights[place]
    mix = None if place else shaping(cfg, model)
    if len(paths) == 1:
        return JudgePanel(model, weight, mix=mix)
    others = {"functions": paths[:place] + paths[place + 1 :], "weights": weights[:place] + weights[place + 1 :]}
    verifiers = build_judge(cfg.model_copy(update=others), task, shaped=mix is None)
    return JudgePanel(model, weight, judge_pool(verifiers, cfg), mix)


def judge_pool(judge: Judge, cfg: RewardConfig) -> JudgePool:
    return JudgePool(judge, cfg.workers, cfg.timeout_s, sandbox=cfg.sandbox, pass_env=cfg.pass_env)


def build_judge(cfg: RewardConfig, task: Task | None, shaped: bool = True) -> Judge:
    """The judge of the settings. Weights for accuracy, format and length apply to the first of several functions.

    `shaped`: false if the first function is elsewhere.
    """
    paths, weights = reward_functions(cfg)

    def judge_of(path: str) -> Judge:
        if path != TASK_JUDGE:
            return FunctionJudge(path)
        assert task is not None
        return task.judge(cfg.extract or None, cfg.strict)

    first, *others = [judge_of(path) for path in paths]
    mix = replace(shaping(cfg, first), others=tuple(others), shaped=shaped)
    return replace(mix, weights=tuple(weights), names=part_names(paths)) if cfg.functions else mix


def shaping(cfg: RewardConfig, judge: Judge) -> RewardMix:
    values = cfg.model_dump(include={field.name for field in fields(RewardMix)} - {"weights"})
    return RewardMix(judge, **values | {"format_pattern": cfg.format_pattern or None})


def reward_functions(cfg: RewardConfig) -> tuple[list[str], list[float]]:
    """Paths of the reward functions (TASK_JUDGE: the task's judge), and their weights."""
    if cfg.function and cfg.functions:
        raise UserError("reward.function and reward.functions are both set: remove one of them")
    if not cfg.functions:
        if cfg.weights:
            raise UserError("reward.weights needs reward.functions, with one function per weight")
        return [cfg.function or TASK_JUDGE], [1.0]
    weights = cfg.weights or [1.0] * len(cfg.functions)
    if len(weights) != len(cfg.functions):
        raise UserError(f"reward.functions has {len(cfg.functions)} entries and reward.weights {len(weights)}")
    return cfg.functions, weights


def part_names(paths: Sequence[str]) -> tuple[str, ...]:
    """Names of reward functions in metrics: the name of the function, with its file if two have the same name."""
    short = [path.rpartition(":")[2] for path in paths]
    full = [f"{Path(path.rpartition(':')[0]).stem}.{name}" for path, name in zip(paths, short, strict=True)]
    names = tuple(long if short.count(name) > 1 else name for name, long in zip(short, full, strict=True))
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"reward.functions names {repeated[0]} more than once: give each function once")
    return names
