"""`assay report`: a run as one HTML file."""

from __future__ import annotations

import argparse
from os.path import isdir
from pathlib import Path

from assay.cli.runs import add_runs_dir
from assay.runs.directory import access_problem
from assay.runs.files import atomic_write
from assay.runs.resolve import PREFIX, split_tag
from assay.types import UserError, unknown_name

HELP = """Write a run as one HTML file to send to others: summary, curves, findings, samples, settings.

The file needs no network and no other file, and has less than 3 MB. It contains prompts and answers of the run, its
settings, and the name of the machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name or path of the run")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write [RUN-report.html]")
    add_runs_dir(parser)


def run(args: argparse.Namespace) -> int:
    from assay.web.report import write_report

    folder = find_folder(args.run, args.dir)
    path = args.output or Path(f"{folder.resolve().name}-report.html")
    if path.is_dir():
        path = path / f"{folder.resolve().name}-report.html"
    text, shortened = write_report(folder)
    try:
        with atomic_write(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}): choose another file with -o FILE") from error
    note = "; samples were shortened to keep it small" if shortened else ""
    print(f"{path} ({len(text.encode()) / 1e6:.2f} MB{note})")
    return 0


def find_folder(name: str, runs_dir: Path, or_runs: bool = False) -> Path:
    """The folder of a run, also of a damaged one. `or_runs`: or a folder with runs."""
    from assay.web.folder import is_run_folder

    name = split_tag(name)[0].removeprefix(PREFIX) if name.startswith(PREFIX) else name
    candidates = [Path(name).expanduser(), runs_dir / name]
    # An unrelated folder here may have the same name as a run.
    found = [*filter(is_run_folder, reversed(candidates)), *(filter(isdir, candidates) if or_runs else ())]
    if found:
        return found[0]
    if problem := next(filter(None, map(access_problem, (*candidates, runs_dir))), None):
        raise UserError(problem)
    known = [path.name for path in sorted(runs_dir.iterdir()) if is_run_folder(path)] if isdir(runs_dir) else []
    what = "run or folder" if or_runs else "run"
    if not known:
        raise UserError(f"there is no {what} {name}, and {runs_dir} has no runs: give the path of a run, or --runs_dir")
    raise unknown_name(what, name, known, listed=known[-5:])
