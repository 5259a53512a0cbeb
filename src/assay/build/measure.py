"""Evaluations without a run: their settings, the choice of problems, and several models on the same problems.

Also texts that are judged without a model: their settings, and what the judge gets from a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from assay.build.trust import guard_run
from assay.checks.steps import truncated_evaluation
from assay.config import JudgeConfig, MeasureConfig, RewardConfig, Section, TaskConfig, TrainConfig
from assay.config.settings import COMMAND_LINE, Caller, load_settings, reset_alternatives
from assay.rewards import JudgePanel
from assay.rewards.pool import Item
from assay.runs import checkpoints
from assay.runs.console import Console, percent
from assay.runs.resolve import PREFIX, SETTINGS, describe_changes, find_run, run_settings, saved_settings, split_tag
from assay.tasks import Task
from assay.tasks.base import UNLIMITED, prompts_of
from assay.tasks.sources import DataRow, is_text_or_number, manifest_of
from assay.types import Prompt, Status, UserError, plural

if TYPE_CHECKING:  # torch is imported when a model is loaded
    from assay.engine import BaseEngine
    from assay.evals import Report
    from assay.text import Renderer
    from assay.types import Group

INHERITED = ("task", "env", "prompt", "reward", "judge", "eval")  # sections taken from a run or a config
NOT_INHERITED = ("judge.url", "judge.api_key_env")  # the settings of a run decide neither where a key goes nor which
KEPT = ("eval.max_new_tokens", "eval.stop", "model.max_length")  # inherited from the run even if the task is another
SELECTION = ("eval.final_split", "eval.final_examples")  # not inherited with a file, which is evaluated whole
TRAINING_ONLY = {"every", "split", "examples"}  # settings of [eval] that are not used here
JSONL = "jsonl"  # the task that reads any file
CHECKED_TEXTS = 1_000  # problems that are checked for words unknown to the tokenizer
GENERATED = 500  # problems of an endless split, unless eval.final_examples is set

# Settings


def measure_settings(
    models: Sequence[str],
    overrides: Mapping[str, Any],
    *,
    data: str = "",
    config: str | Path | None = None,
    trust: bool = False,
    caller: Caller = COMMAND_LINE,
) -> MeasureConfig:
    """The settings of `config` or of the first model that is a run's checkpoint, then `overrides`.

    `data`: a file or folder with the problems, instead of those of the settings.
    """
    overrides = dict(overrides)
    other_task = {"task", "task.name"} & set(overrides)
    other_problems = other_task or {"env", "env.name"} & set(overrides)
    if data:
        overrides["task.path"] = data
        overrides.setdefault("eval.final_split", "all")
    if "eval.examples" in overrides:  # of the periodic evaluation in training; here there is only one
        overrides.setdefault("eval.final_examples", overrides["eval.examples"])

    def is_used(key: str) -> bool:
        if other_problems:
            return key.startswith("prompt.") or key in KEPT  # prompts remain as in training
        return not (data and key in SELECTION)

    inherited = inherited_settings(models, overrides, trust, is_used, config, caller)
    if data and not other_task and not reads_file(inherited.get("task.name"), data):
        inherited = {key: value for key, value in inherited.items() if not key.startswith("task.")}
        inherited["task.name"] = JSONL
    return load_settings(MeasureConfig, None, {**inherited, **overrides}, caller)


def reads_file(task: str | None, file: str) -> bool:
    """Whether an inherited task reads this file: jsonl reads any, other tasks the files prepared from their data."""
    manifest = manifest_of(file)
    return task == JSONL or (task == manifest.get("task", "") and manifest.get("source") != "generated")


def inherited_settings(
    models: Sequence[str],
    overrides: Mapping[str, Any],
    trust: bool,
    is_used: Callable[[str], bool],
    config: str | Path | None = None,
    caller: Caller = COMMAND_LINE,
) -> dict[str, Any]:
    """Settings of the `config` file, else of the first model that is a run's checkpoint, as dotted overrides; those
    whose key `is_used`, and whose section `overrides` do not replace.

    What the settings of a run name needs the user's consent: `trust`, or naming it in `overrides`. A config file that
    the user names is the user's own.
    """
    if config is not None:
        return evaluation_settings(load_settings(TrainConfig, config, {}), overrides, is_used)
    for model in models:
        if model.startswith(PREFIX):
            name, _ = split_tag(model.removeprefix(PREFIX))
            folder = find_run(name, Path(str(overrides.get("runs_dir", TrainConfig().runs_dir))))
            cfg = run_settings(folder)
            warn_of_changes(cfg, folder)
            values = evaluation_settings(cfg, overrides, lambda key: key not in NOT_INHERITED and is_used(key))
            allow = "--trust" if caller is COMMAND_LINE else "trust=True"
            guard_run(cfg, folder, typed=overrides, trust=trust, used=values, allow=allow)
            return values
    return {}


def evaluation_settings(
    cfg: TrainConfig, overrides: Mapping[str, Any], is_used: Callable[[str], bool]
) -> dict[str, Any]:
    """The settings of a training run that apply to an evaluation, as dotted overrides."""
    tree = cfg.model_dump()
    reset_alternatives(tree, overrides, type(cfg))
    for key in ("max_new_tokens", "stop"):
        tree["eval"][key] = tree["eval"][key] or tree["sampling"][key]
    sections = [section for section in INHERITED if section not in overrides]
    values = {f"{section}.{key}": value for section in sections for key, value in tree[section].items()}
    values |= {"seed": tree["seed"], "model.max_length": tree["model"]["max_length"]}
    return {key: value for key, value in values.items() if is_used(key)}


def warn_of_changes(cfg: TrainConfig, folder: Path) -> None:
    """Warn if inherited settings have changed since the last checkpoint."""
    last = checkpoints.last(folder)
    saved = None if last is None else saved_settings(folder, last)
    for key, change in describe_changes(saved, cfg).items() if saved else ():
        if key.partition(".")[0] in (*INHERITED, "sampling", "seed"):
            warnings.warn(f"{folder / SETTINGS}: {key} changed since step {last}: {change}", stacklevel=2)


# Measuring


@dataclass(frozen=True)
class Measured:
    """One model's answers to the problems."""

    model: str
    report: Report
    groups: Sequence[Group]
    entry: dict[str, Any]  # results and settings; with the paired test, unless it is the first model


def measure_models(
    models: Sequence[str],
    cfg: MeasureConfig,
    console: Console,
    *,
    data: str = "",
    loaded: Mapping[str, tuple[Renderer, BaseEngine]] | None = None,
    caller: Caller = COMMAND_LINE,
) -> Iterator[Measured]:
    """Evaluate models one after the other on the same problems. `data`: as in `measure_settings`.

    `loaded`: models that are loaded already, by name. Other models are loaded, and closed when they are measured.
    """
    from assay.build.models import build_server
    from assay.build.problems import build_problems
    from assay.envs import Env
    from assay.evals import compare

    task = build_problems(cfg.task, cfg.env)
    if data and not task.has_all and cfg.eval.final_split == "all":
        cfg.eval.final_split = "test"  # a user's task may read the file in its own way
    prompts = problems(task, cfg)
    if cfg.eval.samples > 1 and cfg.eval.temperature == 0:
        console.warn(
            f"at temperature 0 all {cfg.eval.samples} samples of a problem are equal: "
            f"set {caller.spelt('eval.temperature')}, e.g. 1, or leave out {caller.spelt('eval.samples')}"
        )
    first: Report | None = None
    try:
        for model in dict.fromkeys(models):
            known = (loaded or {}).get(model)
            renderer, engine = known or build_server(model, cfg, task, console)
            try:
                report, groups = measure(model, renderer, engine, cfg, task, prompts, console)
            finally:
                if known is None:
                    engine.close()
            entry = entry_of(model, cfg, report)
            if first is not None:
                paired = compare(first, report)
                entry["paired"] = {"against": models[0], "p_value": paired.p_value}
                entry["paired"] |= {"gained": paired.gained, "lost": paired.lost}
            first = first or report
            yield Measured(model, report, groups, entry)
    finally:
        if isinstance(task, Env):
            task.close()


def problems(task: Task, cfg: MeasureConfig) -> Sequence[Prompt]:
    from assay.build.problems import take

    if cfg.prompt.few_shot and not cfg.prompt.few_shot_file and cfg.eval.final_split in ("train", "all"):
        raise UserError(
            "the few-shot examples would be among the evaluated problems: set prompt.few_shot_file, "
            "or evaluate the test split"
        )
    prompts = prompts_of(task, cfg.eval.final_split)
    count = cfg.eval.final_examples or (GENERATED if len(prompts) >= UNLIMITED else 0)
    return list(take(prompts, count, cfg.eval.final_split))


def measure(
    model: str,
    renderer: Renderer,
    engine: BaseEngine,
    cfg: MeasureConfig,
    task: Task,
    prompts: Sequence[Prompt],
    console: Console,
) -> tuple[Report, list[Group]]:
    """Sample and judge the answers of one model."""
    from assay.build.models import build_collector
    from assay.build.problems import unknown_prompt_words
    from assay.evals import evaluate
    from assay.integrations.openai import OpenAIEngine
    from assay.rollout import sampling_params

    for warning in unknown_prompt_words(cfg.eval.final_split, prompts[:CHECKED_TEXTS], renderer):
        console.warn(warning)
    params = sampling_params(cfg.eval, cfg.eval.samples)
    console.note(f"{model}: {plural(len(prompts), 'problem')} x {plural(params.n, 'sample')}")
    collector = build_collector(cfg, task, engine, renderer, progress=console.progress)
    with collector.judge:
        report, groups = evaluate(collector, prompts, params, cfg.seed)
    warn_of_failures(model, groups, console)
    if cause := truncated_evaluation(report.truncated, params.max_new_tokens):
        console.warn(f"{model}: {cause}")
    if isinstance(engine, OpenAIEngine):
        console.note(f"{model}: {engine.usage}")
    if isinstance(collector.judge, JudgePanel):
        console.note(collector.judge.describe_usage())
    return report, groups


def warn_of_failures(model: str, groups: Sequence[Group], console: Console) -> None:
    """Warn if answers could not be sampled or judged: they are not evidence against the model."""
    verdicts = [rollout.verdict for group in groups for rollout in group.rollouts if rollout.verdict is not None]
    failed = [verdict for verdict in verdicts if verdict.status in (Status.ERROR, Status.TIMEOUT)]
    if failed:
        what = f"{len(failed):,} of {plural(len(verdicts), 'answer')} failed and count as not correct"
        console.warn(f"{model}: {what}; the first: {failed[0].detail}")


# Results


def entry_of(model: str, cfg: MeasureConfig, report: Report) -> dict[str, Any]:
    """The results of one model, with the settings that lead to them, as JSON values."""
    task = " ".join(filter(None, (cfg.env.name, cfg.task.name)))
    settings = {"seed": cfg.seed, "path": cfg.task.path, **cfg.eval.model_dump(exclude=TRAINING_ONLY)}
    return {
        "model": model,
        "task": task,
        "split": cfg.eval.final_split,
        **report.summary(),
        "settings": settings,
    }


def answer_rows(model: str, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Every answer and its verdict."""
    for group in groups:
        for rollout in group.rollouts:
            verdict = rollout.verdict
            row: dict[str, Any] = {"model": model, "id": group.prompt.id, "question": group.prompt.question}
            row |= {"answer": group.prompt.answer, "completion": rollout.text, "length": rollout.length}
            yield row | {"status": verdict and str(verdict.status), "parsed": verdict and verdict.parsed}


def result_table(results: Sequence[Mapping[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, headings and rows of a table of `entry_of` several models."""
    samples = results[0]["samples"]
    columns = ["model", "accuracy", "95 % interval", "format", "truncated", "tokens"]
    shown = [kind for kind in ("pass", "majority") if f"{kind}_at_k" in results[0]]
    columns += [f"{kind}@{samples}" for kind in shown]
    columns += ["vs. the first"] if len(results) > 1 else []
    rows = []
    for entry in results:
        low, high = entry["ci95"]
        row = [entry["model"], percent(entry["accuracy"]), f"{percent(low)} to {percent(high)}"]
        row += [percent(entry["format"]), percent(entry["truncated"]), f"{entry['mean_length']:.0f}"]
        row += [percent(entry[f"{kind}_at_k"][str(samples)]) if f"{kind}_at_k" in entry else "" for kind in shown]
        if len(results) > 1:
            paired = entry.get("paired")
            row.append(f"+{paired['gained']} -{paired['lost']}, p = {paired['p_value']:.2g}" if paired else "")
        rows.append(row)
        for task, task_entry in entry.get("by_task", {}).items():
            cells = [f"- {task}", percent(task_entry["accuracy"]), "{} to {}".format(*map(percent, task_entry["ci95"]))]
            rows.append([*cells, *[""] * (len(columns) - len(cells))])
    count = plural(results[0]["n"], "problem")
    return f"{results[0]['task']}, {results[0]['split']} split, {count}", columns, rows


# Texts that are judged without a model


class ScoreConfig(Section):
    """Settings of a judge."""

    task: TaskConfig = Field(default_factory=TaskConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)


def as_item(row: DataRow, task: Task | None, optional_gold: bool) -> Item:
    """The judge's input: the completion, the gold answer, and all other fields."""
    values = row.values
    if "completion" not in values and {"text", "prompt_id"} <= set(values):  # of a run's rollouts
        row = replace(row, values={**(values.get("fields") or {}), **values, "completion": values["text"]})
    completion = row.values.get("completion")
    if not isinstance(completion, str):
        problem = "is not a string" if "completion" in row.values else "is missing"
        raise UserError(f"{row.where}: the field 'completion' {problem}")
    gold = "" if optional_gold and not {"gold", "answer"} & set(row.values) else gold_answer(row, task)
    return completion, gold, {k: v for k, v in row.values.items() if k != "completion"}


def gold_answer(row: DataRow, task: Task | None) -> str:
    values: Mapping[str, Any] = row.values
    stated = values.get("gold", values.get("answer"))
    if task is not None and task.judge_kind == "countdown":
        missing = [name for name in ("nums", "target") if values.get(name) is None]
        if missing:
            raise UserError(f"{row.where}: the field '{missing[0]}' is missing; a countdown row needs nums and target")
        return str(values["target"])
    if task is not None and task.judge_kind == "code":
        if values.get("tests") is None:
            raise UserError(f"{row.where}: the field 'tests' is missing; a row of the task code needs tests")
        return ""
    if isinstance(stated, bool) or not (stated is None or is_text_or_number(stated)):
        kind = stated if isinstance(stated, float) else type(stated).__name__
        raise UserError(f"{row.where}: the gold answer must be a string or a number, not {kind}")
    if stated is None and (task is None or task.name != "math" or "solution" not in values):
        raise UserError(f"{row.where}: the row has neither 'gold' nor 'answer'")
    if task is None or (task.name == "gsm8k" and "####" not in str(stated)):
        return str(stated)  # already the bare answer
    try:
        return task.gold({**values, "answer": stated})
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
