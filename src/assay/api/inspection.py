"""Why a run does not learn, and what is different between runs: `assay.doctor` and `assay.compare`."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from assay.api.arguments import overrides_of
from assay.api.notebook import Entries, html_paragraph, html_table
from assay.checks import Diagnosis
from assay.checks.diagnosis import diagnose_files
from assay.config import TrainConfig
from assay.config.settings import COMMAND_LINE, PYTHON, Caller, load_settings
from assay.runs import Run
from assay.runs.console import aligned
from assay.runs.directory import RunFiles
from assay.runs.files import to_json
from assay.runs.resolve import PREFIX, find_run, split_tag
from assay.types import UserError, plural
from assay.web.comparison import RunComparison
from assay.web.folder import find_folder

MAX_PROBLEMS = 10  # files that are named; the others are counted
LABELS = {"error": "ERROR", "warning": "WARNING", "note": "NOTE"}
WIDTH = 100  # characters of a line of `repr`


class Findings(Entries[Diagnosis]):
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


class Comparison(RunComparison):
    """Results, paired tests of the final answers, curves and settings of several runs."""

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
