"""What is different between runs: results, a paired test of the final answers, curves, and settings."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from assay.runs.console import duration, fraction, percent
from assay.runs.directory import SETTINGS_OF_MACHINE, flattened, setting
from assay.runs.metrics import points_of, shown_panels
from assay.types import plural
from assay.web.folder import INCOMPLETE, RunFolder
from assay.web.index import place_of, read_file
from assay.web.table import Pairing, Questions

UNKNOWN = "-"
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 16  # characters of a curve
FINAL_HEADINGS = ["B compared with A", "questions", "A", "B", "B - A in points [95 % interval]", "gained / lost", "p"]
Rows = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, headings, rows


class RunComparison:
    """Several runs, each compared with the first one. One run is only described."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._runs = [RunFolder(folder) for folder in folders]
        self.names = labels(self._runs)
        self.results = [describe(run) for run in self._runs]
        """the facts of each run"""

    @cached_property
    def paired(self) -> list[dict[str, Any]]:
        """Each run compared with the first one on the answers after training; `problem` says why it is impossible."""
        first, *others = [final_questions(run, name) for run, name in zip(self._runs, self.names, strict=True)]
        return [
            {"a": self.names[0], "b": name, **final_comparison(first, other)}
            for name, other in zip(self.names[1:], others, strict=True)
        ]

    @cached_property
    def settings(self) -> dict[str, list[Any]]:
        """Dotted keys whose values differ between runs whose settings can be read.

        One value per run. None: not set, or not readable.
        """
        flat = [None if fact["config"] is None else flattened(fact["config"]) for fact in self.results]
        known = [config for config in flat if config is not None]
        keys = sorted({key for config in known for key in config} - set(SETTINGS_OF_MACHINE))
        differing = [key for key in keys if any(config.get(key) != known[0].get(key) for config in known)]
        return {key: [config and config.get(key) for config in flat] for key in differing}

    @cached_property
    def metrics(self) -> dict[str, Rows]:
        return {name: run.readable_metrics() for name, run in zip(self.names, self._runs, strict=True)}

    def results_table(self) -> Table:
        """The facts of the runs, one column per run."""
        columns = [cells(fact) for fact in self.results]
        headings = ["", *(column["run"] for column in columns)]
        rows = [[name, *(column[name] for column in columns)] for name in columns[0] if name != "run"]
        if any(fact["error"] for fact in self.results):
            rows.insert(1, ["error", *(fact["error"] or UNKNOWN for fact in self.results)])
        return "Results", headings, rows

    def sections(self) -> list[tuple[Table, Iterable[str]]]:
        """Tables that describe and compare the runs, with notes on them. A table may have no rows."""
        answers = [final_cells(final) for final in self.paired]
        settings = [[key, *map(shown, row)] for key, row in self.settings.items()]
        return [
            (self.results_table(), ()),
            (("Final answers", FINAL_HEADINGS, answers), self.final_notes()),
            (("Curves: first and last value", ["", *self.names], curve_cells(self.metrics)), ()),
            (("Settings that differ", ["", *self.names], settings), self.settings_notes()),
        ]

    def final_notes(self) -> Iterator[str]:
        """What the table of final answers cannot say."""
        for final in self.paired:
            if final["problem"]:
                yield final["problem"]
            elif not final["paired"]:
                yield (
                    f"{final['a']} and {final['b']} have no question in common, so there is no paired test: the "
                    "difference may come from the questions"
                )
            elif final["only_a"] or final["only_b"]:
                yield (
                    f"{final['a']} and {final['b']} were evaluated on different questions: only the "
                    f"{plural(final['questions'], 'common question')} count ({final['only_a']} only in {final['a']}, "
                    f"{final['only_b']} only in {final['b']})"
                )
        if sum(final.get("p_value") is not None for final in self.paired) > 1:
            yield "p is of each comparison alone, without a correction for several comparisons."

    def settings_notes(self) -> Iterator[str]:
        known = [fact for fact in self.results if fact["config"] is not None]
        for name, fact in zip(self.names, self.results, strict=True):
            if fact["config"] is None:
                yield f"The settings of {name} are not compared: its config.toml cannot be read."
        if not self.settings and len(known) > 1:
            yield "The settings are equal." if len(known) == len(self.results) else "The other settings are equal."


def describe(run: RunFolder) -> dict[str, Any]:
    """The facts of a run, as far as they can be read; `problems` says what cannot."""
    facts, problems = run.facts()
    problems = [problem for problem in problems if problem != INCOMPLETE]
    if problems:
        facts["state"] = f"damaged ({facts['state']})"
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


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """The names of the runs; the paths of those that share a name, numbered if a run is given twice."""
    shared = Counter(run.name for run in runs)
    names = [run.name if shared[run.name] == 1 else str(run.path) for run in runs]
    return [f"{name} ({names[:index].count(name) + 1})" if names[:index].count(name) else name
            for index, name in enumerate(names)]  # fmt: skip


def final_comparison(a: Questions | str, b: Questions | str) -> dict[str, Any]:
    if isinstance(a, str) or isinstance(b, str):
        return {"problem": "; ".join(side for side in (a, b) if isinstance(side, str))}
    return {"problem": None, **Pairing(a, b).facts()}


def final_questions(run: RunFolder, name: str) -> Questions | str:
    """The questions of the evaluation after training; a string says why there are none."""
    files = [f"evals/{file}" for file in run.names("evals")]
    after = [(place.step, file) for file in files if (place := place_of(file)) and place.label == "after"]
    if not after:
        return f"{name} ({run.facts()[0]['state']}) has no evaluation after training"
    _, latest = max(after)
    file, _ = read_file(run, latest)
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
