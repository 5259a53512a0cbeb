"""`assay runs compare`: results, final answers, curves and settings of several runs, side by side."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from assay.evals.pairs import compare_evaluations
from assay.runs.console import Console, one_line
from assay.runs.curves import draw_comparison, points_of, shown_panels
from assay.runs.directory import Run
from assay.runs.files import to_json
from assay.runs.reading import RunFiles, flattened
from assay.runs.rollouts import read_lines
from assay.types import UserError, plural

UNKNOWN = "-"
MAX_NAME = 120  # characters of the file name of the picture
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 16  # characters of a curve
FINAL_FILE = re.compile(r"step-(\d+)-(after-.+)\.jsonl")
IGNORED_SETTINGS = ("name", "runs_dir")
Rows = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


def compare(runs: Sequence[Run], facts: Sequence[dict[str, Any]], as_json: bool, picture: Path | None) -> None:
    """Print the comparison. `picture`: where the curves are drawn; None for nowhere."""
    names = labels(runs)
    finals = final_comparisons(runs, names)
    differences = config_differences(facts)
    metrics = {name: RunFiles(run.path).metrics() for name, run in zip(names, runs, strict=True)}
    drawn = draw(metrics, picture) if picture else None
    if as_json:
        content = {"runs": facts, "differences": differences, "final": finals, "curves": drawn and str(drawn)}
        print(json.dumps(to_json(content), indent=2))
        return
    console = Console()
    for title, rows in (
        ("Final answers", [final_cells(one) for one in finals]),
        ("Curves: first and last value", curve_cells(metrics)),
        ("Settings that differ", [[key, *map(setting, row)] for key, row in differences.items()]),
    ):
        if rows:
            headings = FINAL_HEADINGS if title == "Final answers" else ["", *names]
            print()
            console.table(title, headings, rows)
        if title == "Final answers":
            print_notes(finals)
    known = [fact for fact in facts if fact["config"] is not None]
    for name, fact in zip(names, facts, strict=True):
        if fact["config"] is None:
            print(f"\nThe settings of {name} are not compared: its config.toml cannot be read.")
    if not differences and len(known) > 1:
        print("\nThe settings are equal." if len(known) == len(facts) else "The other settings are equal.")
    if drawn:
        print(f"\nPicture of the curves: {drawn}")
    elif picture:
        print("\nNo picture of the curves: there are no metrics, or matplotlib is not installed.")


def labels(runs: Sequence[Run]) -> list[str]:
    """The names of the runs; the paths of those that share a name, numbered if a run is given twice."""
    shared = Counter(run.name for run in runs)
    names = [run.name if shared[run.name] == 1 else str(run.path) for run in runs]
    return [f"{name} ({names[:index].count(name) + 1})" if names[:index].count(name) else name
            for index, name in enumerate(names)]  # fmt: skip


# Final answers

FINAL_HEADINGS = ["B compared with A", "questions", "A", "B", "B - A in points [95 % interval]", "gained / lost", "p"]


def final_comparisons(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Each run compared with the first one on the answers after training; `problem` says why it is impossible."""
    read = [final_lines(run, name) for run, name in zip(runs, names, strict=True)]
    return [final_comparison(names[0], name, read[0], own) for name, own in zip(names[1:], read[1:], strict=True)]


def final_comparison(a: str, b: str, lines_a: list[Any] | str, lines_b: list[Any] | str) -> dict[str, Any]:
    problem, result = None, None
    if isinstance(lines_a, str) or isinstance(lines_b, str):
        problem = "; ".join(lines for lines in (lines_a, lines_b) if isinstance(lines, str))
    else:
        try:
            result = compare_evaluations(lines_a, lines_b)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            problem = f"the final answers cannot be compared ({type(error).__name__}: {error})"
    known = {"paired": result.paired, **asdict(result)} if result else {}
    return {"a": a, "b": b, "problem": problem, **known}


def final_lines(run: Run, name: str) -> list[dict[str, Any]] | str:
    """The lines of the evaluation after training; a string says why there are none."""
    names = [FINAL_FILE.fullmatch(path.name) for path in (run.path / "evals").glob("step-*-after-*.jsonl")]
    latest = max((match for match in names if match), key=lambda match: int(match[1]), default=None)
    if latest is None:
        return f"{name} ({run.state}) has no evaluation after training"
    try:
        return read_lines(run.path, int(latest[1]), "eval", latest[2]) or f"{name}: {latest[0]} is empty"
    except (UserError, OSError, AttributeError, TypeError) as error:
        return f"{name}: {error}"


def final_cells(final: Mapping[str, Any]) -> list[str]:
    runs = f"{final['b']} with {final['a']}"
    if final["problem"]:
        return [runs, *[UNKNOWN] * (len(FINAL_HEADINGS) - 1)]
    low, high = final["ci95"]
    p_value, paired = final["p_value"], final["paired"]
    return [
        runs,
        str(final["questions"]) if paired else f"{final['only_a']} and {final['only_b']}",
        f"{100 * final['accuracy_a']:.1f} %",
        f"{100 * final['accuracy_b']:.1f} %",
        f"{100 * final['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]",
        f"+{len(final['gained'])} / -{len(final['lost'])}" if paired else UNKNOWN,
        UNKNOWN if p_value is None else f"{p_value:.2g}",
    ]


def print_notes(finals: Sequence[Mapping[str, Any]]) -> None:
    """What the table of final answers cannot say."""
    for one in finals:
        if one["problem"]:
            print(one_line(one["problem"]))
        elif not one["paired"]:
            print(
                f"{one['a']} and {one['b']} have no question in common, so there is no paired test: the difference may "
                "come from the questions"
            )
        elif one["only_a"] or one["only_b"]:
            print(
                f"{one['a']} and {one['b']} were evaluated on different questions: only the "
                f"{plural(one['questions'], 'common question')} count ({one['only_a']} only in {one['a']}, "
                f"{one['only_b']} only in {one['b']})"
            )
    if sum(one.get("p_value") is not None for one in finals) > 1:
        print("p is of each comparison alone, without a correction for several comparisons.")


# Curves


def picture_path(runs: Sequence[Run]) -> Path:
    """Where curves are drawn if the user does not say: beside the first run."""
    joined = "-".join(run.name for run in runs)
    name = joined if len(joined) <= MAX_NAME else f"{runs[0].name[:MAX_NAME]}-and-{len(runs) - 1}-more"
    return runs[0].path.resolve().parent / f"compare-{name}.png"


def draw(metrics: Mapping[str, Rows], path: Path) -> Path | None:
    try:
        return draw_comparison(metrics, path)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write {path} ({reason}): choose another file with -o FILE") from error


def curve_cells(metrics: Mapping[str, Rows]) -> list[list[str]]:
    """One row per metric with a panel: a small curve, on the same scale for all runs, and first and last value."""
    points = [points_of(rows) for rows in metrics.values()]
    shown = {panel.metric: panel for one in points for panel in shown_panels(one)}
    cells = []
    for metric, panel in shown.items():
        values = [list(one(metric, panel.x)[1]) for one in points]
        known = [value for own in values for value in own]
        if known:
            ends = (min(known), max(known))
            cells.append([metric, *(f"{blocks(own, ends)}{first_and_last(own, panel.share)}" for own in values)])
    return cells


def blocks(values: Sequence[float], ends: tuple[float, float]) -> str:
    """The curve as block characters, each the mean of a part of the run; empty for a terminal without them."""
    low, high = ends
    if len(values) < 2 or not (getattr(sys.stdout, "encoding", "") or "utf-8").lower().startswith("utf"):
        return ""
    size = min(WIDTH, len(values))
    parts = [values[len(values) * i // size : len(values) * (i + 1) // size] for i in range(size)]
    levels = [(sum(part) / len(part) - low) / ((high - low) or 1.0) for part in parts]
    return "".join(BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)] for level in levels) + " "


def first_and_last(values: Sequence[float], share: bool) -> str:
    if not values:
        return UNKNOWN
    ends = [values[0], values[-1]] if len(values) > 1 else values
    return " to ".join(f"{100 * value:.1f} %" if share else f"{value:.4g}" for value in ends)


# Settings


def config_differences(facts: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dotted keys whose values differ between runs whose settings can be read.

    The values are those of each run. None: not set, or not readable.
    """
    flat = [None if fact["config"] is None else flattened(fact["config"]) for fact in facts]
    known = [config for config in flat if config is not None]
    keys = sorted({key for config in known for key in config} - set(IGNORED_SETTINGS))
    differing = [key for key in keys if any(config.get(key) != known[0].get(key) for config in known)]
    return {key: [config and config.get(key) for config in flat] for key in differing}


def setting(value: Any) -> str:
    return UNKNOWN if value is None else str(value)
