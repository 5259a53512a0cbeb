"""Findings of the doctor on a run that is shown: computed in another thread, and kept until the files change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from assay.checks.causes import Diagnosis, ranked
from assay.checks.diagnosis import diagnose, diagnose_files, slower_than_best
from assay.types import describe_error
from assay.web.folder import RunFolder

PAUSE_S = 10.0  # at least, between two diagnoses of a run in progress
Finding = dict[str, Any]


class Examined(NamedTuple):
    findings: list[Finding]
    problem: str | None  # why there are none
    pending: bool  # whether a diagnosis is under way, so that the findings may be old


# One thread for each kind: the list of runs does not wait for runs that are examined thoroughly.
_thorough = ThreadPoolExecutor(1, thread_name_prefix="assay-view-doctor")
_quick = ThreadPoolExecutor(1, thread_name_prefix="assay-view-badges")


class Doctor:
    """Diagnoses one run, again when its files have changed. Safe to use from several threads."""

    def __init__(self, folder: RunFolder, quick: bool = False, wait: Callable[[], object] = lambda: None) -> None:
        """`quick`: only rules on metrics and results, no files of answers. `wait` is called before a diagnosis."""
        self._folder, self._quick, self._wait = folder, quick, wait
        self._known: tuple[Any, float] = (None, 0.0)  # state of the files, and when they were diagnosed
        self._future: Future[None] | None = None
        self._pause = PAUSE_S
        self._lock = threading.Lock()
        self._findings: list[Finding] = []
        self._problem: str | None = None

    @property
    def pending(self) -> bool:
        return self._future is not None and not self._future.done()

    def is_current(self, running: bool) -> bool:
        """Whether the findings are known for the files as they are now."""
        return not self.pending and self._known[0] == self._state(running)

    def _state(self, running: bool) -> Any:
        return self._folder.metrics.stamp, self._folder.document("summary.json"), running

    def findings(self, running: bool, wait_s: float | None) -> Examined:
        """The findings known so far; waits at most `wait_s` for a diagnosis (None: until it has finished)."""
        self._folder.metrics.read()
        state = self._state(running)
        with self._lock:
            known, when = self._known
            is_due = state != known and (not running or time.monotonic() - when >= self._pause)
            if is_due and not self.pending:
                self._known = state, time.monotonic()
                self._future = (_quick if self._quick else _thorough).submit(self._diagnose)
        if self._future is not None:
            with suppress(NotYet):
                self._future.result(wait_s)
        pending = self.pending  # before the findings are read: a diagnosis may finish at any time
        return Examined(self._findings, self._problem, pending)

    def _diagnose(self) -> None:
        self._wait()
        start = time.monotonic()
        try:
            causes = self._causes()
        except Exception as error:  # rules expect intact files
            self._findings, self._problem = [], f"the doctor cannot read this run ({describe_error(error)})"
            return
        self._pause = max(PAUSE_S, 20 * (time.monotonic() - start))
        self._problem = None
        self._findings = [asdict(cause) for cause in causes]

    def _causes(self) -> Sequence[Diagnosis]:
        files, rows = self._folder, self._folder.metrics.steps()
        if not self._quick:
            return diagnose_files(files, rows)
        config, summary = files.config(), files.document("summary.json") or None
        return ranked(filter(None, [*diagnose(rows, config, summary), slower_than_best(files, rows, config)]))


def badge(findings: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The most important finding and the number of all that are as severe; None without findings."""
    if not findings:
        return None
    first = findings[0]
    count = sum(finding["severity"] == first["severity"] for finding in findings)
    return {"severity": first["severity"], "count": count, "evidence": first["evidence"]}
