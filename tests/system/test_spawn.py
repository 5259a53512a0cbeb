"""Child processes: messages, signals, exit codes and remote method calls. Supervised children are tested in
test_worker_pool and test_sandbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.system.spawn import (
    ChildProcess,
    RemoteWorker,
    WorkerDied,
    exit_reason,
    ignore_stop_signals,
    receive,
    reply,
    send,
    take_pipes,
)


def main() -> None:
    """The child: answers commands."""
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    print("this goes to stderr, not into the messages")
    while True:
        command, argument = receive(incoming)
        if command == "exit":
            os._exit(argument)
        if command == "program":  # programs that a child starts receive stop signals as usual
            program = subprocess.Popen(["sleep", "60"])
            program.send_signal(argument)
            send(outgoing, program.wait())
        if command == "echo":
            send(outgoing, argument)


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    process = ChildProcess(__name__)
    yield process
    process.close()


def test_messages_are_exchanged_with_a_child(child: ChildProcess) -> None:
    for message in ("text", {"a": [1.5, None]}, b"x" * 1_000_000):
        child.send(("echo", message))
        assert child.receive() == message
    assert child.running


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_signals_end_neither_a_starting_nor_a_running_child(child: ChildProcess, signum: signal.Signals) -> None:
    child.process.send_signal(signum)  # it is still starting
    child.send(("echo", 1))
    assert child.receive() == 1
    child.process.send_signal(signum)
    child.send(("program", signum))
    assert child.receive() == -signum
    assert child.running


def test_end_of_a_child(child: ChildProcess) -> None:
    child.send(("exit", 3))
    with pytest.raises(EOFError):
        child.receive()
    child.process.wait()
    assert child.close() == "exit code 3"


def test_stop_kills_a_child_and_close_reports_it(child: ChildProcess) -> None:
    child.stop()
    deadline = time.monotonic() + 30
    while child.running and time.monotonic() < deadline:
        time.sleep(0.01)
    child.stop()  # has no effect on a process that has ended
    assert child.close() == "killed by SIGKILL"


def test_exit_reason() -> None:
    reasons = {0: "exit code 0", -9: "killed by SIGKILL", 139: "killed by SIGSEGV", 255: "exit code 255"}
    assert {code: exit_reason(code) for code in reasons} == reasons


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
def worker(module: str) -> Iterator[RemoteWorker]:
    worker = RemoteWorker(module)
    yield worker
    worker.close()


def test_results_warnings_and_errors_come_back_and_stop_signals_are_ignored(worker: RemoteWorker) -> None:
    with pytest.warns(FutureWarning, match="take care"):
        assert worker.call("add", 2, 3) == 5
    with pytest.raises(KeyError, match="no such entry") as raised:
        worker.call("fail")
    assert "in fail" in raised.value.__notes__[0]  # the traceback of the worker
    assert worker.call("interrupted") == "still alive"
    with pytest.raises(WorkerDied) as died:
        worker.call("die")
    assert died.value.exit_code == -signal.SIGKILL and not worker.running


def test_a_worker_inherits_descriptors_and_ends_when_its_pipe_is_closed(module: str) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"content")
    worker = RemoteWorker(module, pass_fds=[reading])
    assert worker.call("read", reading) == b"content"
    assert worker.process.stdin is not None
    worker.process.stdin.close()  # as the end of this process would
    assert worker.process.wait() == 1
    worker.close()
    os.close(reading)
    os.close(writing)


def test_an_error_that_cannot_be_pickled_is_replaced_by_a_runtime_error() -> None:
    def fail() -> None:
        raise Odd("this", "that")

    result, error, _ = reply(fail, ())
    assert result is None and isinstance(error, RuntimeError) and str(error) == "Odd: this and that"
