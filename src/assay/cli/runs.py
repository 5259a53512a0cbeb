"""`assay runs`: list runs, or compare their results and settings."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from assay.runs.console import Console, duration
from assay.runs.directory import Run, list_runs
from assay.runs.files import read_json, to_json
from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.types import UserError

HELP = "List runs, or compare the results and settings of some."
_IGNORED_DIFFERENCES = ("name", "runs_dir")
_UNKNOWN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to compare, by name or path (default: list all)")
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_runs_dir(parser: argparse.ArgumentParser) -> None:
    text = "folder of the runs [runs]"
    parser.add_argument("--runs_dir", "--dir", dest="dir", type=Path, default=Path("runs"), help=text)


def run(args: argparse.Namespace) -> int:
    if args.names:
        runs = [Run.open(find_run(split_tag(name.removeprefix(PREFIX))[0], args.dir)) for name in args.names]
    else:
        runs = list_runs(args.dir)
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
        headings = ["run", "state", "task", "model", "algorithm", "steps", "before", "after", "p", "time"]
        Console().table(f"Runs in {args.dir}", headings, [[cells(fact)[name] for name in headings] for fact in facts])
    return 0


def describe(run: Run) -> dict[str, Any]:
    """Facts about a run: from its summary, or from its config and metrics if it has none yet."""
    summary = run.read_summary()
    config = read_config(run)
    rows = run.read_metrics()
    facts = {
        "run": run.name,
        "path": str(run.path),
        "state": run.state,
        "started": read_json(run.path / "environment.json").get("started"),
        "task": summary.get("task") or lookup(config, "task", "name"),
        "model": summary.get("model") or lookup(config, "model", "source"),
        "algorithm": summary.get("algorithm") or lookup(config, "algo", "recipe"),
        "seed": summary.get("seed", lookup(config, "seed")),
        "steps": max((row["step"] for row in rows), default=summary.get("steps", 0)),
        "steps_planned": lookup(config, "train", "steps"),
        "wall_s": summary.get("wall_s", measured_time(run)),
        "config": config,
    }
    return facts | {key: summary.get(key) for key in ("before", "after", "paired", "tokens")}


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
        known = dict.fromkeys(("started", "task", "model", "algorithm", "seed", "steps_planned", "wall_s"))
        known |= dict.fromkeys(("before", "after", "paired", "tokens"))
        return {**known, "run": run.name, "path": str(run.path), "state": f"damaged: {error}", "steps": 0, "config": {}}


def read_config(run: Run) -> dict[str, Any]:
    try:
        return tomllib.loads(run.config_toml)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{run.path / 'config.toml'} is not valid TOML ({error}): fix it or delete the run") from error


def lookup(tree: Any, *keys: str) -> Any:
    """A nested value of the config, or None if it does not exist."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def measured_time(run: Run) -> float | None:
    """Seconds from the start to the last metrics, for a run without a summary."""
    started = read_json(run.path / "environment.json").get("started")
    metrics = run.path / "metrics.jsonl"
    if not started or not metrics.is_file():
        return None
    return max(metrics.stat().st_mtime - datetime.fromisoformat(started).timestamp(), 0.0)


def cells(fact: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a run as cells of a table."""
    planned, wall, p_value = fact["steps_planned"], fact["wall_s"], lookup(fact["paired"], "p_value")
    return {
        "run": fact["run"],
        "state": fact["state"],
        "started": str(fact["started"] or _UNKNOWN),
        "task": shortened(str(fact["task"] or _UNKNOWN)),
        "model": shortened(str(fact["model"] or _UNKNOWN)),
        "algorithm": shortened(str(fact["algorithm"] or _UNKNOWN)),
        "seed": _UNKNOWN if fact["seed"] is None else str(fact["seed"]),
        "steps": f"{fact['steps']}/{planned}" if planned else str(fact["steps"]),
        "before": accuracy(fact["before"]),
        "after": accuracy(fact["after"]),
        "p": _UNKNOWN if p_value is None else f"{p_value:.2g}",
        "gained / lost": gains(fact["paired"]),
        "time": _UNKNOWN if wall is None else duration(wall),
    }


def accuracy(measured: Any) -> str:
    """52.1 % [48.0, 56.2]"""
    value, interval = lookup(measured, "accuracy"), lookup(measured, "ci95")
    if value is None:
        return _UNKNOWN
    return f"{value:.1%}" + (f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else "")


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
    console.table("Results", headings, rows)
    if differences:
        print()
        shown = [
            [key, *(_UNKNOWN if value is None else str(value) for value in row)] for key, row in differences.items()
        ]
        console.table("Settings that differ", headings, shown)
    elif len(facts) > 1:
        print("\nThe settings are equal.")
