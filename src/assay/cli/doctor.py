"""`assay doctor`: what keeps a run from learning or harms it, or what is wrong with a config."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from os.path import isdir, isfile
from pathlib import Path

from assay.checks import Diagnosis
from assay.checks.diagnosis import diagnose_files
from assay.cli.report import find_folder
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs import Run
from assay.runs.directory import RunFiles
from assay.runs.files import to_json
from assay.types import UserError, plural

HELP = """Find out why a run does not learn, or what is wrong with a config before a run. Nothing is trained or changed.

  assay doctor my_run
  assay doctor configs/demo.toml --optim.lr 1e-5

The exit code is 1 if errors or warnings were found, the run has failed, or one of its files cannot be read. It is 0 if
there is nothing, or only notes.
Options override the settings of a config."""
SETTINGS = TrainConfig
UNLIMITED = 1_000_000  # in a pipe, each finding, example and remedy is one line
MAX_PROBLEMS = 10  # files that are named; the others are counted
LABELS = {"error": "ERROR", "warning": "WARNING", "note": "NOTE"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RUN|CONFIG", help="name or folder of a run, or a TOML file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    overrides = args.overrides
    path = Path(args.target).expanduser()
    error = ""  # with which the run has ended
    problems: list[str] = []  # files that cannot be read
    if isfile(path):  # False for a name that is too long for a path, as of a folder below
        cfg = load_settings(TrainConfig, path, overrides)
        from assay.build.dry_run import diagnose_config

        causes, what = diagnose_config(cfg), f"config {path}"
    else:
        runs_dir = Path(str(overrides.pop("runs_dir", TrainConfig().runs_dir)))
        if overrides:
            raise UserError(f"--{next(iter(overrides))} changes a setting, which is for a config: {path} is a run")
        if path.suffix == ".toml" and not isdir(path) and not isdir(runs_dir / path):
            raise UserError(f"there is no file {args.target}: give an existing config, or the name of a run")
        files = RunFiles(find_folder(args.target, runs_dir))
        causes = diagnose_files(files)
        status = files.document("status.json")
        what, error = describe(files), str(status.get("error") or "") if Run(files.path).state == "failed" else ""
        problems = files.problems
    if args.json:
        found = {"target": args.target, "error": error or None, "unreadable": problems}
        print(json.dumps(to_json({**found, "findings": [asdict(cause) for cause in causes]}), indent=2))
    else:
        for line in report(what, causes, error, problems):
            print(line)
    return int(bool(error or problems) or any(cause.severity != "note" for cause in causes))


def describe(files: RunFiles) -> str:
    """The run, with its state and the number of its steps."""
    run = Run(files.path)
    steps = max((row["step"] for row in files.metrics()), default=0)
    return f"run {run.name} ({run.state}, {plural(steps, 'step')})"


def report(what: str, causes: Sequence[Diagnosis], error: str = "", problems: Sequence[str] = ()) -> Iterator[str]:
    """Lines for a terminal or a pipe. `error`: with which the run has ended. `problems`: what cannot be read."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNLIMITED
    counts = [(severity, sum(cause.severity == severity for cause in causes)) for severity in LABELS]
    found = ", ".join(plural(count, severity) for severity, count in counts if count)
    nothing = "no problems found" + (" in what can be read" if problems else "")
    yield f"{what}: {found or ('ended with an error' if error else nothing)}"
    if error:
        yield from paragraph("ended with: ", error, width)
    for text in problems[:MAX_PROBLEMS]:
        yield from paragraph("not diagnosed: ", text, width)
    if len(problems) > MAX_PROBLEMS:
        yield f"  not diagnosed: {len(problems) - MAX_PROBLEMS} more files that cannot be read"
    for cause in causes:
        yield ""
        yield f"{LABELS[cause.severity]}  {cause.name}"
        yield from paragraph("found: ", cause.evidence, width)
        for text in cause.examples:
            yield from paragraph("e.g. ", text, width)
        yield from paragraph("to do: ", cause.remedy, width) if cause.remedy else ()


def paragraph(label: str, text: str, width: int) -> list[str]:
    indent = " " * (2 + len(label))
    wrapper = textwrap.TextWrapper(max(width, 40), f"  {label}", indent, break_on_hyphens=False)
    return wrapper.wrap(text) or [f"  {label}".rstrip()]
