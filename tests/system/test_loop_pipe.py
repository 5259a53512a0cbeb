"""Messages between two event loops."""

from __future__ import annotations

import asyncio
import os

import pytest

from assay.system.loop_pipe import LoopPipe


async def connected() -> tuple[LoopPipe, LoopPipe]:
    (one_in, other_out), (other_in, one_out) = os.pipe(), os.pipe()
    one = LoopPipe(os.fdopen(one_in, "rb", 0), os.fdopen(one_out, "wb", 0))
    other = LoopPipe(os.fdopen(other_in, "rb", 0), os.fdopen(other_out, "wb", 0))
    await one.open()
    await other.open()
    return one, other


def test_messages_of_an_iteration_and_of_its_futures_travel_together() -> None:
    async def run() -> None:
        one, other = await connected()
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: one.send("finished"))
        one.send(("chunk", [1, 2]))
        future.set_result(None)
        assert await other.receive() == [("chunk", [1, 2]), "finished"]
        other.send("answer")
        assert await one.receive() == ["answer"]
        one.close()
        other.close()

    asyncio.run(run())


def test_sending_does_not_wait_for_a_slow_reader_and_its_end_is_noticed() -> None:
    message = os.urandom(5 << 20)

    async def run() -> None:
        one, other = await connected()
        for number in range(3):
            one.send((number, message))
            await asyncio.sleep(0.01)  # nobody reads, and a pipe holds 64 KiB
        assert [await other.receive() for _ in range(3)] == [[(number, message)] for number in range(3)]
        one.close()
        with pytest.raises((EOFError, OSError)):
            await other.receive()
        other.send("nobody reads this")
        await asyncio.sleep(0.01)
        other.close()

    asyncio.run(run())
