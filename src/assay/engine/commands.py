"""Calls from any thread that must take effect between two steps of an engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
RETRY_S = 0.01  # between two attempts to run a queued command oneself, if no other thread has


class StepBoundary:
    """A lock that is held during a step, and a queue of commands for the next boundary.

    Whoever gets the lock runs the queued commands: the thread that steps the engine, or, if none does, the caller.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queue: deque[tuple[Callable[[], Any], Future | None]] = deque()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        with self.lock:
            self.run_queued()
            yield

    def run_queued(self) -> None:
        """The lock has to be held."""
        while self.queue:
            self.run(*self.queue.popleft())

    def run(self, work: Callable[[], Any], future: Future | None) -> None:
        with torch.inference_mode():
            if future is None:
                work()
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C is meant for the thread that runs this, whoever made the call

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` at the next boundary; at once if no step is running."""
        self.queue.append((work, None))
        if self.lock.acquire(blocking=False):
            try:
                self.run_queued()
            finally:
                self.lock.release()

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` at the next boundary and return its result."""
        future: Future[T] = Future()
        self.queue.append((work, future))
        while not future.done():
            if self.lock.acquire(timeout=RETRY_S):
                try:
                    self.run_queued()
                finally:
                    self.lock.release()
        return future.result()
