"""Answers of the page's requests, as plain dictionaries. No HTTP here: `app` serves them, `report` writes them.

Numbers that are not finite are None. A damaged file never raises: `problems` says what cannot be read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from assay.runs.curves import X_LABELS, shown_panels
from assay.runs.diagnose import diagnose_run
from assay.runs.directory import Run
from assay.types import describe_error
from assay.web.folder import RunFolder, is_run_folder

FACTS = (
    *("name", "path", "state", "error", "started", "task", "model", "algorithm", "seed", "steps", "steps_planned"),
    *("reward", "before", "after", "paired", "wall_s"),
)
MAX_PROBLEMS = 20  # that are listed; the others are counted
FINDINGS_WAIT_S = 0.05  # for findings that are not known yet
FINDINGS_PAUSE_S = 10.0  # between two diagnoses of a run in progress
MAX_POINTS = 20_000


class ViewError(Exception):
    """A request that cannot be answered: 400 for a bad parameter, 404 for something that does not exist."""

    def __init__(self, message: str, status: int = 404) -> None:
        super().__init__(message)
        self.status = status


class RunView:
    """One run, and what was read and computed for it."""

    def __init__(self, identifier: str, path: Path) -> None:
        self.id = identifier
        self.folder = RunFolder(path)
        self._findings: list[dict[str, Any]] = []
        self._findings_problem: str | None = None
        self._diagnosed: tuple[Any, float] = (None, 0.0)  # state of the files, and when
        self._diagnosing: Future[None] | None = None

    def facts(self) -> dict[str, Any]:
        """One entry of the list of runs."""
        facts, problems = self.folder.facts()
        facts["name"] = facts.pop("run")
        return {"id": self.id, **{key: facts.get(key) for key in FACTS}, "problems": shortened(problems)}

    def detail(self) -> dict[str, Any]:
        facts = self.facts()
        config, _ = self.folder.config()
        environment, _ = self.folder.document("environment.json")
        summary, _ = self.folder.document("summary.json")
        findings, finding_problem = self.findings(facts["state"] == "running")
        problems = [*facts.pop("problems"), *([finding_problem] if finding_problem else [])]
        return {
            **facts,
            "config": config,
            "environment": environment,
            "summary": summary,
            "findings": findings,
            "train_steps": [],
            "evals": [],
            "metrics": sorted(set(self.folder.metrics.columns) - {"step"}),
            "indexed": {"done": 0, "total": 0},
            "problems": shortened(problems),
            "cursor": self.folder.metrics.size,
        }

    def findings(self, running: bool) -> tuple[list[dict[str, Any]], str | None]:
        """The doctor's findings, computed in another thread: those known so far, if it takes long."""
        self.folder.metrics.read()
        state = self.folder.metrics.stamp, self.folder.document("summary.json")[0], running
        known, when = self._diagnosed
        is_due = state != known and (not running or time.monotonic() - when >= FINDINGS_PAUSE_S)
        if is_due and (self._diagnosing is None or self._diagnosing.done()):
            self._diagnosed = state, time.monotonic()
            self._diagnosing = _threads.submit(self._diagnose)
        if self._diagnosing is not None:
            with suppress(NotYet):
                self._diagnosing.result(FINDINGS_WAIT_S)
        return self._findings, self._findings_problem

    def _diagnose(self) -> None:
        try:
            causes = diagnose_run(Run(self.folder.root))
        except Exception as error:  # rules expect intact files
            self._findings, self._findings_problem = [], f"the doctor cannot read this run ({describe_error(error)})"
            return
        self._findings_problem = None
        self._findings = [
            {
                "name": cause.name,
                "evidence": cause.evidence,
                "remedy": cause.remedy,
                "severity": getattr(cause, "severity", "warning"),
            }
            for cause in causes
        ]

    def metrics(
        self, names: Sequence[str] = (), x: str = "step", points: int = 1000, since: int | None = None
    ) -> dict[str, Any]:
        """Curves. Without names: all that have a panel."""
        if x not in X_LABELS:
            raise ViewError(f"x must be one of {', '.join(X_LABELS)}", 400)
        if not 2 <= points <= MAX_POINTS:
            raise ViewError(f"points must be from 2 to {MAX_POINTS}", 400)
        file = self.folder.metrics
        file.read()
        cursor = file.size
        if since == cursor:
            return {"cursor": cursor, "unchanged": True}
        panels = shown_panels(file.points)
        names = names or list(dict.fromkeys(name for panel in panels for name in panel.metrics))
        series = {name: curve(*file.points(name, x), points) for name in names if name in file.columns}
        intervals = {
            name: bounds
            for name in series
            if name.endswith("/accuracy") and (bounds := self._interval(name.removesuffix("accuracy"), x))
        }
        shown = [{"metric": p.metric, "title": p.title, "share": p.share, "x": p.x} for p in panels]
        return {"cursor": cursor, "series": series, "intervals": intervals, "panels": shown}

    def _interval(self, prefix: str, x: str) -> dict[str, list[float]] | None:
        """Bounds of the 95 % interval, at the positions that have both."""
        low, high = (dict(zip(*map(np.ndarray.tolist, self.folder.metrics.points(prefix + end, x)), strict=True))
                     for end in ("low", "high"))  # fmt: skip
        both = sorted(low.keys() & high.keys())
        return {"x": both, "low": [low[at] for at in both], "high": [high[at] for at in both]} if both else None


def curve(xs: np.ndarray, ys: np.ndarray, limit: int) -> dict[str, list[float]]:
    """At most `limit` points: of each bin the minimum and the maximum, so that no peak is lost."""
    if len(xs) > limit:
        edges = np.linspace(0, len(xs), max(limit // 2, 1) + 1).astype(int)
        bins = [(start, end) for start, end in pairwise(edges.tolist()) if end > start]
        ends = {place for a, b in bins for place in (a + int(ys[a:b].argmin()), a + int(ys[a:b].argmax()))}
        kept = np.array(sorted(ends))
        xs, ys = xs[kept], ys[kept]
    return {"x": xs.tolist(), "y": ys.tolist()}


def shortened(problems: Sequence[str]) -> list[str]:
    """The first problems, and the number of the others."""
    more = len(problems) - MAX_PROBLEMS
    return [*problems[:MAX_PROBLEMS], *([f"and {more} more problems"] if more > 0 else [])]


_threads = ThreadPoolExecutor(2, thread_name_prefix="assay-view")


class Library:
    """The runs that are shown: run folders, and the runs in runs folders, also those that are added later."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [path.absolute() for path in paths]
        self._lock = threading.Lock()
        self._views: dict[Path, RunView] = {}  # by resolved path
        self._refused: dict[str, str] = {}

    def views(self) -> list[RunView]:
        """All runs, in the order of the given folders; in a folder the oldest first."""
        with self._lock:
            found = list(dict.fromkeys(path for root in self.paths for path in self._runs_of(root)))
            self._views = {path: view for path, view in self._views.items() if path in found}
            taken = {view.id for view in self._views.values()}
            for path in found:
                if path not in self._views:
                    identifier = unique(path.name, taken)
                    taken.add(identifier)
                    self._views[path] = RunView(identifier, path)
            return [self._views[path] for path in found]

    def _runs_of(self, root: Path) -> list[Path]:
        """Resolved paths. Links in a runs folder must not lead out of it; a given folder may be a link itself."""
        if is_run_folder(root):
            return [root.resolve()]
        inside = root.resolve()
        with suppress(OSError):
            folders = [path.resolve() for path in inside.iterdir() if is_run_folder(path)]
            outside = [path for path in folders if not path.is_relative_to(inside)]
            self._refused |= {str(path): f"{path} is linked from {root}: give its path to see it" for path in outside}
            return sorted((path for path in folders if path.is_relative_to(inside)), key=_age)
        return []

    def view(self, identifier: str) -> RunView:
        """A run by its id."""
        known = {view.id: view for view in self._views.values()}
        if identifier not in known:
            known = {view.id: view for view in self.views()}
        if identifier not in known:
            raise ViewError(f"there is no run {identifier!r}")
        if not is_run_folder(known[identifier].folder.root):
            raise ViewError(f"the folder of run {identifier!r} was deleted")
        return known[identifier]

    def runs(self) -> dict[str, Any]:
        runs = [view.facts() for view in self.views()]
        return {"runs": runs, "problems": shortened(list(self._refused.values()))}


def unique(name: str, taken: set[str]) -> str:
    """The name, with a number if another run has it."""
    names = (name if number == 1 else f"{name}~{number}" for number in range(1, len(taken) + 2))
    return next(candidate for candidate in names if candidate not in taken)


def _age(path: Path) -> tuple[float, str]:
    with suppress(OSError):
        return (path / "config.toml").stat().st_mtime, path.name
    return 0.0, path.name


def plain(value: Any) -> Any:
    """The value as JSON can express it: numbers that are not finite are None."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return str(value)
