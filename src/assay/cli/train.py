"""`assay train`: train a model as described by a config file, and evaluate it before and after."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import LoopConfig, TrainConfig
from assay.config.settings import load_settings, to_toml
from assay.runs.console import Console, asker, is_distributed, is_main, make_console, percent
from assay.runs.directory import as_name, read_metrics
from assay.runs.resolve import check_fixed, differences, run_settings
from assay.types import UserError, plural

if TYPE_CHECKING:
    from assay.training.run import TrainingRun

HELP = "Train a model by reinforcement learning, as described by a config file. Options override any of its settings."
SETTINGS = TrainConfig
HEADINGS = {"error": "no gain", "warning": "problem", "note": "note"}  # of causes, by severity
# Messages of gloo and NCCL after another process has ended.
LOST = re.compile(r"closed by peer|reset by peer|Broken pipe|Connection refused|timed out|NCCL|remote process", re.I)


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
    from assay.build.trust import extend_trust, guard_run
    from assay.runs import Run
    from assay.runs.files import write_text
    from assay.runs.resolve import find_run

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
        foreign = guard_run(before, path, typed=overrides, trust=args.trust, ask=asker())
        if foreign is not None:
            foreign.check_settings()
    console.announce(f"loading {cfg.model.source}")
    from assay.build.run import resume_run

    with Run.open(path, write=is_main()) as opened:
        resumed = resume_run(cfg, opened, console)
        if is_main():
            write_text(path / "config.toml", to_toml(resumed.cfg))
            extend_trust(before, resumed.cfg)
        return run_training(resumed, console)


def describe_finished(path: Path, before: LoopConfig, now: LoopConfig) -> str:
    """For a run that has no more steps to train: what it has done, and how to extend it. Empty for other runs, and if
    the last checkpoint is damaged: resuming repeats its steps.

    `before`, `now`: its settings as they were, and as they are with the options of this command.
    """
    from assay.runs import Run, checkpoints

    opened = Run.open(path)
    summary = opened.read_summary()
    if not summary or opened.state != "finished" or checkpoints.last_intact(path) != (summary.get("steps"), []):
        return ""
    name, steps = run_argument(path), int(summary.get("steps", 0))
    if not (now.steps or now.epochs or now.budget):
        return f"run {path.name} is finished: to train the model further, start a run with --model run:{name}@last"
    key = "budget" if now.budget else "epochs" if now.epochs else "steps"
    planned = getattr(now, key)
    if key == "epochs":  # whether there are more steps depends on the number of problems
        extended = now != before
    else:
        extended = summary.get("answers" if key == "budget" else "steps", 0) < planned
    if extended:
        return ""
    return (
        f"run {path.name} is finished ({plural(steps, 'step')}), and there is nothing to resume; "
        f"to train longer: assay train --resume {name} --train.{key} {planned * 2:g}"
    )


def run_argument(path: Path) -> str:
    """The name of a run in the default folder, or its path, as an argument for a shell."""
    return path.name if path.parent == Path("runs") else shlex.quote(str(path))


def run_training(training: TrainingRun, console: Console) -> int:
    from assay.runs.files import disk_error
    from assay.training.loop import train

    path = training.directory.path
    try:
        with training.active():
            summary = train(training)
    except KeyboardInterrupt as stop:
        console.stop()
        console.note(describe_stop(training))
        if is_distributed() and not getattr(stop, "at_once", True):
            # The launcher ends all processes when the first one exits: wait, so that they keep their exit codes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            training.mesh.close()
        raise
    except Exception as error:
        if is_lost_peer(error):
            raise UserError(
                f"rank {os.environ['RANK']} lost another process, which has ended or hangs ({str(error)[:200]}): "
                f"see the output of that process; resume with: assay train --resume {path}"
            ) from error
        problem = disk_error(error)
        if problem is None and isinstance(error, OSError):
            problem = f"reading or writing failed ({error})", "fix this"
        if isinstance(error, UserError) or problem is None:
            raise
        what, remedy = problem
        raise UserError(
            f"{what}: {remedy} and resume with: assay train --resume {path} (checkpoints are intact)"
        ) from error
    finally:
        console.stop()
    if summary:
        show(summary, path, console)
    training.mesh.close()
    if summary and every_update_skipped(read_metrics(path)):
        raise UserError(
            f"the run is complete, but every update was skipped, because the loss or the gradient was not finite; its "
            f"batches are saved in {path / 'skipped'}: lower optim.lr, set dtype = 'float32', or check custom weights, "
            "rewards, advantages or losses, and start a new run"
        )
    return 0


def every_update_skipped(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run has changed no weights because of values that were not finite. `rows`: its metrics."""
    updates, skipped, faults = (
        sum(row.get(f"optim/{name}", 0.0) for row in rows if "optim/updates" in row)
        for name in ("updates", "skipped", "non_finite")
    )
    return faults > 0 and skipped == updates


def describe_stop(training: TrainingRun) -> str:
    """What a stopped run has saved, and the command that resumes it."""
    from assay.runs import checkpoints
    from assay.runs.files import read_json

    path, total = training.directory.path, training.schedule.total_steps
    command = f"assay train --resume {run_argument(path)}"
    saved = checkpoints.last(path)
    if saved is None:
        return f"stopped before the first checkpoint; to start this run again from the beginning: {command}"
    sft_step = read_json(checkpoints.folder(path, saved) / "state.json").get("sft_step")
    where = f"step {sft_step} of {training.cfg.sft.steps} of the warm start" if sft_step else f"step {saved} of {total}"
    return f"stopped; saved after {where}; to resume from there: {command}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another process has ended."""
    return is_distributed() and isinstance(error, RuntimeError) and bool(LOST.search(str(error)))


def show(summary: dict[str, Any], path: Path, console: Console) -> None:
    """Print the results, the run's folder, and commands to try next."""
    rows = []
    start = summary.get("sft", {}).get("before")  # if the model was evaluated before its warm start
    measured = {"start": start, "before": summary["before"], "after": summary["after"]}
    for name, report in measured.items():
        if report is None:
            continue
        rows.append([name, *accuracy_cells(report), f"{report['mean_length']:.0f}"])
        rows += [
            [f"- {task}", *accuracy_cells(task_report), ""] for task, task_report in report.get("by_task", {}).items()
        ]
    steps = plural(summary["steps"] or summary.get("sft", {}).get("steps", 0), "step")
    title = f"{summary['task']}, {summary['split']} split, {summary['algorithm']}, {steps}"
    console.table(title, ["", "accuracy", "95 % interval", "problems", "tokens"], rows)
    if paired := summary["paired"]:
        gain = summary["after"]["accuracy"] - summary["before"]["accuracy"]
        console.note(
            f"{100 * gain:+.1f} points; {plural(paired['gained'], 'problem')} gained, {paired['lost']} lost, "
            f"paired p = {paired['p_value']:.2g}; {summary['wall_s']:.0f} s in total"
        )
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
