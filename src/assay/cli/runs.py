"""`assay runs`: list runs, show one, or compare several."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.cli.runs_compare import compare, picture_path
from assay.runs.console import Console, duration, fraction, one_line, percent
from assay.runs.directory import Run, access_problem, list_runs, unreadable_folders
from assay.runs.files import to_json
from assay.runs.reading import RunFiles, RunParts, describe, facts_of, setting
from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.types import UserError

HELP = """List runs, show one, or compare several.

  assay runs                 all runs
  assay runs NAME            one run
  assay runs compare A B     results, a paired test of the final answers, curves, and settings that differ
assay runs A B compares too, but draws no picture."""
COMPARE = "compare"
_UNKNOWN = "-"


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
    runs = [Run.open(find_run(split_tag(name.removeprefix(PREFIX))[0], args.dir)) for name in names]
    if args.plot:
        return plot(runs)
    facts = [describe_checked(runs[0])] if len(runs) == 1 else [describe_or_mark_damaged(run) for run in runs]
    if not args.json:
        print_results(facts)
        print_problems(facts)
    if len(runs) > 1 or args.json:
        compare(runs, facts, args.json, args.output or (picture_path(runs) if comparing else None))
    return 0


def list_all(args: argparse.Namespace) -> int:
    if args.plot or args.output:
        raise UserError("--plot needs the name of a run, and -o the names of several: assay runs NAME --plot")
    if problem := access_problem(args.dir):
        raise UserError(problem)
    facts = [describe_or_mark_damaged(run) for run in list_runs(args.dir)]
    for problem in unreadable_folders(args.dir):
        print(problem, file=sys.stderr)
    if args.json:
        print(json.dumps(to_json(facts), indent=2))
    elif not facts:
        print(f"No runs in {args.dir} yet: `assay train CONFIG` creates one.")
    else:
        headings = ["run", "state", "task", "model", "algorithm", "steps", "reward", "before", "after", "p", "time"]
        Console().table(f"Runs in {args.dir}", headings, [[cells(fact)[name] for name in headings] for fact in facts])
        for fact in facts:
            if fact["error"]:
                print(f"{fact['run']} failed: {fact['error']}")
        print_problems(facts)
    return 0


def plot(runs: Sequence[Run]) -> int:
    """Draw curves.png of the runs again, and print where it is."""
    from assay.runs.curves import draw_curves

    for run in runs:
        path = draw_curves(run.path)
        if path is None:
            raise UserError(f"{run.path} has no curves: there are no metrics yet, or matplotlib is not installed")
        print(path)
    return 0


def describe_checked(run: Run) -> dict[str, Any]:
    """`describe`, with a UserError if a file of the run has unexpected content."""
    try:
        facts = describe(run)
        cells(facts)
        return facts
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        raise UserError(f"{run.path} cannot be read as a run ({type(error).__name__}: {error})") from error


def describe_or_mark_damaged(run: Run) -> dict[str, Any]:
    """The facts of a run. Of a damaged one, those that can be read; `problems` says what cannot."""
    try:
        return {**describe_checked(run), "problems": []}
    except UserError as error:
        return describe_readable(run, str(error))


def describe_readable(run: Run, error: str) -> dict[str, Any]:
    """Facts from the files of a damaged run that can be read. Unreadable settings are None."""
    files = RunFiles(run.path)
    summary, status, environment = (files.document(f"{name}.json") for name in ("summary", "status", "environment"))
    parts = RunParts(run.state, files.config(), files.metrics(), summary, status, environment)
    problems = files.problems or [error]
    try:
        facts = facts_of(parts, run.name, str(run.path))
        cells(facts)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        facts = facts_of(RunParts(run.state), run.name, str(run.path))
        problems = [error]
    config = None if any(problem.startswith("config.toml") for problem in problems) else facts["config"]
    return {**facts, "config": config, "state": f"damaged ({run.state})", "problems": problems}


def cells(fact: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a run as cells of a table."""
    wall, p_value = fact["wall_s"], setting(fact["paired"], "p_value")
    return {
        "run": fact["run"],
        "state": fact["state"],
        "started": str(fact["started"] or _UNKNOWN),
        "task": shortened(str(fact["task"] or _UNKNOWN)),
        "model": shortened(str(fact["model"] or _UNKNOWN)),
        "algorithm": shortened(str(fact["algorithm"] or _UNKNOWN)),
        "seed": _UNKNOWN if fact["seed"] is None else str(fact["seed"]),
        "steps": progress(fact),
        "reward": _UNKNOWN if fact["reward"] is None else fraction(fact["reward"]),
        "before": accuracy(fact["before"]),
        "after": accuracy(fact["after"]),
        "p": _UNKNOWN if p_value is None else f"{p_value:.2g}",
        "gained / lost": gains(fact["paired"]),
        "time": _UNKNOWN if wall is None else duration(wall),
    }


def progress(fact: Mapping[str, Any]) -> str:
    """12/240; 12 (384/1000 answers) with a budget; warm start 30/600 before the first step."""
    planned, budget, warm_start = fact["steps_planned"], fact["budget"], fact["warm_start"]
    done, total = setting(warm_start, "step"), setting(warm_start, "steps")
    if done is not None and not fact["steps"] and (done < total or not planned):
        return f"warm start {done:.0f}/{total}"
    if budget:
        return f"{fact['steps']} ({fact['answers'] or 0:.0f}/{budget} answers)"
    return f"{fact['steps']}/{planned}" if planned else str(fact["steps"])


def accuracy(measured: Any) -> str:
    """52.1 % [48.0, 56.2]"""
    value, interval = setting(measured, "accuracy"), setting(measured, "ci95")
    if value is None:
        return _UNKNOWN
    return percent(value).replace(" ", "") + (
        f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else ""
    )


def gains(paired: Any) -> str:
    gained, lost = setting(paired, "gained"), setting(paired, "lost")
    return _UNKNOWN if gained is None or lost is None else f"+{gained} / -{lost}"


def shortened(text: str, limit: int = 32) -> str:
    return text if len(text) <= limit else "..." + text[3 - limit :]


def print_results(facts: Sequence[Mapping[str, Any]]) -> None:
    """The facts of the runs, one column per run."""
    columns = [cells(fact) for fact in facts]
    headings = ["", *(column["run"] for column in columns)]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0] if name != "run"]
    if any(fact["error"] for fact in facts):
        rows.insert(1, ["error", *(fact["error"] or _UNKNOWN for fact in facts)])
    Console().table("Results", headings, rows)


def print_problems(facts: Sequence[Mapping[str, Any]]) -> None:
    """Files of damaged runs that cannot be read."""
    for fact in facts:
        for problem in fact.get("problems", ()):
            print(one_line(f"{fact['run']}: {problem}"))
