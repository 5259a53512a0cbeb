"""Checks before a run starts: settings without effect or with risks, engine capabilities, judge, prompts and splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from assay.algos import Algorithm, RunFacts, complete_settings
from assay.config import EnvConfig, RewardConfig, TrainConfig
from assay.config.settings import keys
from assay.engine.base import Engine
from assay.envs import Env
from assay.models import PolicyModel
from assay.rewards import JudgePool, check_verdicts
from assay.rollout import Collector
from assay.rollout.episodes import check_history
from assay.runs.console import Console
from assay.tasks import Task
from assay.tasks.base import LazyPrompts, overlap
from assay.types import Prompt, UserError, Verdict

MAX_GENERATED, MAX_READ = 64, 20_000  # prompts per split whose length is checked: generated ones, ones from a file


def unused_settings(cfg: TrainConfig, algo: Algorithm, task: Task | None = None) -> Iterator[str]:
    """A line for each setting that differs from its default and has no effect. `task`: of the run, or its environment.

    The default of an algorithm setting is that of the recipe.
    """
    defaults = {key: field.get_default(call_default_factory=True) for key, field in keys(TrainConfig)}
    defaults |= {f"algo.{name}": value for name, value in complete_settings(cfg.algo.recipe)}
    own = {f"algo.{name}" for name in cfg.algo.model_fields_set}
    for reason, names in (*_unused_without_env(cfg), *algo.unused(run_facts(cfg, algo)), *_unused_without_judge(task)):
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


def _unused_without_env(cfg: TrainConfig) -> Iterator[tuple[str, Sequence[str]]]:
    if not cfg.env.name:
        yield "no environment is set (env.name)", [f"env.{name}" for name in EnvConfig.model_fields if name != "name"]


def _unused_without_judge(task: Task | None) -> Iterator[tuple[str, Sequence[str]]]:
    """Reward settings, for an environment that computes all rewards itself."""
    if isinstance(task, Env) and not task.judged:
        of_pool = ("workers", "timeout_s")
        yield (
            f"all rewards come from {task.name} (an environment whose answers are judged sets judged = True)",
            [f"reward.{name}" for name in RewardConfig.model_fields if name not in of_pool],
        )


def check_capabilities(cfg: TrainConfig, engine: Engine, trains: bool, console: Console) -> None:
    """Refuse an engine that cannot serve this run, and warn of everything that degrades. `trains`: not only SFT."""
    has, name = engine.info.capabilities, cfg.engine.name
    if trains and not has.temperature_logprobs:
        raise UserError(
            f"engine {name} does not report log-probabilities at the sampling temperature (temperature_logprobs), "
            "which training needs: set engine.name to auto, or to an engine that does"
        )
    if not has.exact_seeds:
        console.warn(
            f"engine {name} has no exact seeds (exact_seeds): the same seed may give different tokens, and a resumed "
            "run does not repeat what it had sampled"
        )
    if not has.fingerprint:
        console.warn(
            f"engine {name} has no fingerprint of its weights (fingerprint): weights are not verified after a sync"
        )
    for metric in ("entropy", "kept_mass"):
        if trains and not getattr(has, metric):
            console.warn(f"engine {name} does not report {metric}: the metric sampling/{metric} is left out")


def check_collector(
    cfg: TrainConfig,
    collector: Collector,
    train: Sequence[Prompt],
    evaluations: Mapping[str, Sequence[Prompt]],
    policy: PolicyModel,
    console: Console,
) -> None:
    """Check the judge, the environment and the lengths of prompts."""
    check_judge(collector.judge, train[0])
    if collector.env and (warning := check_history(collector.renderer, collector.env, train[0])):
        console.warn(warning)
    context = min(cfg.model.max_length or policy.max_length, policy.max_length)
    splits = (train, *evaluations.values())
    new_tokens = cfg.sampling.max_new_tokens
    if longest := max(check_prompt_lengths(collector, prompts, new_tokens, context) for prompts in splits):
        console.warn(
            f"engine.memory holds keys and values of {collector.engine.info.max_length - 1} tokens, and prompts have "
            f"up to {longest}: longer answers are cut off; raise engine.memory, or lower sampling.max_new_tokens"
        )


def check_judge(judge: JudgePool, prompt: Prompt) -> Verdict:
    """Raise if the judge fails on every answer. Returns the verdict on an empty answer."""
    texts = ("", prompt.answer, prompt.solution or prompt.answer)
    verdicts = judge.judge([(text, prompt.answer, prompt.fields) for text in texts])
    check_verdicts(verdicts)
    return verdicts[0]


def check_prompt_lengths(collector: Collector, prompts: Sequence[Prompt], new_tokens: int, context: int) -> int:
    """Raise if a prompt fills the context; of a generated split, the first few are checked.

    Returns the length of the longest prompt if answers are limited by the engine's memory, not by the context; else 0.
    """
    checked = prompts[: MAX_GENERATED if isinstance(prompts, LazyPrompts) else MAX_READ]
    ids = collector.renderer.all_prompt_ids(checked)
    collector.check_lengths(checked, ids)
    longest, limit = max(map(len, ids)), collector.engine.info.max_length
    return longest if limit < context and longest + new_tokens > limit else 0


def check_overlap(train: Sequence[Prompt], evaluations: Mapping[str, Sequence[Prompt]], console: Console) -> None:
    """Report problems that are both in the train split and in an evaluation; refuse if all of them are."""
    for label, prompts in evaluations.items():
        if label.startswith(("start:", "after:")):
            continue  # the same problems as "before"
        shared = overlap(train, prompts)
        name = label.partition(":")[2]
        if shared.n_shared == shared.n_eval:
            raise UserError(
                f"every one of the {name} problems is in the train split: give task.path a folder with train.jsonl and "
                "test.jsonl, or set eval.final_split = 'validation', which is carved from the train split"
            )
        if shared.n_shared:
            console.warn(
                f"{shared.n_shared} of the {shared.n_eval} {name} problems are also in the train split "
                f"(e.g. {shared.examples[0]}): accuracies on them are too high"
            )
        else:
            sample = " (a sample: the split is endless)" if shared.sampled else ""
            console.note(
                f"no overlap between {shared.n_train_checked:,} train{sample} and {shared.n_eval:,} {name} problems"
            )
