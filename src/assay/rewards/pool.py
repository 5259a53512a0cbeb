"""Judging in worker processes, with a hard time limit for each answer.

Each worker is a fresh interpreter, owned by one thread of ours that feeds it chunks from a shared queue. So `judge` may
be called from any thread.
"""

from __future__ import annotations

import atexit
import os
import pickle
import queue
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from assay.rewards.batches import Batch, Chunk, Item, split
from assay.rewards.frames import receive, send
from assay.rewards.fresh import command, ending
from assay.rewards.judge import Judge, failed, judge_safely, one_line
from assay.types import Status, UserError, Verdict

START_LIMIT_S = 120.0  # to start an interpreter and import what the judge needs


class JudgePool:
    """Judges items in `workers` processes; verdicts come back in the order of the items.

    An answer that takes longer than `timeout_s` gets status timeout and its worker is replaced; a worker that dies
    (a crash, `memory_gb` of address space used up) gives that answer status error. `workers=0` judges in this process:
    for tests and trusted judges, for nothing then limits time or memory.
    """

    def __init__(self, judge: Judge, workers: int = 2, timeout_s: float = 5.0, memory_gb: float | None = 4.0) -> None:
        if workers < 0:
            raise UserError(f"the number of judging workers cannot be negative ({workers})")
        if not timeout_s > 0:
            raise UserError(f"the time limit for judging must be above 0 seconds, not {timeout_s}")
        self._judge = judge
        self._workers = workers
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[_WorkerThread] = []
        self._closed = False
        self._owner = os.getpid()
        if workers:
            self._setup = {"judge": _pickled(judge), "timeout_s": timeout_s, "memory_gb": memory_gb}

    def __enter__(self) -> JudgePool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        """One verdict for each (completion, gold answer, fields), in order."""
        if self._closed:
            raise RuntimeError("the judge pool is closed")
        if not items:
            return []
        if self._workers == 0:
            return [judge_safely(self._judge, *item) for item in items]
        if os.getpid() != self._owner:
            raise RuntimeError("a judge pool cannot be used in a forked process: make one there")
        self._start_threads()
        batch = Batch(len(items))
        for chunk in split(batch, items, self._workers):
            self._jobs.put(chunk)
        return batch.wait()

    def close(self) -> None:
        """End the workers. Calls of `judge` still waiting in other threads fail."""
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
                chunk.batch.fail(RuntimeError("the judge pool was closed"))

    def _start_threads(self) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("the judge pool is closed")
            if not self._threads:
                self._threads = [_WorkerThread(self._jobs, self._judge, self._setup) for _ in range(self._workers)]
                for thread in self._threads:
                    thread.start()
                atexit.register(self.close)


class _StartFailed(Exception):
    """The worker could not take up its work; the message is for the user."""


class _WorkerThread(threading.Thread):
    """Owns one worker process at a time: starts it when there is work, watches its clock, replaces it."""

    def __init__(self, jobs: queue.SimpleQueue[Chunk | None], judge: Judge, setup: dict[str, Any]) -> None:
        super().__init__(name="assay-judge", daemon=True)
        self._jobs = jobs
        self._judge = judge
        self._setup = setup
        self._timeout_s: float = setup["timeout_s"]
        self._process: subprocess.Popen[bytes] | None = None
        self._process_lock = threading.Lock()
        self._stopping = False

    def stop(self) -> None:
        """Kill the process; the thread ends after that. Called from another thread."""
        with self._process_lock:
            self._stopping = True
            if self._process is not None:
                self._process.kill()

    def run(self) -> None:
        while (chunk := self._jobs.get()) is not None:
            if chunk.batch.failed:
                continue
            try:
                self._serve(chunk)
            except _StartFailed as error:
                chunk.batch.fail(UserError(str(error)))
            except BaseException as error:  # a thread must not die silently and leave a caller waiting
                chunk.batch.fail(error)
        self._discard()

    def _serve(self, chunk: Chunk) -> None:
        """Judge a chunk. If the worker is lost on the way, that item has its verdict and the rest is queued again."""
        process = self._ready_process()
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin.fileno(), chunk.items)
            while chunk.items:
                message = self._next_message(process.stdout.fileno())
                if message is None:
                    self._discard()
                    detail = f"judging took longer than {self._timeout_s:g} s"
                    chunk.put(failed(self._judge, Status.TIMEOUT, detail))
                    break
                chunk.put(_verdict(message[2]))
        except (EOFError, BrokenPipeError):
            how = self._discard()
            if self._stopping:
                raise RuntimeError("the judge pool was closed") from None
            chunk.put(failed(self._judge, Status.ERROR, f"the judging process died ({how})"))
        for part in chunk.halves():
            self._jobs.put(part)

    def _next_message(self, descriptor: int) -> Any:
        """The next verdict, or None when the time for it is over. Loading a library does not count."""
        deadline = time.monotonic() + self._timeout_s
        while _readable(descriptor, deadline):
            message = receive(descriptor)
            if message[0] == "verdict":
                return message
            deadline = time.monotonic() + (START_LIMIT_S if message[0] == "loading" else self._timeout_s)
        return None

    def _ready_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with self._process_lock:
            if self._stopping:
                raise RuntimeError("the judge pool was closed")
            self._process = process = subprocess.Popen(
                command("assay.rewards.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                bufsize=0,
            )
        assert process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin.fileno(), self._setup)
            if not _readable(process.stdout.fileno(), time.monotonic() + START_LIMIT_S):
                raise _StartFailed(f"a judging process was not ready after {START_LIMIT_S:g} s")
            message = receive(process.stdout.fileno())
        except (EOFError, BrokenPipeError):
            how = self._discard()
            if self._stopping:
                raise RuntimeError("the judge pool was closed") from None
            raise _StartFailed(f"a judging process died at its start ({how}); see its error output") from None
        except _StartFailed:
            self._discard()
            raise
        if message[0] == "failed":
            self._discard()
            raise _StartFailed(f"the judge cannot be used in a worker process: {message[1]}")
        return process

    def _discard(self) -> str:
        """Kill the process, if any, and say how it ended."""
        with self._process_lock:
            process, self._process = self._process, None
        if process is None:
            return "not started"
        try:
            process.wait(timeout=0.05)  # one that died by itself leaves its own exit code
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return ending(process.returncode)


def _readable(descriptor: int, deadline: float) -> bool:
    """Wait for something to read. Past the deadline it still looks once: a late reader is not a slow judge."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))


def _verdict(plain: tuple[float, str, str | None, dict[str, float], str]) -> Verdict:
    reward, status, parsed, parts, detail = plain
    return Verdict(reward, Status(status), parsed, parts, detail)


def _pickled(judge: Judge) -> bytes:
    try:
        return pickle.dumps(judge)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"this judge cannot be sent to worker processes: {one_line(error)}; "
            "make it a dataclass at the top of a module, or name a function by its path"
        ) from None
