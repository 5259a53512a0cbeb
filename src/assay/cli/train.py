"""Train a model by reinforcement learning, as described by a config file. Options override any of its settings."""

from __future__ import annotations

import argparse
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import CLUSTER_MEMBER, TrainConfig
from assay.config.settings import load_settings
from assay.runs.console import Console, finite, make_console, percent
from assay.runs.directory import RunFiles, as_name, free_name, setting
from assay.runs.resolve import (
    check_fixed,
    describe_finished,
    differences,
    find_run,
    resume_command,
    run_argument,
    run_settings,
)
from assay.types import UserError, plural

if TYPE_CHECKING:
    from assay.training.run import TrainingRun

SETTINGS = TrainConfig
LATEST, NOTABLE = 10, 0.05  # training steps, and the difference in accuracy, that are compared with an evaluation
HEADINGS = {"error": "no gain", "warning": "problem", "note": "note"}  # of causes, by severity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="TOML file, e.g. configs/demo.toml")
    parser.add_argument("--resume", metavar="RUN", help="resume this run (name or folder) from its last checkpoint")
    parser.add_argument(
        "--trust", action="store_true", help="with --resume: use code, files and hosts that the run's settings name"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything and estimate memory; train nothing")


def run(args: argparse.Namespace) -> int:
    with make_console() as console:
        warnings.showwarning = lambda message, *_: console.warn(str(message))
        if args.resume:
            return resume(args, args.overrides, console)
        if not args.config:
            raise UserError("no config: give a TOML file, e.g. assay train configs/demo.toml, or --resume RUN")
        cfg = load_settings(TrainConfig, args.config, args.overrides)
        cfg.name = cfg.name or as_name(Path(args.config).stem)
        if starts_cluster(cfg) and not args.dry_run:
            name = free_name(Path(cfg.runs_dir), cfg.name)
            if name != cfg.name:
                console.note(f"{cfg.name} exists: this run is {name}")
            return on_cluster(cfg, Path(cfg.runs_dir) / name, [args.config, f"--name={name}"], args, console)
        return start(cfg, console, args.dry_run)


def start(cfg: TrainConfig, console: Console, dry_run: bool = False) -> int:
    if cfg.model.source:
        console.announce(f"loading {cfg.model.source}")  # the imports below take seconds
    if dry_run:
        from assay.build.dry_run import dry_run as check

        for line in check(cfg, console):
            console.note(line)
        return 0
    from assay.build.run import new_run

    return run_training(new_run(cfg, console), console)


def resume(args: argparse.Namespace, overrides: dict[str, Any], console: Console) -> int:
    from assay.build.trust import guard_run

    runs_dir = Path(str(overrides.get("runs_dir", TrainConfig().runs_dir)))
    path = find_run(args.resume, runs_dir)
    before = run_settings(path)
    cfg = load_settings(TrainConfig, path / "config.toml", overrides)
    given = load_settings(TrainConfig, args.config, overrides) if args.config else cfg
    if "name" in overrides and overrides["name"] != path.resolve().name:
        raise UserError(f"--name cannot rename a run that is resumed: rename the folder {path}, or leave --name out")
    check_fixed(before, cfg.model_copy(update={"model": given.model}), path.name)
    if args.config and (others := differences(cfg, given)):
        raise UserError(
            f"{args.config} differs from the settings of run {path.name} in {', '.join(others[:5])}: "
            "resume without a config file, and change settings as options"
        )
    if finished := describe_finished(path, before.train, cfg.train):
        console.note(finished)
        return 0
    if not args.config:  # which the user has given, and which has the same settings
        guard_run(before, path, typed=overrides, trust=args.trust)
    if starts_cluster(cfg):
        return on_cluster(cfg, path, (), args, console)
    console.announce(f"loading {cfg.model.source}")
    from assay.build.run import reopened

    with reopened(path, before, cfg, console) as resumed:
        return run_training(resumed, console)


def starts_cluster(cfg: TrainConfig) -> bool:
    """Whether this process has to start the training processes on a cluster, instead of being one of them."""
    return cfg.cluster.kind == "ray" and not os.environ.get(CLUSTER_MEMBER)


def on_cluster(cfg: TrainConfig, path: Path, first: Sequence[str], args: argparse.Namespace, console: Console) -> int:
    """Train with processes that Ray starts. `path`: of the run. `first`: the arguments of their first command; none:
    they resume it.
    """
    from assay.checks.settings import check_settings

    check_settings(cfg)
    from assay.integrations.ray.learners import Commands, launch

    settings = [word for word in args.settings if word.partition("=")[0] != "--name"]
    again = ["--resume", str(path.resolve()), "--trust"]
    commands = Commands(["train", *(first or again), *settings], ["train", *again, *settings], path.resolve())
    return launch(cfg, commands, console.note)


def run_training(training: TrainingRun, console: Console) -> int:
    from assay.build.run import carried_out
    from assay.training.loop import train

    with carried_out(training, console, lambda run: resume_command(run.path)):
        if summary := train(training):
            show(summary, training.path, console)
    return 0


def show(summary: dict[str, Any], path: Path, console: Console) -> None:
    """Print the results, the run's folder, and commands to try next."""
    rows = []
    start = summary.get("sft", {}).get("before")  # if the model was evaluated before its warm start
    measured = {"start": start, "before": summary["before"], "after": summary["after"]}
    for name, report in measured.items():
        if report is None:
            continue
        rows.append([name, *accuracy_cells(report), f"{report['reward']:.3f}", f"{report['mean_length']:.0f}"])
        rows += [
            [f"- {task}", *accuracy_cells(task_report), "", ""]
            for task, task_report in report.get("by_task", {}).items()
        ]
    steps = plural(summary["steps"] or summary.get("sft", {}).get("steps", 0), "step")
    title = f"{summary['task']}, {summary['split']} split, {summary['algorithm']}, {steps}"
    console.table(title, ["", "accuracy", "95 % interval", "problems", "reward", "tokens"], rows)
    if paired := summary["paired"]:
        gain = summary["after"]["accuracy"] - summary["before"]["accuracy"]
        console.note(
            f"{100 * gain:+.1f} points; {plural(paired['gained'], 'problem')} gained, {paired['lost']} lost, "
            f"paired p = {paired['p_value']:.2g}; {summary['wall_s']:.0f} s in total"
        )
    if text := explain_sampling(summary, RunFiles(path)):
        console.note(text)
    console.note(f"saved in {path} (summary.json, curves.png, metrics.jsonl, ...)")
    causes = summary.get("diagnosis", [])
    show_causes(causes, console)
    if any(cause["severity"] == "error" or cause["name"] == "no_change" for cause in causes):
        return
    name = run_argument(path)
    models = f"run:{name}@0 run:{name}@last" if summary["steps"] else f"run:{name}@last"
    console.note("next commands to try:")
    for command in (
        f"runs {name}",
        f"chat {models}",
        f"eval {models} --eval.samples 8 --eval.temperature 1",
        f"export run:{name}@last {shlex.quote(f'{path.name}-model')}",
    ):
        console.note(f"  assay {command}")


def explain_sampling(summary: Mapping[str, Any], files: RunFiles) -> str:
    """Why greedy evaluations and the sampled answers of training differ in accuracy; empty if they do not."""
    config = files.config()
    rows = [row for row in files.readable_metrics() if finite(row, "reward/correct") is not None]
    greedy = setting(config, "eval.temperature") == 0
    if not rows or not greedy:
        return ""
    sampled = sum(row["reward/correct"] for row in rows[-LATEST:]) / len(rows[-LATEST:])
    if abs(sampled - summary["after"]["accuracy"]) < NOTABLE:
        return ""
    steps = plural(len(rows[-LATEST:]), "step")
    return (
        f"evaluations take the most likely tokens (eval.temperature = 0); of the answers that training sampled at "
        f"temperature {setting(config, 'sampling.temperature'):g} in its last {steps}, {percent(sampled)} are correct"
    )


def accuracy_cells(report: Mapping[str, Any]) -> list[str]:
    """Accuracy, interval and number of problems, of an evaluation or of one of its tasks."""
    low, high = report["ci95"]
    return [percent(report["accuracy"]), f"{100 * low:.1f} to {100 * high:.1f} %", str(report["n"])]


def show_causes(causes: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print what has kept the run from learning or harmed it, and what to change."""
    for cause in causes:
        console.note(f"{HEADINGS[cause['severity']]}: {cause['evidence']}")
        for text in cause["examples"]:
            console.note(f"  e.g. {text}")
        console.note(f"what to change: {cause['remedy']}")
