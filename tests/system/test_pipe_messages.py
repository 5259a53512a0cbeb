"""Messages between processes over pipes."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from assay.system.spawn import MAX_JSON, BadMessage, JsonReader, LoopPipe, encode_json, send_bytes, send_json


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        with suppress(OSError):  # a test may have closed it
            os.close(descriptor)


def soon() -> float:
    return time.monotonic() + 30


def test_messages_are_received_one_by_one_however_they_arrive(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    reader = JsonReader(reading)
    messages = [{"kind": "verdict", "text": "é\ud800\U0001f600" * size, "reward": 0.1} for size in (0, 1, 5, 3000)]
    for message in messages:
        send_json(writing, message)
    assert [reader.receive(soon()) for _ in messages] == messages
    for message in messages[:3]:
        stream = struct.pack("<Q", len(encode_json(message))) + encode_json(message)
        writer = threading.Thread(
            target=lambda data=stream: [os.write(writing, data[i : i + 1]) for i in range(len(data))]
        )
        writer.start()
        assert reader.receive(soon()) == message
        writer.join()


def test_large_message_is_received_completely(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    message = {"kind": "verdict", "text": "x" * (MAX_JSON - 100)}
    writer = threading.Thread(target=lambda: send_json(writing, message))
    writer.start()
    assert JsonReader(reading).receive(soon()) == message
    writer.join()
    with pytest.raises(BadMessage, match="longer"):
        encode_json({"kind": "x" * MAX_JSON})


def test_closed_pipe_and_deadline_raise_different_errors(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    reader = JsonReader(reading)
    with pytest.raises(TimeoutError):
        reader.receive(time.monotonic() + 0.01)
    os.write(writing, b"\x05\0\0")  # a part of the length
    with pytest.raises(TimeoutError):
        reader.receive(time.monotonic() + 0.01)
    os.close(writing)
    with pytest.raises(EOFError):
        reader.receive(soon())


class _Executed:
    ran = False

    def __reduce__(self) -> Any:
        return exec, ("from test_messages import _Executed; _Executed.ran = True",)


BAD = (
    *(b"", b"[]", b'{"kind": 1}', b'{"kind": "verdict"', b"\xff\xfe\x00", b"[" * 100_000, b"1" * 5000),
    pickle.dumps(_Executed()),
)


def test_invalid_payloads_are_rejected(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    for payload in BAD:
        writer = threading.Thread(target=send_bytes, args=(writing, payload))
        writer.start()
        with pytest.raises(BadMessage):
            JsonReader(reading).receive(soon())
        writer.join()
    assert not _Executed.ran


def test_excessive_lengths_are_rejected_before_reading(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, struct.pack("<Q", MAX_JSON + 1))
    with pytest.raises(BadMessage, match="announces"):
        JsonReader(reading).receive(soon())


def test_corrupted_bytes_are_a_message_or_a_protocol_error() -> None:
    chance = random.Random(0)
    good = {"kind": "verdict", "index": 3, "reward": 1.0, "parts": {"accuracy": 1.0}, "parsed": "1/2", "detail": ""}
    stream = struct.pack("<Q", len(encode_json(good))) + encode_json(good)
    for trial in range(3000):
        if trial % 3 == 0:
            data = chance.randbytes(chance.randrange(200))
        else:
            damaged = bytearray(stream * 2)
            for _ in range(chance.randrange(1, 4)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            data = bytes(damaged[: chance.randrange(len(damaged))]) if trial % 3 == 1 else bytes(damaged)
        reading, writing = os.pipe()
        os.write(writing, data)
        os.close(writing)
        reader = JsonReader(reading)
        try:
            for _ in range(3):
                message = reader.receive(soon())
                assert isinstance(message, dict) and json.dumps(message)
        except (EOFError, BadMessage):
            pass
        finally:
            os.close(reading)


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
