"""`assay runs`: list runs, show one, or compare several."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.runs.console import Console, duration, fraction, one_line, percent
from assay.runs.curves import draw_comparison, draw_curves, points_of, shown_panels
from assay.runs.directory import Run, RunFiles, access_problem, flattened, list_runs, setting, unreadable_folders
from assay.runs.files import to_json
from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.types import UserError, plural

if TYPE_CHECKING:
    from assay.web.table import Questions

HELP = """List runs, show one, or compare several.

  assay runs                 all runs
  assay runs NAME            one run
  assay runs compare A B     results, a paired test of the final answers, curves, and settings that differ
assay runs A B compares too, but draws no picture."""
COMPARE = "compare"
UNKNOWN = "-"
MAX_NAME = 120  # characters of the file name of the picture
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 16  # characters of a curve
IGNORED_SETTINGS = ("name", "runs_dir")
Rows = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


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
    facts = [describe(run) for run in runs]
    if len(runs) == 1 and (problems := facts[0]["problems"]):
        raise UserError(f"{runs[0].path} cannot be read as a run: {problems[0]}")
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
    facts = [describe(run) for run in list_runs(args.dir)]
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
    for run in runs:
        path = draw_curves(run.path)
        if path is None:
            raise UserError(f"{run.path} has no curves: there are no metrics yet, or matplotlib is not installed")
        print(path)
    return 0


def describe(run: Run) -> dict[str, Any]:
    """The facts of a run, as far as they can be read; `problems` says what cannot."""
    from assay.web.folder import INCOMPLETE, RunFolder

    facts, problems = RunFolder(run.path).facts()
    problems = [problem for problem in problems if problem != INCOMPLETE]
    if problems:
        facts["state"] = f"damaged ({run.state})"
    if any(problem.startswith("config.toml") for problem in problems):
        facts["config"] = None
    return {**facts, "problems": problems}


def cells(fact: Mapping[str, Any]) -> dict[str, str]:
    """The facts of a run as cells of a table."""
    wall, p_value = fact["wall_s"], setting(fact["paired"], "p_value")
    return {
        "run": fact["run"],
        "state": fact["state"],
        "started": str(fact["started"] or UNKNOWN),
        "task": shortened(fact["task"]),
        "model": shortened(fact["model"]),
        "algorithm": shortened(fact["algorithm"]),
        "seed": shown(fact["seed"]),
        "steps": progress(fact),
        "reward": UNKNOWN if fact["reward"] is None else fraction(fact["reward"]),
        "before": accuracy(fact["before"]),
        "after": accuracy(fact["after"]),
        "p": UNKNOWN if p_value is None else f"{p_value:.2g}",
        "gained / lost": gains(fact["paired"]),
        "time": UNKNOWN if wall is None else duration(wall),
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
        return UNKNOWN
    return percent(value).replace(" ", "") + (
        f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]" if interval else ""
    )


def gains(paired: Any) -> str:
    gained, lost = setting(paired, "gained"), setting(paired, "lost")
    return UNKNOWN if gained is None or lost is None else f"+{gained} / -{lost}"


def shown(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def shortened(value: Any, limit: int = 32) -> str:
    text = str(value or UNKNOWN)
    return text if len(text) <= limit else "..." + text[3 - limit :]


def print_results(facts: Sequence[Mapping[str, Any]]) -> None:
    """The facts of the runs, one column per run."""
    columns = [cells(fact) for fact in facts]
    headings = ["", *(column["run"] for column in columns)]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0] if name != "run"]
    if any(fact["error"] for fact in facts):
        rows.insert(1, ["error", *(fact["error"] or UNKNOWN for fact in facts)])
    Console().table("Results", headings, rows)


def print_problems(facts: Sequence[Mapping[str, Any]]) -> None:
    """Files of damaged runs that cannot be read."""
    for fact in facts:
        for problem in fact.get("problems", ()):
            print(one_line(f"{fact['run']}: {problem}"))


# Comparison


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
        ("Final answers", [final_cells(final) for final in finals]),
        ("Curves: first and last value", curve_cells(metrics)),
        ("Settings that differ", [[key, *map(shown, row)] for key, row in differences.items()]),
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
    first, *others = [final_questions(run, name) for run, name in zip(runs, names, strict=True)]
    return [
        {"a": names[0], "b": name, **final_comparison(first, other)}
        for name, other in zip(names[1:], others, strict=True)
    ]


def final_comparison(a: Questions | str, b: Questions | str) -> dict[str, Any]:
    from assay.web.table import Pairing

    if isinstance(a, str) or isinstance(b, str):
        return {"problem": "; ".join(side for side in (a, b) if isinstance(side, str))}
    return {"problem": None, **Pairing(a, b).facts()}


def final_questions(run: Run, name: str) -> Questions | str:
    """The questions of the evaluation after training; a string says why there are none."""
    from assay.web.folder import RunFolder
    from assay.web.index import place_of, read_file
    from assay.web.table import Questions

    folder = RunFolder(run.path)
    files = [f"evals/{file}" for file in folder.names("evals")]
    after = [(place.step, file) for file in files if (place := place_of(file)) and place.label == "after"]
    if not after:
        return f"{name} ({run.state}) has no evaluation after training"
    _, latest = max(after)
    file, _ = read_file(folder, latest)
    questions = Questions(file)
    if file.problems or not questions.shares:
        return f"{name}: {file.problems[0] if file.problems else f'{latest} is empty'}"
    return questions


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
    for final in finals:
        if final["problem"]:
            print(one_line(final["problem"]))
        elif not final["paired"]:
            print(
                f"{final['a']} and {final['b']} have no question in common, so there is no paired test: the difference "
                "may come from the questions"
            )
        elif final["only_a"] or final["only_b"]:
            print(
                f"{final['a']} and {final['b']} were evaluated on different questions: only the "
                f"{plural(final['questions'], 'common question')} count ({final['only_a']} only in {final['a']}, "
                f"{final['only_b']} only in {final['b']})"
            )
    if sum(final.get("p_value") is not None for final in finals) > 1:
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
    shown = {panel.metric: panel for run_points in points for panel in shown_panels(run_points)}
    cells = []
    for metric, panel in shown.items():
        values = [list(run_points(metric, panel.x)[1]) for run_points in points]
        known = [value for run_values in values for value in run_values]
        if known:
            ends = (min(known), max(known))
            cells.append(
                [
                    metric,
                    *(f"{blocks(run_values, ends)}{first_and_last(run_values, panel.share)}" for run_values in values),
                ]
            )
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

    One value per run. None: not set, or not readable.
    """
    flat = [None if fact["config"] is None else flattened(fact["config"]) for fact in facts]
    known = [config for config in flat if config is not None]
    keys = sorted({key for config in known for key in config} - set(IGNORED_SETTINGS))
    differing = [key for key in keys if any(config.get(key) != known[0].get(key) for config in known)]
    return {key: [config and config.get(key) for config in flat] for key in differing}
