"""A pool of sandboxed worker processes that apply a function to items, with a hard time limit per item.

Each worker is a fresh interpreter, owned by a thread of this process that sends it chunks from a shared queue.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from assay.system.sandbox import Level, WorkerSettings
from assay.system.spawn import BadMessage, ChildProcess, JsonReader
from assay.types import UserError

T = TypeVar("T")
Item = tuple[Any, ...]

START_LIMIT_S = 120.0  # to start an interpreter and import what the function needs
REPORT_S = 0.5
GRACE_S = 1.0  # for a worker that applies the time limit itself, because it processes items concurrently
MAX_CHUNK = 64
MAX_CHUNK_CHARS = 1_000_000
LOST = (EOFError, BrokenPipeError, BadMessage)  # raised for a worker that died or that sends invalid messages


class StartFailed(UserError):
    """No worker could be started; the message is for the user."""


@dataclass(frozen=True)
class ItemFailure:
    """Why an item has no result."""

    timed_out: bool
    detail: str = ""


class WorkerPool(Generic[T]):
    """Applies a function to items in `workers` processes.

    An item that takes longer than the time limit gives an ItemFailure; its worker is killed, with everything it
    started, and replaced. If a worker dies (a crash, the kernel's out-of-memory killer) or sends an invalid message,
    its item is tried once more in a new worker; if that fails too, the result is an ItemFailure.

    An `async` function (`WorkerSettings.concurrent`) processes up to `MAX_CHUNK` items concurrently in each worker.
    """

    def __init__(self, settings: WorkerSettings, workers: int, parse: Callable[[Any], T]) -> None:
        """`parse` checks and converts what the untrusted worker sent as result; it raises BadMessage if invalid."""
        self._settings, self._workers, self._parse = settings, workers, parse
        self._jobs: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[_WorkerThread] = []
        self._closed = False
        self._owner = os.getpid()

    def map(self, items: Sequence[Item], report: Callable[[int], None] | None = None) -> list[T | ItemFailure]:
        """Return one result per item, in order. Thread-safe.

        `report`: receives the number of results every `REPORT_S` seconds.
        """
        if os.getpid() != self._owner:
            raise RuntimeError("a worker pool cannot be used in a forked process: create one there")
        self._start_threads()
        if not items:
            return []
        batch = _Batch(len(items))
        for part in split_items(items, self._workers, 1 if self._settings.concurrent else 4):
            self._jobs.put(_Chunk(batch, part))
        return batch.wait(report)

    def close(self) -> None:
        """End the workers. Calls of `map` that still wait in other threads fail."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        for thread in self._threads:
            thread.stop()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        while not self._jobs.empty():
            chunk = self._jobs.get()
            if chunk is not None:
                chunk.batch.fail(RuntimeError("the worker pool was closed"))

    def _start_threads(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker pool is closed")
            if not self._threads:
                arguments = self._jobs, self._settings, self._parse
                self._threads = [_WorkerThread(*arguments) for _ in range(self._workers)]
                for thread in self._threads:
                    thread.start()
                atexit.register(self.close)


class _WorkerThread(threading.Thread):
    """Owns one worker process at a time: starts it when there is work, enforces the time limit, replaces it."""

    def __init__(
        self, jobs: queue.SimpleQueue[_Chunk | None], settings: WorkerSettings, parse: Callable[[Any], Any]
    ) -> None:
        super().__init__(name="assay-worker", daemon=True)
        self._jobs, self._settings, self._parse = jobs, settings, parse
        self._worker: _Worker | None = None
        self._worker_lock = threading.Lock()
        self._stopping = False

    def stop(self) -> None:
        """Kill the process, after which the thread ends. Called from another thread."""
        with self._worker_lock:
            self._stopping = True
            if self._worker is not None:
                self._worker.stop()

    def run(self) -> None:
        while (chunk := self._jobs.get()) is not None:
            if chunk.batch.done:
                continue
            try:
                self._process(chunk)
            except BaseException as error:  # the caller waits for a result
                chunk.batch.fail(error)
        self._discard()

    def _process(self, chunk: _Chunk) -> None:
        """Process a chunk. If the worker is lost, the items without a result are queued again."""
        worker = self._ready_worker()
        retry: list[_Chunk] = []
        try:
            worker.send(chunk.items, time.monotonic() + START_LIMIT_S)
            while chunk.items:
                chunk.put(worker.next_result(chunk.items[0][0], self._parse))
        except TimeoutError:
            self._discard()
            if self._settings.concurrent and len(chunk.items) > 1:  # one of them blocked the event loop of all
                retry = [_Chunk(chunk.batch, [item]) for item in chunk.items]
                chunk.items = []
            else:
                chunk.put(ItemFailure(timed_out=True))
        except LOST as error:
            reason = self._lost(error)
            if chunk.retried:
                chunk.put(ItemFailure(timed_out=False, detail=f"the worker process failed twice: {reason}"))
            else:
                retry = [_Chunk(chunk.batch, [chunk.items.pop(0)], retried=True)]
        for part in (*retry, *chunk.halves()):
            self._jobs.put(part)

    def _ready_worker(self) -> _Worker:
        """Return the worker, or start one. One that dies at startup is replaced once, like one that dies on an item."""
        for last in (False, False, True):
            if self._worker is not None:
                return self._worker
            with self._worker_lock:
                self._check_open()
                worker = self._worker = _Worker(self._settings)
            try:
                if worker.prepare():
                    return worker
                self._discard()
            except LOST as error:
                reason = self._lost(error)
                if last:
                    raise StartFailed(f"worker processes die at startup ({reason}); see their error output") from None
            except BaseException:
                self._discard()
                raise
        raise StartFailed("worker processes cannot be started")

    def _check_open(self) -> None:
        if self._stopping:
            raise RuntimeError("the worker pool was closed")

    def _lost(self, error: BaseException) -> str:
        """Discard a worker that died or sent an invalid message; return what happened."""
        reason = self._discard()
        self._check_open()
        return f"it sent an invalid message: {error}" if isinstance(error, BadMessage) else reason

    def _discard(self) -> str:
        """Kill the process, if there is one; return how it ended."""
        with self._worker_lock:
            worker, self._worker = self._worker, None
        return "not started" if worker is None else worker.close()


class _Worker(ChildProcess):
    """A worker process as seen from the parent. What it sends is not trusted: it may run code that a model wrote.

    Owned by one thread; others may only call `stop`.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        namespaces = settings.level != "off" and SUPPORT.namespaces_refused is None
        options = {"namespaces": namespaces, "network": settings.level != "strict"}
        arguments = ("assay.system.sandbox", json.dumps(options))
        super().__init__(*arguments, supervised=True, environment=settings.environment)
        self._settings = settings
        self._pause_left_s = START_LIMIT_S  # a worker must not stop its clock for as long as it likes
        self._messages = JsonReader(self.output)
        os.set_blocking(self.input, False)

    def prepare(self) -> bool:
        """Send the settings and wait until the function is loaded. False: start another worker without namespaces."""
        deadline = time.monotonic() + START_LIMIT_S
        try:
            self.send(self._settings, deadline)
            message = self._messages.receive(deadline)
        except TimeoutError:
            raise StartFailed(f"a worker process was not ready after {START_LIMIT_S:g} s") from None
        if message["kind"] == "refused":
            SUPPORT.namespaces_refused = str(message.get("why"))
            return False
        if message["kind"] == "failed":
            raise StartFailed(str(message.get("why")))
        if message["kind"] != "ready":
            raise BadMessage("it was sent before the worker was ready")
        missing = [str(name) for name in message.get("missing") or ()]
        if self._settings.level != "off" and SUPPORT.namespaces_refused is not None:
            missing.append(f"a process namespace ({SUPPORT.namespaces_refused})")
        SUPPORT.warn_missing(self._settings.level, missing)
        return True

    def next_result(self, index: int, parse: Callable[[Any], T]) -> T | ItemFailure:
        """Return the result of the item with this index. Raises TimeoutError, or one of LOST."""
        limit_s = self._settings.timeout_s + (GRACE_S if self._settings.concurrent else 0)
        deadline = time.monotonic() + limit_s
        left_s: float | None = None  # of the item's time, while its clock is stopped
        while True:
            message, now = self._messages.receive(deadline), time.monotonic()
            if message["kind"] == "paused" and left_s is None:
                left_s, deadline = deadline - now, now + self._pause_left_s
            elif message["kind"] == "resumed" and left_s is not None:
                self._pause_left_s = deadline - now
                deadline, left_s = now + left_s, None
            elif type(message.get("index")) is not int or message["index"] != index:
                raise BadMessage("it is not the requested result")
            elif message["kind"] == "result":
                return parse(message.get("value"))
            elif message["kind"] == "timeout":
                return ItemFailure(timed_out=True)
            elif message["kind"] == "error" and isinstance(message.get("detail"), str):
                return ItemFailure(timed_out=False, detail=message["detail"])
            else:
                raise BadMessage("it is not a result")


class _Batch:
    """The results of one call of `map`, filled in by several threads."""

    def __init__(self, size: int) -> None:
        self._results: list[Any] = [None] * size
        self._missing = size
        self._lock = threading.Lock()
        self._done: Future[list[Any]] = Future()

    def put(self, index: int, result: Any) -> None:
        with self._lock:
            self._results[index] = result
            self._missing -= 1
            if not self._missing and not self.done:
                self._done.set_result(self._results)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            if not self.done:
                self._done.set_exception(error)

    @property
    def done(self) -> bool:
        """Whether all results are there, the batch has failed, or nobody waits for it any more."""
        return self._done.done()

    def wait(self, report: Callable[[int], None] | None = None) -> list[Any]:
        try:
            while report is not None and not futures.wait([self._done], timeout=REPORT_S).done:
                report(len(self._results) - self._missing)
            return self._done.result()
        finally:
            with self._lock:
                self._done.cancel()  # has an effect only if waiting was interrupted


@dataclass
class _Chunk:
    """Some items of a batch with their indices; the first one is removed when its result arrives."""

    batch: _Batch
    items: list[tuple[int, Item]]
    retried: bool = False  # a worker was already lost on the first item

    def put(self, result: Any) -> None:
        self.batch.put(self.items.pop(0)[0], result)
        self.retried = False

    def halves(self) -> list[_Chunk]:
        middle = (len(self.items) + 1) // 2
        return [_Chunk(self.batch, part) for part in (self.items[:middle], self.items[middle:]) if part]


def split_items(
    items: Sequence[Item], receivers: int, per_receiver: int = 4, scale: int = 1
) -> list[list[tuple[int, Item]]]:
    """Split items, with their indices, into parts small enough that all receivers stay busy and no message is huge.

    `scale`: by which the limits of a part are larger than those of a message to one worker.
    """
    size = max(1, min(scale * MAX_CHUNK, -(-len(items) // (receivers * per_receiver))))
    parts: list[list[tuple[int, Item]]] = []
    chars_left = 0
    for index, item in enumerate(items):
        chars = sum(len(text) for field in item for text in _texts(field))
        if not parts or len(parts[-1]) == size or chars > chars_left:
            parts.append([])
            chars_left = scale * MAX_CHUNK_CHARS
        parts[-1].append((index, item))
        chars_left -= chars
    return parts


def _texts(field: Any) -> list[str]:
    return [text for text in (field if isinstance(field, list) else [field]) if isinstance(text, str)]


@dataclass
class _Support:
    """Protections that this system refuses, as workers report them; each is warned about once per process."""

    namespaces_refused: str | None = None  # the reason
    warned: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def warn_missing(self, level: Level, names: list[str]) -> None:
        text = f"worker processes in the {level} sandbox run without {', and without '.join(names)}"
        with self.lock:
            if not names or text in self.warned:
                return
            self.warned.add(text)
        warnings.warn(f"{text}: this system does not offer it (docs/guides/rewards.md, 'Isolation')", stacklevel=2)


SUPPORT = _Support()
