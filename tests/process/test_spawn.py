"""Child processes: messages, signals and exit codes. Supervised children are tested in test_worker_pool and
test_sandbox."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from assay.process.messages import receive, send
from assay.process.spawn import ChildProcess, exit_reason, ignore_stop_signals, take_pipes


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
        if command == "descriptor":
            send(outgoing, os.read(argument, 100))


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


def test_child_inherits_only_the_given_descriptors() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"inherited")
    child = ChildProcess(__name__, pass_fds=[reading])
    child.send(("descriptor", reading))
    assert child.receive() == b"inherited"
    child.close()
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (139, "killed by SIGSEGV"),
        (255, "exit code 255"),
    ],
)
def test_exit_reason(code: int, reason: str) -> None:
    assert exit_reason(code) == reason
