"""Work in other threads: with a time limit, or with a warning if it takes long."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from threading import Condition, Thread
from typing import TypeVar

T = TypeVar("T")


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Start work in a new thread.

    A thread cannot be killed: one that hangs is abandoned, and does not prevent the program from exiting.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="assay-env", daemon=True).start()
    return future


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns; raise TimeoutError after `seconds` (0: no limit)."""
    if not seconds:
        return work()
    future = run_in_thread(work)
    if not wait([future], seconds).done:
        raise TimeoutError(f"took longer than {seconds:g} s")
    return future.result()


class Watchdog(Thread):
    """Warns about blocks that take too long. One thread for all: a timer for each would cost more than a short step."""

    def __init__(self) -> None:
        super().__init__(name="assay-watchdog", daemon=True)
        self.blocks: dict[object, tuple[float, str]] = {}  # running ones: when to warn, and the text
        self.changed = Condition()
        self.wakes_at = 0.0

    def run(self) -> None:
        while True:
            with self.changed:
                now = time.monotonic()
                late = [key for key, (when, _) in self.blocks.items() if when <= now]
                texts = [self.blocks.pop(key)[1] for key in late]
                self.wakes_at = min((when for when, _ in self.blocks.values()), default=math.inf)
                if not texts:
                    self.changed.wait(None if self.wakes_at == math.inf else self.wakes_at - now)
            for text in texts:
                warnings.warn(text, stacklevel=1)

    def add(self, key: object, seconds: float, text: str) -> None:
        with self.changed:
            when = time.monotonic() + seconds
            self.blocks[key] = (when, text)
            if when < self.wakes_at:
                self.changed.notify()

    def remove(self, key: object) -> None:
        with self.changed:
            self.blocks.pop(key, None)


_watchdog = Watchdog()


@contextmanager
def warn_after(seconds: float, text: str) -> Iterator[None]:
    """Issue a warning if the block is still running after `seconds`; the block continues."""
    global _watchdog
    if not _watchdog.is_alive():  # the first block of this process
        _watchdog = Watchdog()
        _watchdog.start()
    watchdog, key = _watchdog, object()
    watchdog.add(key, seconds, text)
    try:
        yield
    finally:
        watchdog.remove(key)
