"""A limit on the time of code that is not ours, or a report of how long it takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread, Timer
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` gives, or TimeoutError. 0: however long it takes.

    A thread cannot be ended: one that hangs is left behind, and does not keep the program from ending.
    """
    if not seconds:
        return work()
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, name="assay-limited", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"took longer than {seconds:g} s")
    return found[0]


@contextmanager
def reported_after(seconds: float, text: str) -> Iterator[None]:
    """A warning if the block is still running after so many seconds. It goes on."""
    timer = Timer(seconds, warnings.warn, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
