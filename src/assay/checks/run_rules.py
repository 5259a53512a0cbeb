"""Rules on settings, data and judge that need neither torch nor a model.

`assay train`, `assay train --dry-run` and `assay doctor` apply the same rules: `check_settings` and `check_judge` raise
what a run refuses, the others yield causes. A run shows each cause as a warning, and `assay doctor` lists them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from assay.checks import Diagnosis
from assay.checks.folder import explain_leakage
from assay.checks.settings import diagnose_settings
from assay.config import EnvConfig, ModelConfig, RewardConfig, TrainConfig
from assay.config.settings import keys
from assay.envs import Env
from assay.rewards import Judging, check_verdicts
from assay.runs.curves import check_trackers
from assay.runs.directory import check_name
from assay.tasks import Task
from assay.tasks.base import LazyPrompts, overlap
from assay.types import Problem, Prompt, UserError, Verdict, plural

if TYPE_CHECKING:
    from assay.algos import Algorithm, RunFacts

PRESET = "preset:"  # in front of the name of a model that is not trained yet
PRESET_TOKENIZERS = ("words", "characters")  # values of model.tokenizer that name no tokenizer


def check_settings(cfg: TrainConfig) -> None:
    """Raise a `UserError` if the settings of trackers, name or adapters are invalid."""
    check_trackers(cfg.log.wandb or None, cfg.log.tensorboard)
    check_name(cfg.name or "run")
    if cfg.lora.quantize and not cfg.lora.rank:
        raise UserError(
            Problem("lora.quantize freezes the weights, and nothing would be trained", "set lora.rank above 0")
        )


def settings_problems(
    cfg: TrainConfig, algo: Algorithm | None, task: Task | None, parameters: int | None
) -> Iterator[Diagnosis]:
    """Settings that keep a run from learning, harm it or have no effect. Unknown arguments (None) are left out.

    `task`: of the run, or its environment. `parameters`: of the model.
    """
    complete = cfg.model_dump() | ({} if algo is None else {"algo": dict(algo.settings)})
    yield from diagnose_settings(complete, parameters)
    if algo is not None:
        for problem in risky_settings(cfg, algo):
            yield Diagnosis("risky_setting", problem.what, problem.remedy)
        for problem in (*unused_settings(cfg, algo, task), *unused_tokenizer(cfg.model)):
            yield Diagnosis("unused_setting", problem.what, problem.remedy)


def unused_settings(cfg: TrainConfig, algo: Algorithm, task: Task | None = None) -> Iterator[Problem]:
    """Settings that differ from their default and have no effect. The default of an algorithm setting is that of the
    recipe.
    """
    from assay.algos import complete_settings

    defaults = {key: field.get_default(call_default_factory=True) for key, field in keys(TrainConfig)}
    defaults |= {f"algo.{name}": value for name, value in complete_settings(cfg.algo.recipe)}
    own = {f"algo.{name}" for name in cfg.algo.model_fields_set}
    for reason, names in (*_unused_with_problems(cfg, task), *algo.unused(run_facts(cfg, algo))):
        for name in names:
            is_set = name in own or not name.startswith("algo.")
            if is_set and attrgetter(name)(cfg) != defaults[name]:
                yield Problem(f"{name} has no effect", reason)


def unused_tokenizer(cfg: ModelConfig) -> Iterator[Problem]:
    if cfg.tokenizer in PRESET_TOKENIZERS and cfg.source and not cfg.source.startswith(PRESET):
        names = " and ".join(map(repr, PRESET_TOKENIZERS))
        yield Problem(
            "model.tokenizer has no effect", f"{names} are for presets, and {cfg.source} has its own tokenizer"
        )


def risky_settings(cfg: TrainConfig, algo: Algorithm) -> Iterator[Problem]:
    """Settings that harm learning."""
    if cfg.sampling.truncates:
        yield Problem(
            "sampling is truncated (top_k, top_p, min_p or min_new_tokens)",
            "importance ratios are inexact; see sampling/kept_mass",
        )
    yield from map(Problem, algo.warnings(run_facts(cfg, algo)))


def run_facts(cfg: TrainConfig, algo: Algorithm) -> RunFacts:
    from assay.algos import RunFacts

    largest_batch = cfg.train.prompts + cfg.replay.groups
    updates = algo.update_count(largest_batch) * cfg.train.passes
    stale = cfg.replay.groups > 0 or (cfg.source.name == "async" and cfg.source.max_staleness > 0)
    # Recomputed log-probabilities are those of the policy before the update, whichever policy has sampled.
    stale_ratios = stale and not algo.needs.trainer_logprobs
    return RunFacts(episodes=bool(cfg.env.name), updates=updates, stale_ratios=stale_ratios)


def _unused_with_problems(cfg: TrainConfig, task: Task | None) -> Iterator[tuple[str, Sequence[str]]]:
    """Settings of an environment without one; reward settings, for an environment that computes all rewards itself."""
    if not cfg.env.name:
        yield "no environment is set (env.name)", [f"env.{name}" for name in EnvConfig.model_fields if name != "name"]
    if isinstance(task, Env) and not task.judged:
        of_pool = ("workers", "timeout_s")
        yield (
            f"all rewards come from {task.name} (an environment whose answers are judged sets judged = True)",
            [f"reward.{name}" for name in RewardConfig.model_fields if name not in of_pool],
        )


def check_judge(judge: Judging, prompt: Prompt) -> Verdict:
    """Raise if the judge fails on every answer. Returns the verdict on an empty answer."""
    texts = ("", prompt.answer, prompt.solution or prompt.answer)
    (verdicts,) = judge.judge_groups([(texts, prompt.answer, judge.fields(prompt))])
    check_verdicts(verdicts)
    return verdicts[0]


def data_problems(
    cfg: TrainConfig,
    train: Sequence[Prompt],
    evaluations: Mapping[str, Sequence[Prompt]],
    note: Callable[[str], None],
) -> Iterator[Diagnosis]:
    """Problems of an evaluation that are also in the train split, and repeated ids. `evaluations`: by label.

    `note` gets a line for each split that shares no problem with the train split.
    """
    for label, prompts in evaluations.items():
        if label in ("start", "after"):
            continue  # the same problems as "before"
        split, shared = cfg.eval.split_of(label), overlap(train, prompts)
        if shared.n_shared:
            yield explain_leakage(split, shared.n_shared, shared.n_eval, shared.examples[0])
        else:
            sample = " (a sample: the split is endless)" if shared.sampled else ""
            evaluated = plural(shared.n_eval, f"{split} problem")
            note(f"no overlap between {shared.n_train_checked:,} train{sample} and {evaluated}")
    splits = {cfg.eval.split_of(label): prompts for label, prompts in evaluations.items()}
    yield from repeated_ids(splits | {"train": train})


def repeated_ids(splits: Mapping[str, Sequence[Prompt]]) -> Iterator[Diagnosis]:
    """A cause if several problems of a split have the same id."""
    repeated, example = [], ""
    for name, prompts in splits.items():
        ids = Counter(() if isinstance(prompts, LazyPrompts) else (prompt.id for prompt in prompts))
        if ids.total() > len(ids):
            repeated.append(f"{ids.total() - len(ids)} of the {ids.total()} {name} problems")
            example = example or ids.most_common(1)[0][0]
    if repeated:
        yield Diagnosis(
            "repeated_ids",
            f"problems with the id of another problem: {' and '.join(repeated)} (e.g. {example!r:.80}); they share its "
            "running pass rate (algo.pass_rate_low, algo.pass_rate_high) and cannot be told apart in rollouts and "
            "evaluations",
            "give each problem its own id",
        )
