"""Requests have priority over the index: Python runs one thread at a time, so both would be slow together."""

from __future__ import annotations

import threading
import time

WAIT_S = 0.1  # at most, until the requests are answered
WORK_S = 0.01  # at least, between two waits: the index also grows while there are always requests


class Activity:
    """Counts the requests that are being answered: `with activity:` around each of them."""

    def __init__(self) -> None:
        self.requests = 0
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._wait_again = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self.requests += 1
            self._idle.clear()

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self.requests -= 1
            if not self.requests:
                self._idle.set()

    def give_way(self) -> None:
        """Wait a moment while there are requests. For one thread, which calls this often."""
        if self.requests and time.monotonic() > self._wait_again:
            self._idle.wait(WAIT_S)
            self._wait_again = time.monotonic() + WORK_S

    def share(self, seconds: float) -> float:
        """The part of this time that a request may use, together with the others."""
        return seconds / max(self.requests, 1)


activity = Activity()  # of this process
