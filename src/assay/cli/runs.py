"""`assay runs`: list runs, or compare their results and settings."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.runs.console import Console, duration, fraction, percent
from assay.runs.directory import Run, list_runs
from assay.runs.facts import describe, lookup
from assay.runs.files import to_json
from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.types import UserError

HELP = "List runs, or compare the results and settings of some."
_IGNORED_DIFFERENCES = ("name", "runs_dir")
_UNKNOWN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to compare, by name or path (default: list all)")
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", action="store_true", help="draw curves.png of the named runs again")


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    text = "folder of the runs [runs]"
    parser.add_argument("--runs_dir", "--dir", dest="dir", type=Path, default=Path("runs"), help=text)


def run(args: argparse.Namespace) -> int:
    if args.names:
        runs = [Run.open(find_run(split_tag(name.removeprefix(PREFIX))[0], args.dir)) for name in args.names]
    else:
        runs = list_runs(args.dir)
    if args.plot:
        return plot(runs if args.names else [])
    facts = [describe_checked(run) if args.names else describe_or_mark_damaged(run) for run in runs]
    differences = config_differences(facts) if args.names else {}
    if args.json:
        shown = {"runs": facts, "differences": differences} if args.names else facts
        print(json.dumps(to_json(shown), indent=2))
    elif not runs:
        print(f"No runs in {args.dir} yet: `assay train CONFIG` creates one.")
    elif args.names:
        print_comparison(facts, differences)
    else:
        headings = ["run", "state", "task", "model", "algorithm", "steps", "reward", "before", "after", "p", "time"]
        Console().table(f"Runs in {args.dir}", headings, [[cells(fact)[name] for name in headings] for fact in facts])
        for fact in facts:
            if fact["error"]:
                print(f"{fact['run']} failed: {fact['error']}")
    return 0


def plot(runs: Sequence[Run]) -> int:
    """Draw curves.png of the runs again, and print where it is."""
    from assay.runs.curves import draw_curves

    if not runs:
        raise UserError("--plot needs the name of a run: assay runs NAME --plot")
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
    """A damaged run is listed as such, so that the other runs are still shown."""
    try:
        return describe_checked(run)
    except UserError as error:
        known = dict.fromkeys(("started", "task", "model", "algorithm", "seed", "steps_planned", "wall_s", "error"))
        known |= dict.fromkeys(("before", "after", "paired", "tokens", "warm_start", "answers", "budget", "reward"))
        return {**known, "run": run.name, "path": str(run.path), "state": f"damaged: {error}", "steps": 0, "config": {}}


def cells(fact: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a run as cells of a table."""
    wall, p_value = fact["wall_s"], lookup(fact["paired"], "p_value")
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
    done, total = lookup(warm_start, "step"), lookup(warm_start, "steps")
    if done is not None and not fact["steps"] and (done < total or not planned):
        return f"warm start {done:.0f}/{total}"
    if budget:
        return f"{fact['steps']} ({fact['answers'] or 0:.0f}/{budget} answers)"
    return f"{fact['steps']}/{planned}" if planned else str(fact["steps"])


def accuracy(measured: Any) -> str:
    """52.1 % [48.0, 56.2]"""
    value, interval = lookup(measured, "accuracy"), lookup(measured, "ci95")
    if value is None:
        return _UNKNOWN
    return percent(value).replace(" ", "") + (
        f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else ""
    )


def gains(paired: Any) -> str:
    gained, lost = lookup(paired, "gained"), lookup(paired, "lost")
    return _UNKNOWN if gained is None or lost is None else f"+{gained} / -{lost}"


def shortened(text: str, limit: int = 32) -> str:
    return text if len(text) <= limit else "..." + text[3 - limit :]


def config_differences(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted keys whose values differ between runs, with the value of each run (None: not set)."""
    flat = [flattened(fact["config"]) for fact in facts]
    keys = sorted({key for config in flat for key in config} - set(_IGNORED_DIFFERENCES))
    values = {key: [config.get(key) for config in flat] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def print_comparison(facts: Sequence[Mapping[str, Any]], differences: Mapping[str, Sequence[Any]]) -> None:
    console = Console()
    columns = [cells(fact) for fact in facts]
    headings = ["", *(column["run"] for column in columns)]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0] if name != "run"]
    if any(fact["error"] for fact in facts):
        rows.insert(1, ["error", *(fact["error"] or _UNKNOWN for fact in facts)])
    console.table("Results", headings, rows)
    if differences:
        print()
        shown = [
            [key, *(_UNKNOWN if value is None else str(value) for value in row)] for key, row in differences.items()
        ]
        console.table("Settings that differ", headings, shown)
    elif len(facts) > 1:
        print("\nThe settings are equal.")
