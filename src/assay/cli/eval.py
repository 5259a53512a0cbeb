"""`assay eval`: evaluate models on the same problems, with intervals and a paired test against the first model."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import MeasureConfig, TrainConfig
from assay.config.settings import load_settings, reset_alternatives
from assay.runs import checkpoints
from assay.runs.console import Console, asker, percent
from assay.runs.resolve import PREFIX, describe_changes, find_run, run_settings, saved_settings, split_tag
from assay.runs.resolve import SETTINGS as SETTINGS_FILE
from assay.types import Prompt, Status, UserError, plural

if TYPE_CHECKING:
    from assay.evals.report import Report
    from assay.tasks import Task
    from assay.types import Group

HELP = """Evaluate one or several models on the same problems.

For a checkpoint of a run (run:NAME@best), the run's task, environment, prompt and reward settings are used. With
--config, the settings of a training config are used instead. Options override them.
  assay eval Qwen/Qwen2.5-0.5B-Instruct --task gsm8k --task.path data/gsm8k
  assay eval Qwen/Qwen2.5-0.5B-Instruct --config configs/seeds/dr_grpo.toml
  assay eval run:demo@0 run:demo@last --eval.samples 8 --eval.temperature 1
With --engine openai, MODEL is the name of a model at an OpenAI-compatible endpoint (--openai.url URL)."""
SETTINGS = MeasureConfig
INHERITED = ("task", "env", "prompt", "reward", "judge", "eval")  # sections taken from a run or a config
NOT_INHERITED = ("judge.url", "judge.api_key_env")  # the settings of a run decide neither where a key goes nor which
KEPT = ("eval.max_new_tokens", "eval.stop", "model.max_length")  # inherited from the run even if the task is another
SELECTION = ("eval.final_split", "eval.final_examples")  # not inherited with --data, which evaluates the whole file
TRAINING_ONLY = {"every", "split", "examples"}  # settings of [eval] that are not used here
JSONL = "jsonl"  # the task that reads any file
CHECKED_TEXTS = 1_000  # problems that are checked for words unknown to the tokenizer
GENERATED = 500  # problems of an endless split, unless eval.final_examples is set


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder, hub id, GGUF file or run:NAME@STEP")
    parser.add_argument(
        "--data", metavar="FILE", help="file with the problems (JSONL, Parquet), e.g. of assay data prepare"
    )
    parser.add_argument(
        "--split", choices=("train", "validation", "test", "all"), help="split of the task [test; with --data: all]"
    )
    add_config(parser)
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON")
    parser.add_argument("--answers", metavar="FILE", help="write every answer and its verdict as JSONL")
    add_trust(parser)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE", help="use task, environment, prompt and judge of this training config"
    )


def add_trust(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trust", action="store_true", help="use code, files and hosts that the run's settings name")


def run(args: argparse.Namespace) -> int:
    cfg = settings_of(args)
    for file in (args.json, args.answers):
        check_new(file)
    with Console() as console:
        console.announce(f"loading {args.models[0]}")
        return evaluate_models(args, cfg, console)


def evaluate_models(args: argparse.Namespace, cfg: MeasureConfig, console: Console) -> int:
    from assay.build.problems import build_problems
    from assay.envs import Env
    from assay.evals.report import compare

    task = build_problems(cfg.task, cfg.env)
    if args.data and not task.has_all and cfg.eval.final_split == "all":
        cfg.eval.final_split = "test"  # a user's task may read the file in its own way
    prompts = problems(task, cfg)
    if cfg.eval.samples > 1 and cfg.eval.temperature == 0:
        console.warn(
            f"at temperature 0 all {cfg.eval.samples} samples of a problem are equal: "
            "set --eval.temperature, e.g. 1, or leave out --eval.samples"
        )
    try:
        reports = {model: measure(model, cfg, task, prompts, args.answers, console) for model in args.models}
    finally:
        if isinstance(task, Env):
            task.close()
    first = reports[args.models[0]]
    results: list[dict[str, Any]] = []
    for model, report in reports.items():
        task_name = " ".join(filter(None, (cfg.env.name, cfg.task.name)))
        entry = {"model": model, "task": task_name, "split": cfg.eval.final_split, **report.summary()}
        entry["settings"] = {"seed": cfg.seed, "path": cfg.task.path, **cfg.eval.model_dump(exclude=TRAINING_ONLY)}
        if report is not first:
            paired = compare(first, report)
            entry["paired"] = {"against": args.models[0], "p_value": paired.p_value}
            entry["paired"] |= {"gained": paired.gained, "lost": paired.lost}
        results.append(entry)
    show(results, console)
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def settings_of(args: argparse.Namespace) -> MeasureConfig:
    """The settings of --config or of the first model that is a run's checkpoint, then the options."""
    overrides = args.overrides
    other_task = {"task", "task.name"} & set(overrides)
    other_problems = other_task or {"env", "env.name"} & set(overrides)
    if args.data:
        if not Path(args.data).is_file():
            raise UserError(f"no file at {args.data}: --data takes a JSONL or Parquet file with one problem per row")
        overrides["task.path"] = args.data
        overrides.setdefault("eval.final_split", "all")
    if "eval.examples" in overrides:  # of the periodic evaluation in training; here there is only one
        overrides.setdefault("eval.final_examples", overrides["eval.examples"])
    if args.split:
        overrides["eval.final_split"] = args.split

    def is_used(key: str) -> bool:
        if other_problems:
            return key.startswith("prompt.") or key in KEPT  # prompts remain as in training
        return not (args.data and key in SELECTION)

    inherited = inherited_settings(args.models, overrides, args.trust, is_used, args.config)
    if args.data and not other_task and not reads_file(inherited.get("task.name"), args.data):
        inherited = {key: value for key, value in inherited.items() if not key.startswith("task.")}
        inherited["task.name"] = JSONL
    return load_settings(MeasureConfig, None, {**inherited, **overrides})


def reads_file(task: str | None, file: str) -> bool:
    """Whether an inherited task reads this file: jsonl reads any, other tasks the files prepared from their data."""
    from assay.tasks.sources import manifest_of

    manifest = manifest_of(file)
    return task == JSONL or (task == manifest.get("task", "") and manifest.get("source") != "generated")


def inherited_settings(
    models: Sequence[str],
    overrides: Mapping[str, Any],
    trust: bool,
    is_used: Callable[[str], bool],
    config: str | None = None,
) -> dict[str, Any]:
    """Settings of the `config` file, else of the first model that is a run's checkpoint, as dotted overrides; those
    whose key `is_used`, and whose section `overrides` do not replace.

    What the settings of a run name needs the user's consent: `trust`, or naming it in `overrides`. A config file that
    the user names is the user's own.
    """
    from assay.build.trust import guard_run

    if config is not None:
        return evaluation_settings(load_settings(TrainConfig, config, {}), overrides, is_used)
    for model in models:
        if model.startswith(PREFIX):
            name, _ = split_tag(model.removeprefix(PREFIX))
            folder = find_run(name, Path(str(overrides.get("runs_dir", TrainConfig().runs_dir))))
            cfg = run_settings(folder)
            warn_of_changes(cfg, folder)
            foreign = guard_run(cfg, folder, typed=overrides, trust=trust, ask=asker())
            values = evaluation_settings(cfg, overrides, lambda key: key not in NOT_INHERITED and is_used(key))
            if foreign is not None:
                foreign.check_settings(values)
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
            warnings.warn(f"{folder / SETTINGS_FILE}: {key} changed since step {last}: {change}", stacklevel=2)


def problems(task: Task, cfg: MeasureConfig) -> Sequence[Prompt]:
    from assay.build.problems import take
    from assay.tasks.base import UNLIMITED, prompts_of

    if cfg.prompt.few_shot and not cfg.prompt.few_shot_file and cfg.eval.final_split in ("train", "all"):
        raise UserError(
            "the few-shot examples would be among the evaluated problems: set prompt.few_shot_file, "
            "or evaluate the test split"
        )
    prompts = prompts_of(task, cfg.eval.final_split)
    count = cfg.eval.final_examples or (GENERATED if len(prompts) >= UNLIMITED else 0)
    return list(take(prompts, count, cfg.eval.final_split))


def measure(
    model: str, cfg: MeasureConfig, task: Task, prompts: Sequence[Prompt], answers: str | None, console: Console
) -> Report:
    from assay.build.models import build_collector, build_server
    from assay.build.problems import unknown_prompt_words
    from assay.evals.report import evaluate
    from assay.integrations.openai import OpenAIEngine
    from assay.rewards import JudgePanel
    from assay.rollout import sampling_params

    renderer, engine = build_server(model, cfg, task, console)
    for warning in unknown_prompt_words(cfg.eval.final_split, prompts[:CHECKED_TEXTS], renderer):
        console.warn(warning)
    params = sampling_params(cfg.eval, cfg.eval.samples)
    console.note(f"{model}: {plural(len(prompts), 'problem')} x {plural(params.n, 'sample')}")
    collector = build_collector(cfg, task, engine, renderer, progress=console.progress)
    with collector.judge:
        report, groups = evaluate(collector, prompts, params, cfg.seed)
    if answers:
        write_answers(Path(answers), model, groups)
    warn_of_failures(model, groups, console)
    if isinstance(engine, OpenAIEngine):
        console.note(f"{model}: {engine.usage}")
    if isinstance(collector.judge, JudgePanel):
        console.note(collector.judge.describe_usage())
    return report


def warn_of_failures(model: str, groups: Sequence[Group], console: Console) -> None:
    """Warn if answers could not be sampled or judged: they are not evidence against the model."""
    verdicts = [rollout.verdict for group in groups for rollout in group.rollouts if rollout.verdict is not None]
    failed = [verdict for verdict in verdicts if verdict.status in (Status.ERROR, Status.TIMEOUT)]
    if failed:
        what = f"{len(failed):,} of {plural(len(verdicts), 'answer')} failed and count as not correct"
        console.warn(f"{model}: {what}; the first: {failed[0].detail}")


def write_answers(file: Path, model: str, groups: Sequence[Group]) -> None:
    with file.open("a", encoding="utf-8") as out:
        for group in groups:
            for rollout in group.rollouts:
                verdict = rollout.verdict
                row: dict[str, Any] = {"model": model, "id": group.prompt.id, "question": group.prompt.question}
                row |= {"answer": group.prompt.answer, "completion": rollout.text, "length": rollout.length}
                row |= {"status": verdict and str(verdict.status), "parsed": verdict and verdict.parsed}
                out.write(json.dumps(row) + "\n")


def check_new(file: str | None) -> None:
    if file and Path(file).exists():
        raise UserError(f"{file} exists: choose another name, or remove it")
    if file and not Path(file).absolute().parent.is_dir():
        raise UserError(f"the folder {Path(file).absolute().parent} does not exist: create it first")


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
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
    problems = plural(results[0]["n"], "problem")
    console.table(f"{results[0]['task']}, {results[0]['split']} split, {problems}", columns, rows)
    for entry in results if samples > 1 else ():
        console.note(f"pass@k of {entry['model']}  {curve_of(entry)}")


def curve_of(entry: dict[str, Any]) -> str:
    """pass@k for every k, each with its interval."""
    bounds = entry["pass_at_k_ci95"]
    return "  ".join(
        f"{k}: {percent(value)} ({100 * bounds[k][0]:.1f} to {100 * bounds[k][1]:.1f})"
        for k, value in entry["pass_at_k"].items()
    )
