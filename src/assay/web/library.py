"""The runs that `assay view` shows, and the thread that indexes their rollouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from assay.runs.directory import access_problem, unreadable_folders
from assay.types import describe_error
from assay.web.compare import CompareQuery, compare
from assay.web.data import RunView, ViewError, shortened
from assay.web.folder import is_run_folder

ACTIVE_S = 30.0  # after a request, new rollouts of a run are looked for this long
PAUSE_S = 1.0  # between two looks at the files of a run


class Indexer:
    """Indexes the rollouts of runs that are being looked at, in a thread."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._requested: dict[RunView, float] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def request(self, view: RunView) -> None:
        """Keep the index of this run current for a while."""
        with self._lock:
            is_new = view not in self._requested
            self._requested[view] = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="assay-view-index", daemon=True)
                self._thread.start()
        if is_new:
            self._wake.set()

    def _run(self) -> None:
        while True:
            more = False
            for view in self._active():
                try:
                    more = view.update_index() or more
                except Exception as error:  # the others are still indexed
                    view.index.problem = f"the rollouts cannot be indexed ({describe_error(error)})"
            if not more:
                self._wake.wait(PAUSE_S)
                self._wake.clear()

    def _active(self) -> list[RunView]:
        with self._lock:
            now = time.monotonic()
            self._requested = {view: at for view, at in self._requested.items() if now - at < ACTIVE_S}
            return sorted(self._requested, key=lambda view: -self._requested[view])


class Library:
    """The runs that are shown: run folders, and the runs in runs folders, also those that are added later."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = [path.absolute() for path in paths]
        self._lock = threading.Lock()
        self._views: dict[Path, RunView] = {}  # by resolved path
        self._refused: dict[str, str] = {}
        self._unreadable: dict[Path, list[str]] = {}  # by given folder
        self._indexer = Indexer()

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
                    self._views[path] = RunView(identifier, path, self._indexer.request)
            return [self._views[path] for path in found]

    def _runs_of(self, root: Path) -> list[Path]:
        """Resolved paths. Links in a runs folder must not lead out of it; a given folder may be a link itself."""
        if is_run_folder(root):
            return [root.resolve()]
        inside = root.resolve()
        self._unreadable[root] = unreadable_folders(inside)
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
        if problem := access_problem(known[identifier].folder.root):
            raise ViewError(problem)
        if not is_run_folder(known[identifier].folder.root):
            raise ViewError(f"the folder of run {identifier!r} was deleted")
        return known[identifier]

    def runs(self) -> dict[str, Any]:
        runs = [view.facts() for view in self.views()]
        return {"runs": runs, "problems": shortened(self.problems())}

    def problems(self) -> list[str]:
        """Folders that are not shown, as of the last look at them."""
        unreadable = [text for texts in self._unreadable.values() for text in texts]
        return [*unreadable, *self._refused.values()]

    def compare(self, query: CompareQuery) -> dict[str, Any]:
        return compare(self.view(query.run_a), self.view(query.run_b), query)


def unique(name: str, taken: set[str]) -> str:
    """The name, with a number if another run has it."""
    names = (name if number == 1 else f"{name}~{number}" for number in range(1, len(taken) + 2))
    return next(candidate for candidate in names if candidate not in taken)


def _age(path: Path) -> tuple[float, str]:
    with suppress(OSError):
        return (path / "config.toml").stat().st_mtime, path.name
    return 0.0, path.name
