"""Why a run does not learn, and what is different between runs: `assay.doctor` and `assay.compare`."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from assay.api.arguments import overrides_of
from assay.api.notebook import html_paragraph, html_table
from assay.checks import Diagnosis
from assay.checks.diagnosis import diagnose_files
from assay.config import TrainConfig
from assay.config.settings import COMMAND_LINE, PYTHON, Caller, load_settings
from assay.runs import Run
from assay.runs.console import aligned, duration, fraction, percent
from assay.runs.directory import SETTINGS_OF_MACHINE, RunFiles, flattened, setting
from assay.runs.files import to_json
from assay.runs.metrics import points_of, shown_panels
from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.types import UserError, plural
from assay.web.folder import INCOMPLETE, RunFolder, find_folder
from assay.web.index import place_of, read_file
from assay.web.table import Pairing, Questions

MAX_PROBLEMS = 10  # files that are named; the others are counted
LABELS = {"error": "ERROR", "warning": "WARNING", "note": "NOTE"}
WIDTH = 100  # characters of a line of `repr`


class Findings(list[Diagnosis]):
    """What keeps a run from learning or harms it, the most important first. Each has `evidence` and `remedy`."""

    def __init__(self, what: str, causes: Sequence[Diagnosis], error: str = "", problems: Sequence[str] = ()) -> None:
        super().__init__(causes)
        self.what = what
        """the run or config that was examined"""
        self.error = error
        """with which the run has ended"""
        self.unreadable = problems
        """files that cannot be read"""

    @property
    def title(self) -> str:
        counts = Counter(str(cause.severity) for cause in self)
        found = ", ".join(plural(counts[severity], severity) for severity in LABELS if counts[severity])
        nothing = "no problems found" + (" in what can be read" if self.unreadable else "")
        return f"{self.what}: {found or ('ended with an error' if self.error else nothing)}"

    def lines(self, width: int = WIDTH) -> Iterator[str]:
        """The findings as text."""
        yield self.title
        if self.error:
            yield from _paragraph("ended with: ", self.error, width)
        for text in self.unreadable[:MAX_PROBLEMS]:
            yield from _paragraph("not diagnosed: ", text, width)
        if len(self.unreadable) > MAX_PROBLEMS:
            yield f"  not diagnosed: {len(self.unreadable) - MAX_PROBLEMS} more files that cannot be read"
        for cause in self:
            yield ""
            yield f"{LABELS[cause.severity]}  {cause.name}"
            yield from _paragraph("found: ", cause.evidence, width)
            for text in cause.examples:
                yield from _paragraph("e.g. ", text, width)
            yield from _paragraph("to do: ", cause.remedy, width) if cause.remedy else ()

    def to_dict(self) -> dict[str, Any]:
        causes = [asdict(cause) for cause in self]
        return to_json({"error": self.error or None, "unreadable": list(self.unreadable), "findings": causes})

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        notes = [f"ended with: {self.error}"] if self.error else []
        notes += [f"not diagnosed: {text}" for text in self.unreadable[:MAX_PROBLEMS]]
        rows = [
            (LABELS[cause.severity], cause.name, "\n".join([cause.evidence, *cause.examples]), cause.remedy)
            for cause in self
        ]
        shown = html_table(("", "finding", "found", "to do"), rows) if rows else ""
        return "".join([html_paragraph(self.title, bold=True), *map(html_paragraph, notes), shown])


def _paragraph(label: str, text: str, width: int) -> list[str]:
    indent = " " * (2 + len(label))
    wrapper = textwrap.TextWrapper(max(width, 40), f"  {label}", indent, break_on_hyphens=False)
    return wrapper.wrap(text) or [f"  {label}".rstrip()]


def examine(target: str, overrides: Mapping[str, Any], runs_dir: Path, caller: Caller = COMMAND_LINE) -> Findings:
    """Find out what is wrong with a config, changed by `overrides`, or with a run, by its name or folder."""
    path = Path(target).expanduser()
    if isfile(path):  # False for a name that is too long for a path, as of a folder below
        from assay.build.dry_run import diagnose_config

        return Findings(f"config {path}", diagnose_config(load_settings(TrainConfig, path, overrides, caller)))
    if others := [key for key in overrides if key != "runs_dir"]:
        raise UserError(f"{caller.spelt(others[0])} changes a setting, which is for a config: {path} is a run")
    if path.suffix == ".toml" and not isdir(path) and not isdir(runs_dir / path):
        raise UserError(f"there is no file {target}: give an existing config, or the name of a run")
    return examine_run(find_folder(target, runs_dir))


def examine_run(folder: Path) -> Findings:
    files = RunFiles(folder)
    causes, run = diagnose_files(files), Run(files.path)
    error = str(files.document("status.json").get("error") or "") if run.state == "failed" else ""
    steps = max((row["step"] for row in files.readable_metrics()), default=0)
    return Findings(f"run {run.name} ({run.state}, {plural(steps, 'step')})", causes, error, files.problems)


def doctor(target: Any, *, runs_dir: str | Path = "runs", **settings: Any) -> Findings:
    """Find out why a run does not learn, or what is wrong with a config before a run. Nothing is trained or changed.

    Args:
        target: A run, its name or folder, or a TOML file.
        runs_dir: Folder of the runs.
        settings: Settings that are changed in the config.
    """
    given = getattr(target, "path", target)
    if not isinstance(given, str | Path):
        raise UserError(f"doctor examines a run, its name, or the path of a config, not {target!r:.80}")
    return examine(str(given), overrides_of(settings, TrainConfig), Path(runs_dir), PYTHON)


# What is different between runs

UNKNOWN = "-"
BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 16  # characters of a curve
FINAL_HEADINGS = ["B compared with A", "questions", "A", "B", "B - A in points [95 % interval]", "gained / lost", "p"]
Rows = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]  # title, headings, rows


class Comparison:
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

    def to_dict(self) -> dict[str, Any]:
        return to_json({"runs": self.results, "differences": self.settings, "final": self.paired})

    def __repr__(self) -> str:
        parts = []
        for (title, headings, rows), notes in self.sections():
            parts.append("\n".join([*([title, *aligned([headings, *rows])] if rows else []), *notes]))
        return "\n\n".join(filter(None, parts))

    def _repr_html_(self) -> str:
        parts = []
        for (title, headings, rows), notes in self.sections():
            parts += [html_table(headings, rows, title)] if rows else []
            parts += map(html_paragraph, notes)
        return "".join(parts)


def compare(*runs: Any, runs_dir: str | Path = "runs") -> Comparison:
    """Compare runs with the first one: results, a paired test of the final answers, curves, settings that differ.

    Args:
        runs: At least two runs, or their names or folders.
        runs_dir: Folder of the runs.
    """
    if len(runs) < 2:
        raise UserError("a comparison needs at least two runs: assay.compare('a', 'b')")
    names = [str(getattr(run, "path", run)).removeprefix(PREFIX) for run in runs]
    return Comparison([find_run(split_tag(name)[0], Path(runs_dir)) for name in names])


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
    size = min(CURVE, len(values))
    parts = [values[len(values) * i // size : len(values) * (i + 1) // size] for i in range(size)]
    levels = [(sum(part) / len(part) - low) / ((high - low) or 1.0) for part in parts]
    return "".join(BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)] for level in levels) + " "


def first_and_last(values: Sequence[float], share: bool) -> str:
    if not values:
        return UNKNOWN
    ends = [values[0], values[-1]] if len(values) > 1 else values
    return " to ".join(f"{100 * value:.1f} %" if share else f"{value:.4g}" for value in ends)
