"""List runs, show one, or compare several.

  assay runs                 all runs
  assay runs NAME            one run
  assay runs compare A B     results, a paired test of the final answers, curves, and settings that differ
assay runs A B compares too, but draws no picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.api.inspection import Comparison, cells, describe
from assay.runs.console import Console, one_line
from assay.runs.directory import access_problem, list_runs, unreadable_folders
from assay.runs.files import print_json, reported
from assay.runs.metrics import draw_comparison, draw_curves
from assay.runs.resolve import PREFIX, find_run, resume_command, split_tag
from assay.types import UserError
from assay.web.folder import RunFolder

COMPARE = "compare"
MAX_NAME = 120  # characters of the file name of the picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "runs by name or path (default: list all); compare A B [C...]: compare each with the first one"
    parser.add_argument("names", nargs="*", metavar="NAME", help=text)
    add_runs_dir(parser)
    text = "compare: picture of the curves [compare-A-B.png beside the first run]"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", action="store_true", help="draw curves.png of the named runs again")


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    text = "folder of the runs [runs]"
    parser.add_argument("--runs_dir", "--dir", dest="dir", type=Path, default=Path("runs"), help=text)


def run(args: argparse.Namespace) -> int:
    if not args.names:
        return list_all(args)
    comparing = args.names[0] == COMPARE and (len(args.names) > 1 or not (args.dir / COMPARE).is_dir())
    names = args.names[1:] if comparing else args.names
    if len(names) < 2 and (comparing or args.output):
        raise UserError("a comparison needs at least two runs: assay runs compare A B")
    runs = [find_run(split_tag(name.removeprefix(PREFIX))[0], args.dir) for name in names]
    if args.plot:
        return plot(runs)
    comparison = Comparison(runs)
    facts = comparison.results
    if len(runs) == 1 and (problems := facts[0]["problems"]):
        raise UserError(f"{runs[0]} cannot be read as a run: {problems[0]}")
    if not args.json:
        Console().table(*comparison.results_table())
        print_advice(facts)
    if len(runs) > 1 or args.json:
        compare(comparison, args.json, args.output or (picture_path(runs) if comparing else None))
    return 0


def list_all(args: argparse.Namespace) -> int:
    if args.plot or args.output:
        raise UserError("--plot needs the name of a run, and -o the names of several: assay runs NAME --plot")
    if problem := access_problem(args.dir):
        raise UserError(problem)
    facts = [describe(RunFolder(run.path)) for run in list_runs(args.dir)]
    for problem in unreadable_folders(args.dir):
        print(problem, file=sys.stderr)
    if args.json:
        print_json(facts)
    elif not facts:
        print(f"No runs in {args.dir} yet: `assay train CONFIG` creates one.")
    else:
        headings = ["run", "state", "task", "model", "algorithm", "steps", "reward", "before", "after", "p", "time"]
        Console().table(f"Runs in {args.dir}", headings, [[cells(fact)[name] for name in headings] for fact in facts])
        for fact in facts:
            if fact["error"]:
                print(f"{fact['run']} failed: {fact['error']}")
        print_advice(facts)
    return 0


def plot(runs: Sequence[Path]) -> int:
    """Draw curves.png of the runs again, and print where it is."""
    for run in runs:
        path = draw_curves(run)
        if path is None:
            raise UserError(f"{run} has no curves: there are no metrics yet, or matplotlib is not installed")
        print(path)
    return 0


def print_advice(facts: Sequence[Mapping[str, Any]]) -> None:
    """How to resume runs that were stopped or killed, and the files of damaged runs that cannot be read."""
    for fact in facts:
        if fact["state"] in ("interrupted", "stopped"):
            print(f"{fact['run']} was {fact['state']}; to resume it: {resume_command(Path(fact['path']))}")

    for fact in facts:
        for problem in fact.get("problems", ()):
            print(one_line(f"{fact['run']}: {problem}"))


def compare(comparison: Comparison, as_json: bool, picture: Path | None) -> None:
    """Print the comparison. `picture`: where the curves are drawn; None for nowhere."""
    drawn = None
    if picture:
        with reported(picture, "choose another file with -o FILE"):
            drawn = draw_comparison(comparison.metrics, picture)
    if as_json:
        print_json({**comparison.to_dict(), "curves": drawn and str(drawn)})
        return
    console = Console()
    for (title, headings, rows), notes in comparison.sections()[1:]:  # the results are printed already
        notes = [*notes]
        if rows or notes:
            print()
        if rows:
            console.table(title, headings, rows)
        for note in notes:
            print(one_line(note))
    if drawn:
        print(f"\nPicture of the curves: {drawn}")
    elif picture:
        print("\nNo picture of the curves: there are no metrics, or matplotlib is not installed.")


def picture_path(runs: Sequence[Path]) -> Path:
    """Where curves are drawn if the user does not say: beside the first run."""
    first, *others = [run.resolve() for run in runs]
    joined = "-".join(run.name for run in (first, *others))
    name = joined if len(joined) <= MAX_NAME else f"{first.name[:MAX_NAME]}-and-{len(others)}-more"
    return first.parent / f"compare-{name}.png"
