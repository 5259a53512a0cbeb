"""Child processes: messages, signals, exit codes and remote method calls. Supervised children are tested in
test_worker_pool and test_sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from assay.system import spawn


def main() -> None:
    """The child: answers commands."""
    incoming, outgoing = spawn.take_pipes()
    spawn.ignore_stop_signals()
    print("this goes to stderr, not into the messages")
    while True:
        command, argument = spawn.receive(incoming)
        if command == "exit":
            os._exit(argument)
        if command == "program":  # programs that a child starts receive stop signals as usual
            program = subprocess.Popen(["sleep", "60"])
            program.send_signal(argument)
            spawn.send(outgoing, program.wait())
        if command == "echo":
            spawn.send(outgoing, argument)


@pytest.fixture
def child() -> Iterator[spawn.ChildProcess]:
    process = spawn.ChildProcess(__name__)
    yield process
    process.close()


def test_messages_are_exchanged_with_a_child(child: spawn.ChildProcess) -> None:
    for message in ("text", {"a": [1.5, None]}, b"x" * 1_000_000):
        child.send(("echo", message))
        assert child.receive() == message
    assert child.running


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_end_neither_a_starting_nor_a_running_child(
    child: spawn.ChildProcess, signum: signal.Signals
) -> None:
    child.process.send_signal(signum)  # it is still starting
    child.send(("echo", 1))
    assert child.receive() == 1
    child.process.send_signal(signum)
    child.send(("program", signum))
    assert child.receive() == -signum
    assert child.running


def test_end_of_a_child(child: spawn.ChildProcess) -> None:
    child.send(("exit", 3))
    with pytest.raises(EOFError):
        child.receive()
    child.process.wait()
    assert child.close() == "exit code 3"


def test_stop_kills_a_child_and_close_reports_it(child: spawn.ChildProcess) -> None:
    child.stop()
    until(lambda: not child.running, 30)
    child.stop()  # has no effect on a process that has ended
    assert child.close() == "killed by SIGKILL"


def test_exit_reason() -> None:
    reasons = {0: "exit code 0", -9: "killed by SIGKILL", 139: "killed by SIGSEGV", 255: "exit code 255"}
    assert {code: spawn.exit_reason(code) for code in reasons} == reasons


MODULE = """
import os, signal, warnings
from assay.system.spawn import serve

class Target:
    def add(self, one, two):
        warnings.warn("take care", FutureWarning)
        print("not a reply")
        return one + two

    def fail(self):
        raise KeyError("no such entry")

    def read(self, descriptor):
        return os.read(descriptor, 10)

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGINT)
        return "still alive"

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

def main():
    serve(Target())
"""


class Odd(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")  # cannot be unpickled


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "remote_target.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "remote_target"


@pytest.fixture
def worker(module: str) -> Iterator[spawn.RemoteWorker]:
    worker = spawn.RemoteWorker(module)
    yield worker
    worker.close()


def test_results_warnings_and_errors_come_back_and_stop_signals_are_ignored(worker: spawn.RemoteWorker) -> None:
    with pytest.warns(FutureWarning, match="take care"):
        assert worker.call("add", 2, 3) == 5
    with pytest.raises(KeyError, match="no such entry") as raised:
        worker.call("fail")
    assert "in fail" in raised.value.__notes__[0]  # the traceback of the worker
    assert worker.call("interrupted") == "still alive"
    with pytest.raises(spawn.WorkerDied) as died:
        worker.call("die")
    assert died.value.exit_code == -signal.SIGKILL and not worker.running


def test_a_worker_inherits_descriptors_and_ends_when_its_pipe_is_closed(module: str) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"content")
    worker = spawn.RemoteWorker(module, pass_fds=[reading])
    assert worker.call("read", reading) == b"content"
    worker.process.stdin.close()  # as the end of this process would
    assert worker.process.wait() == 1
    worker.close()
    os.close(reading)
    os.close(writing)


def test_an_error_that_cannot_be_pickled_is_replaced_by_a_runtime_error() -> None:
    def fail() -> None:
        raise Odd("this", "that")

    result, error, _ = spawn.reply(fail, ())
    assert result is None and isinstance(error, RuntimeError) and str(error) == "Odd: this and that"


# Messages over pipes


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
    reader = spawn.JsonReader(reading)
    messages = [{"kind": "verdict", "text": "é\ud800\U0001f600" * size, "reward": 0.1} for size in (0, 1, 5, 3000)]
    for message in messages:
        spawn.send_json(writing, message)
    assert [reader.receive(soon()) for _ in messages] == messages
    for message in messages[:3]:
        stream = struct.pack("<Q", len(spawn.encode_json(message))) + spawn.encode_json(message)
        writer = threading.Thread(
            target=lambda data=stream: [os.write(writing, data[i : i + 1]) for i in range(len(data))]
        )
        writer.start()
        assert reader.receive(soon()) == message
        writer.join()


def test_large_message_is_received_completely(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    message = {"kind": "verdict", "text": "x" * (spawn.MAX_JSON - 100)}
    writer = threading.Thread(target=lambda: spawn.send_json(writing, message))
    writer.start()
    assert spawn.JsonReader(reading).receive(soon()) == message
    writer.join()
    with pytest.raises(spawn.BadMessage, match="longer"):
        spawn.encode_json({"kind": "x" * spawn.MAX_JSON})


def test_closed_pipe_and_deadline_raise_different_errors(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    reader = spawn.JsonReader(reading)
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
        writer = threading.Thread(target=spawn.send_bytes, args=(writing, payload))
        writer.start()
        with pytest.raises(spawn.BadMessage):
            spawn.JsonReader(reading).receive(soon())
        writer.join()
    assert not _Executed.ran


def test_excessive_lengths_are_rejected_before_reading(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, struct.pack("<Q", spawn.MAX_JSON + 1))
    with pytest.raises(spawn.BadMessage, match="announces"):
        spawn.JsonReader(reading).receive(soon())


def test_corrupted_bytes_are_a_message_or_a_protocol_error() -> None:
    chance = random.Random(0)
    good = {"kind": "verdict", "index": 3, "reward": 1.0, "parts": {"accuracy": 1.0}, "parsed": "1/2", "detail": ""}
    stream = struct.pack("<Q", len(spawn.encode_json(good))) + spawn.encode_json(good)
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
        reader = spawn.JsonReader(reading)
        try:
            for _ in range(3):
                message = reader.receive(soon())
                assert isinstance(message, dict) and json.dumps(message)
        except (EOFError, spawn.BadMessage):
            pass
        finally:
            os.close(reading)


async def connected() -> tuple[spawn.LoopPipe, spawn.LoopPipe]:
    (one_in, other_out), (other_in, one_out) = os.pipe(), os.pipe()
    one = spawn.LoopPipe(os.fdopen(one_in, "rb", 0), os.fdopen(one_out, "wb", 0))
    other = spawn.LoopPipe(os.fdopen(other_in, "rb", 0), os.fdopen(other_out, "wb", 0))
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
