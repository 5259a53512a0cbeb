"""Calls of users' functions: results, which may have to be awaited, time limits, and warnings about long calls."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from waiting import until

from assay.system.awaiting import attempt, is_async, resolve, run_with_timeout, then, together, warn_after


async def double(number: float) -> float:
    await asyncio.sleep(0)
    return 2 * number


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_awaitables_are_awaited_in_one_loop_from_every_thread_and_inside_other_loops() -> None:
    loops = [resolve(running_loop())]
    thread = threading.Thread(target=lambda: loops.append(resolve(running_loop())))
    thread.start()
    thread.join()

    async def cell() -> None:  # of a notebook
        loops.append(resolve(running_loop()))
        assert loops[-1] is not asyncio.get_running_loop()

    asyncio.run(cell())
    assert len(loops) == 3 and len(set(loops)) == 1


def test_plain_function_called_by_an_async_one_may_wait_for_another_async_function() -> None:
    async def outer() -> float:
        return resolve(double(2)) + await double(1)

    assert resolve(outer()) == 6


def test_values_are_passed_on_plain_or_awaitable() -> None:
    assert resolve(3) == 3 and then(3, str) == "3" and together([1, 2]) == [1, 2]
    assert resolve(then(double(3), str)) == "6"

    async def meet(barrier: asyncio.Barrier) -> int:
        async with asyncio.timeout(30):
            return await barrier.wait()

    async def all_at_once() -> Any:
        barrier = asyncio.Barrier(2)
        return await together([meet(barrier), 7, meet(barrier)])

    first, plain, second = resolve(all_at_once())
    assert {first, second} == {0, 1} and plain == 7


@pytest.mark.parametrize("error", [KeyError, SystemExit, asyncio.CancelledError])
def test_errors_are_handled_alike_at_the_call_and_when_awaited(error: type[BaseException]) -> None:
    def plain() -> None:
        raise error

    async def later() -> None:
        await asyncio.sleep(0)
        raise error

    handled: Any = (error,)
    assert attempt(plain, type, handled) is resolve(attempt(later, type)) is error
    with pytest.raises(ValueError, match="not handled"):
        resolve(attempt(lambda: then(double(1), lambda _: (_ for _ in ()).throw(ValueError("not handled"))), fail))


def fail(error: BaseException) -> None:
    raise error


def test_interrupted_work_is_cancelled_and_not_handled_as_an_error() -> None:
    handled: list[BaseException] = []

    async def interrupted() -> None:
        task = asyncio.ensure_future(attempt(lambda: asyncio.sleep(60), handled.append))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    resolve(interrupted())
    assert not handled


def test_async_functions_are_recognised() -> None:
    class Callable:
        async def __call__(self) -> None: ...

    assert is_async(double) and is_async(Callable()) and not is_async(len) and not is_async(None)


def test_time_limit_and_warning_after_a_delay(recwarn: pytest.WarningsRecorder) -> None:
    assert run_with_timeout(0, lambda: 1) == run_with_timeout(60.0, lambda: 1) == 1
    with pytest.raises(TimeoutError, match=r"0\.01 s"):
        run_with_timeout(0.01, lambda: time.sleep(0.5))
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(60.0, lambda: 1 / 0)
    with warn_after(60.0, "too early"):
        pass
    with warn_after(0.01, "still running"):
        until(lambda: bool(recwarn.list), 10)
    assert [str(warning.message) for warning in recwarn.list] == ["still running"]
