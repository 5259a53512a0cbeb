"""How users' functions are called: plain or `async` ones, in threads, with a time limit or a warning.

Also calls that are made concurrently but computed in batches.

All awaitables of users' code run in one event loop, in a thread of its own that exists as long as the process: objects
that belong to an event loop, such as HTTP sessions, can be kept between calls, and work continues while the engine
computes. Worker processes have an event loop of their own.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio

# asyncio is imported in functions, when the first awaitable is there: most worker processes need no event loop.

T = TypeVar("T")


class LoopThread:
    """An asyncio event loop in a daemon thread."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="assay-http", daemon=True)
        self.thread.start()

    @property
    def running(self) -> bool:
        return self.thread.is_alive() and not self.loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread and return its result. If the wait is interrupted, the work is cancelled."""
        if threading.current_thread() is self.thread:
            work.close()
            raise RuntimeError("a blocking call in the thread of an event loop would wait for itself: await it")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the thread. Cancelling the future cancels the work."""
        import asyncio

        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def post(self, work: Callable[[], object]) -> None:
        """Call a function in the thread, without waiting. Ignored after `stop`."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        self.call(self.loop.shutdown_asyncgens())  # generators of answers that were not read to their end
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


_thread: LoopThread | None = None
_lock = threading.Lock()


def submit(work: Awaitable[Any]) -> Future[Any]:
    """Start to await something in the event loop of users' code. Cancelling the future cancels the work."""
    return _loop_thread().submit(value_of(work))


async def value_of(value: Any) -> Any:
    """A value; if it is awaitable, its result, which is awaited in the event loop of the caller."""
    return await value if isawaitable(value) else value


def resolve(value: Any) -> Any:
    """Return a value; if it is awaitable, wait for its result. Works in a thread that runs an event loop, too."""
    if not isawaitable(value):
        return value
    thread = _loop_thread()
    if threading.current_thread() is not thread.thread:
        return thread.call(value_of(value))
    another = LoopThread()  # an async function has called a plain one
    try:
        return another.call(value_of(value))
    finally:
        another.stop()


async def awaited(value: Any) -> Any:
    """`resolve` for coroutines."""
    import asyncio

    return await asyncio.wrap_future(submit(value)) if isawaitable(value) else value


def then(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to a value. If the value is awaitable, the result is, too."""
    if not isawaitable(value):
        return function(value)

    async def apply() -> Any:
        return function(await value)

    return apply()


def together(values: Sequence[Any]) -> Any:
    """Return a list of the values. If some are awaitable, the list is, too, and they are awaited concurrently."""
    if not any(map(isawaitable, values)):
        return list(values)

    async def gather() -> list[Any]:
        import asyncio

        return await asyncio.gather(*map(value_of, values))

    return gather()


def attempt(
    call: Callable[[], Any],
    on_error: Callable[[BaseException], Any],
    errors: type[BaseException] | tuple[type[BaseException], ...] = (Exception, SystemExit),
) -> Any:
    """Return what `call` returns; if it raises one of the errors, at once or when awaited, what `on_error` returns."""
    try:
        result = call()
    except KeyboardInterrupt:
        raise
    except errors as error:
        return on_error(error)
    if not isawaitable(result):
        return result

    async def wait() -> Any:
        import asyncio

        try:
            return await result
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcome = on_error(error)  # raised by the user's code itself
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except errors as error:
            outcome = on_error(error)
        return await value_of(outcome)

    return wait()


def is_async(function: Any) -> bool:
    """Whether a function, method or callable object is defined by `async def`."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _loop_thread() -> LoopThread:
    global _thread
    with _lock:
        if _thread is None or not _thread.running:
            _thread = LoopThread()
        return _thread


# Threads


def run_in_thread(work: Callable[[], T], name: str = "assay-env") -> Future[T]:
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

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns; raise TimeoutError after `seconds` (0: no limit)."""
    if not seconds:
        return work()
    future = run_in_thread(work)
    if not wait([future], seconds).done:
        raise TimeoutError(f"took longer than {seconds:g} s")
    return future.result()


class Watchdog(threading.Thread):
    """Warns about blocks that take too long. One thread for all: a timer for each would cost more than a short step."""

    def __init__(self) -> None:
        super().__init__(name="assay-watchdog", daemon=True)
        self.blocks: dict[object, tuple[float, str]] = {}  # running ones: when to warn, and the text
        self.changed = threading.Condition()
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


# Batches

Item = TypeVar("Item")
Result = TypeVar("Result")


class SequenceBatches(ABC, Generic[Item, Result]):
    """Collects the sequences of concurrent calls, and computes those that wait as soon as the last batch is done."""

    def __init__(self, limit: int) -> None:
        """`limit`: maximum `size` of all sequences of a batch together; a larger sequence is a batch of its own."""
        self._limit = limit
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._running = 0  # sequences that are being computed

    @abstractmethod
    async def compute(self, items: list[Item]) -> Sequence[Result]:
        """One result per sequence. An exception fails all of them."""

    def size(self, item: Item) -> int:
        return 1

    @property
    def sizes(self) -> tuple[int, int]:
        """How many sequences are being computed, and how many wait."""
        return self._running, len(self._waiting)

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """One result per sequence. If the caller is cancelled, sequences that wait are not computed."""
        import asyncio

        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        if self._task is None:
            self._task = loop.create_task(self._run())
        return await asyncio.gather(*futures)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """`close`, and wait until nothing is computed any more."""
        import asyncio

        if (task := self._task) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while batch := self._take():
            self._running = len(batch)
            try:
                outcomes: Sequence[Result | Exception] = await self.compute([item for item, _ in batch])
            except Exception as error:
                outcomes = [error] * len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():  # the request was cancelled
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
        self._running, self._task = 0, None

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        """The sequences that have waited longest: at least one."""
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        size = 0
        while self._waiting:
            item, future = self._waiting[0]
            size += self.size(item)
            if batch and size > self._limit and not future.done():
                break
            self._waiting.popleft()
            if future.done():  # the request was cancelled
                size -= self.size(item)
            else:
                batch.append((item, future))
        return batch
