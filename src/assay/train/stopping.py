"""Ctrl-C, a scheduler's SIGTERM, a closed terminal (SIGHUP): the run is asked to stop, and does so without loss.

The first signal lets the step be finished. When that takes longer than the grace time, whatever changes no weights
(sampling, an evaluation) is left in the middle. A second Ctrl-C stops at once, a third ends the process; a second
SIGTERM or SIGHUP changes nothing, since schedulers repeat it before they kill, and a checkpoint may be half written.
On many ranks it is enough that one of them was asked: they agree on it between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeVar

from assay.mesh import Mesh

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO_S = 0.3  # launchers pass a signal on that the terminal has sent to us as well: one wish, not two


class Stopped(KeyboardInterrupt):
    """The run was asked to stop. `except Exception` does not hold it up, and neither does a judge."""

    def __init__(self, signum: int, at_once: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum, self.at_once = signum, at_once


class Stopping:
    """Whether the run was asked to stop, by which signal, and whether what it is doing can be left."""

    def __init__(self, grace_s: float, mesh: Mesh | None = None) -> None:
        self.grace_s, self.mesh = grace_s, mesh or Mesh()
        self.signum: int | None = None
        self._asked_at = 0.0
        self._leavable = False
        self._watched: tuple[signal.Signals, ...] = ()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Heed signals until the block ends. Python hands them to the main thread only; elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._watched = tuple(signum for signum in SIGNALS if not (nohup and signum == signal.SIGHUP))
        before = {signum: signal.signal(signum, self._asked) for signum in self._watched}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._grace_over)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def check(self) -> None:
        """Between two steps, on all ranks: leave, if any of them was asked to."""
        signum = self.mesh.max_over_ranks(self.signum or 0)
        if signum:
            raise Stopped(signum)

    def leavable(self, work: Callable[[], T]) -> T | None:
        """What `work` gives; None where it was broken off, as it can be at any point once the grace time is over.

        It must change nothing that is saved, and exchange nothing with other ranks. `check` comes afterwards.
        """
        if self.signum is not None and time.monotonic() - self._asked_at >= self.grace_s:
            return None
        try:
            self._leavable = True
            return work()
        except Stopped as stopped:
            if stopped.at_once:
                raise
            return None
        finally:
            self._leavable = False

    def _asked(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._asked_at = signum, time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, max(self.grace_s, 1e-6), 1.0)  # again, should somebody swallow it
            # Not through the console: its lock may be held, or its buffer half written, where the signal struck.
            with suppress(OSError):
                if self.mesh.is_main:
                    os.write(2, b"\nassay: finishing the step, then saving; another Ctrl-C stops at once\n")
        elif signum == signal.SIGINT and time.monotonic() - self._asked_at > ECHO_S:
            for watched in self._watched:
                signal.signal(watched, signal.SIG_DFL)
            raise Stopped(signum, at_once=True)

    def _grace_over(self, signum: int, frame: FrameType | None) -> None:
        if self._leavable and self.signum is not None:
            raise Stopped(self.signum)
