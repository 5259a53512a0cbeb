"""Calls to a worker process: results, errors and warnings come back, and the worker ends with its parent."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.process.remote import RemoteWorker, WorkerDied, reply

MODULE = """
import os, signal, warnings
from assay.process.remote import serve

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


def test_warnings_are_part_of_the_reply() -> None:
    def work() -> int:
        warnings.warn("take care", FutureWarning, stacklevel=1)
        return 3

    assert reply(work, ()) == (3, None, [(FutureWarning, "take care")])
