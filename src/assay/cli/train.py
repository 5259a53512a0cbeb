"""`assay train`: from a config file to a trained, measured model."""

from __future__ import annotations

import argparse
import os
import signal
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.cli.common import asker, is_main, lost_another, make_console, many
from assay.config import TrainConfig
from assay.config.settings import load_settings, parse_overrides, to_toml
from assay.runs.console import Console
from assay.runs.directory import as_name
from assay.runs.resolve import check_fixed, differences, run_settings
from assay.types import UserError

if TYPE_CHECKING:
    from assay.train.run import TrainingRun

HELP = "Reinforce a model on a task, as a config file says. Every setting can be changed on the command line."
SETTINGS = TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="TOML file, e.g. configs/demo.toml")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run (name or folder) from its last checkpoint")
    parser.add_argument("--trust", action="store_true", help="with --resume: import code that the run's settings name")
    parser.add_argument("--dry-run", action="store_true", help="check everything and estimate memory; train nothing")


def run(args: argparse.Namespace) -> int:
    overrides = parse_overrides(args.overrides)
    console = make_console()
    warnings.showwarning = lambda message, *_: console.warn(str(message))
    if args.resume:
        return resume(args, overrides, console)
    if not args.config:
        raise UserError("no config: give a TOML file, e.g. assay train configs/demo.toml, or --resume RUN")
    cfg = load_settings(TrainConfig, args.config, overrides)
    cfg.name = cfg.name or as_name(Path(args.config).stem)
    return start(cfg, console, args.dry_run)


def start(cfg: TrainConfig, console: Console, dry_run: bool = False) -> int:
    if dry_run:
        from assay.train.dry_run import dry_run as check

        for line in check(cfg, console):
            console.note(line)
        return 0
    from assay.train.build import new_run

    return go(new_run(cfg, console), console)


def resume(args: argparse.Namespace, overrides: dict[str, Any], console: Console) -> int:
    from assay.runs import Run
    from assay.runs.files import write_text
    from assay.runs.resolve import find_run
    from assay.train.build import resume_run
    from assay.train.trust import code_settings, guard_run, strings

    runs_dir = Path(str(overrides.get("runs_dir", TrainConfig().runs_dir)))
    path = find_run(args.resume, runs_dir)
    before = run_settings(path)
    cfg = load_settings(TrainConfig, path / "config.toml", overrides)
    asked = load_settings(TrainConfig, args.config, overrides) if args.config else cfg
    if "name" in overrides and overrides["name"] != path.resolve().name:
        raise UserError(f"--name cannot rename a run that is resumed: rename the folder {path}, or leave --name out")
    check_fixed(before, cfg.model_copy(update={"model": asked.model}), path.name)
    if args.config and (others := differences(cfg, asked)):
        raise UserError(
            f"{args.config} differs from what run {path.name} was started with in {', '.join(others[:5])}: "
            "resume without a config file, and change settings as options"
        )
    named = [overrides, *([code_settings(asked)] if args.config else [])]  # by the user, in this very command
    foreign = guard_run(before, path, typed=strings(named), trust=args.trust, ask=asker())
    if foreign is not None:
        foreign.check_remote_code()
    with Run.open(path, write=is_main()) as opened:
        resumed = resume_run(cfg, opened, console)
        if is_main():
            write_text(path / "config.toml", to_toml(cfg))
        return go(resumed, console)


def go(training: TrainingRun, console: Console) -> int:
    from assay.runs import checkpoints
    from assay.runs.files import disk_error
    from assay.train.loop import train

    path = training.directory.path
    try:
        with training.active():
            summary = train(training)
    except KeyboardInterrupt as stop:
        console.stop()
        saved = checkpoints.last(path)
        where = "before the first checkpoint" if saved is None else f"with a checkpoint of step {saved}"
        console.note(f"stopped {where}; go on with: assay train --resume {path}")
        if many() and not getattr(stop, "at_once", True):
            # The first process to end takes the others with it: by then they are done, and keep their own exit codes.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            training.mesh.close()
        raise
    except Exception as error:
        if lost_another(error):
            raise UserError(
                f"rank {os.environ['RANK']} lost another process, which has ended or hangs ({str(error)[:200]}): "
                f"see what that one said; go on with: assay train --resume {path}"
            ) from error
        found = disk_error(error)
        if found is None and isinstance(error, OSError):
            found = f"reading or writing failed ({error})", "see to it"
        if isinstance(error, UserError) or found is None:
            raise
        what, remedy = found
        raise UserError(
            f"{what}: {remedy} and go on with: assay train --resume {path} (checkpoints are intact)"
        ) from error
    finally:
        console.stop()
    if summary:
        show(summary, path, console)
    training.mesh.close()
    return 0


def show(summary: dict[str, Any], path: Path, console: Console) -> None:
    """The closing table, where the run lies, and what to try next."""
    rows = []
    start = summary.get("sft", {}).get("before")  # of a model that was measured before its warm start too
    measured = {"start": start, "before": summary["before"], "after": summary["after"]}
    for name, found in measured.items():
        if found is None:
            continue
        low, high = found["ci95"]
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        rows.append([name, f"{100 * found['accuracy']:.1f} %", interval, found["n"], f"{found['mean_length']:.0f}"])
    title = f"{summary['task']}, {summary['split']} split, {summary['algorithm']}, {summary['steps']} steps"
    console.table(title, ["", "accuracy", "95 % interval", "problems", "tokens"], rows)
    if paired := summary["paired"]:
        gain = summary["after"]["accuracy"] - summary["before"]["accuracy"]
        console.note(
            f"{100 * gain:+.1f} points; {paired['gained']} problems gained, {paired['lost']} lost, "
            f"paired p = {paired['p_value']:.2g}; {summary['wall_s']:.0f} s in all"
        )
    console.note(f"the run lies in {path} (summary.json, curves.png, metrics.jsonl, ...)")
    name = path.name if path.parent == Path("runs") else str(path)
    models = f"run:{name}@0 run:{name}@last" if summary["steps"] else f"run:{name}@last"
    console.note("what to try next:")
    for command in (f"chat {models}", f"eval {models} --eval.samples 8 --eval.temperature 1", "runs"):
        console.note(f"  assay {command}")
    console.note(f"  assay export run:{name}@last FOLDER")
