"""Users' functions may be plain or `async`: what they return may have to be awaited.

All awaitables of users' code run in one event loop, in a thread of its own that exists as long as the process: objects
that belong to an event loop, such as HTTP sessions, can be kept between calls, and work continues while the engine
computes. Worker processes have an event loop of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time when the first awaitable is there: most worker processes need no event loop
    from assay.endpoint import LoopThread

_thread: LoopThread | None = None
_lock = threading.Lock()


def submit(work: Awaitable[Any]) -> Future[Any]:
    """Start to await something in the event loop of users' code. Cancelling the future cancels the work."""
    import asyncio

    async def wait() -> Any:
        return await work

    return asyncio.run_coroutine_threadsafe(wait(), _loop_thread().loop)


def resolve(value: Any) -> Any:
    """Return a value; if it is awaitable, wait for its result. Works in a thread that runs an event loop, too."""
    if not isawaitable(value):
        return value
    if threading.current_thread() is _loop_thread().thread:  # an async function has called a plain one
        return _in_another_loop(value)
    future = submit(value)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # has an effect only if the wait was interrupted
        raise


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

    async def wait(value: Any) -> Any:
        return await value if isawaitable(value) else value

    async def gather() -> list[Any]:
        import asyncio

        return await asyncio.gather(*map(wait, values))

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
        return await outcome if isawaitable(outcome) else outcome

    return wait()


def is_async(function: Any) -> bool:
    """Whether a function, method or callable object is defined by `async def`."""
    return iscoroutinefunction(function) or iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _loop_thread() -> LoopThread:
    global _thread
    from assay.endpoint import LoopThread

    with _lock:
        if _thread is None or not _thread.running:
            _thread = LoopThread()
        return _thread


def _in_another_loop(value: Awaitable[Any]) -> Any:
    from assay.endpoint import LoopThread

    async def wait() -> Any:
        return await value

    thread = LoopThread()
    try:
        return thread.call(wait())
    finally:
        thread.stop()
