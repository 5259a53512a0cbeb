"""Judging in worker processes, with a hard time limit for each answer.

Each worker is a fresh interpreter, owned by one thread of ours that feeds it chunks from a shared queue. So `judge` may
be called from any thread.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Sequence

from assay.rewards.batches import Batch, Item, JudgeChunk, split
from assay.rewards.frames import BadMessage
from assay.rewards.judge import Judge, failed, judge_safely
from assay.rewards.sandbox import Sandbox
from assay.rewards.worker_process import LOST, StartFailed, WorkerProcess, WorkerSettings
from assay.types import Status, UserError, Verdict


class JudgePool:
    """Judges items in `workers` processes; verdicts come back in the order of the items.

    An answer that takes longer than `timeout_s` gets status timeout; its worker is killed, with everything it started,
    and replaced. If a worker dies (a crash, the kernel's out-of-memory killer), its answer is judged once more in a new
    one; if that dies too, the status is error. Each process may use `memory_gb` of address space. `sandbox` and
    `pass_env` are those of the `reward` settings: see `assay.rewards.sandbox`. `workers=0` judges in this process: for
    tests and trusted judges, because nothing is limited then.
    """

    def __init__(
        self,
        judge: Judge,
        workers: int = 2,
        timeout_s: float = 5.0,
        memory_gb: float | None = 4.0,
        sandbox: Sandbox = "auto",
        pass_env: Sequence[str] = (),
    ) -> None:
        if workers < 0:
            raise UserError(f"the number of judging workers cannot be negative ({workers})")
        if not timeout_s > 0:
            raise UserError(f"the time limit for judging must be above 0 seconds, not {timeout_s}")
        if workers == 0 and sandbox == "strict":
            raise UserError("the training process itself cannot be a sandbox: set reward.workers to at least 1")
        self._judge = judge
        self._workers = workers
        self._jobs: queue.SimpleQueue[JudgeChunk | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[_WorkerThread] = []
        self._closed = False
        self._owner = os.getpid()
        if workers:
            self._settings = WorkerSettings(judge, timeout_s, memory_gb, sandbox, pass_env)

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
                self._threads = [_WorkerThread(self._jobs, self._settings) for _ in range(self._workers)]
                for thread in self._threads:
                    thread.start()
                atexit.register(self.close)


class _WorkerThread(threading.Thread):
    """Owns one worker process at a time: starts it when there is work, watches its clock, replaces it."""

    def __init__(self, jobs: queue.SimpleQueue[JudgeChunk | None], settings: WorkerSettings) -> None:
        super().__init__(name="assay-judge", daemon=True)
        self._jobs = jobs
        self._settings = settings
        self._worker: WorkerProcess | None = None
        self._worker_lock = threading.Lock()
        self._stopping = False

    def stop(self) -> None:
        """Kill the process; the thread ends after that. Called from another thread."""
        with self._worker_lock:
            self._stopping = True
            if self._worker is not None:
                self._worker.stop()

    def run(self) -> None:
        while (chunk := self._jobs.get()) is not None:
            if chunk.batch.failed:
                continue
            try:
                self._serve(chunk)
            except StartFailed as error:
                chunk.batch.fail(UserError(str(error)))
            except BaseException as error:  # a thread must not die silently and leave a caller waiting
                chunk.batch.fail(error)
        self._discard()

    def _serve(self, chunk: JudgeChunk) -> None:
        """Judge a chunk. If the worker is lost on the way, what has no verdict yet is queued again."""
        worker = self._ready_worker()
        again: list[JudgeChunk] = []
        try:
            worker.send(chunk.items)
            while chunk.items:
                chunk.put(worker.next_verdict(chunk.items[0][0]))
        except TimeoutError:
            self._discard()
            detail = f"judging took longer than {self._settings.timeout_s:g} s"
            chunk.put(failed(self._settings.judge, Status.TIMEOUT, detail))
        except LOST as error:
            how = self._lost(error)
            if chunk.retried:
                detail = f"the judging process failed twice: {how}"
                chunk.put(failed(self._settings.judge, Status.ERROR, self._settings.hinted(detail)))
            else:
                again = [chunk.first_again()]
        for part in (*again, *chunk.halves()):
            self._jobs.put(part)

    def _ready_worker(self) -> WorkerProcess:
        """The worker, or a new one. One that is lost at its start is replaced once, like one lost on an answer."""
        for last in (False, False, True):
            if self._worker is not None:
                return self._worker
            with self._worker_lock:
                self._check_open()
                worker = self._worker = WorkerProcess(self._settings)
            try:
                if worker.prepare():
                    return worker
                self._discard()
            except LOST as error:
                how = self._lost(error)
                if last:
                    raise StartFailed(f"judging processes die at their start ({how}); see their error output") from None
            except BaseException:
                self._discard()
                raise
        raise StartFailed("judging processes cannot be started")

    def _check_open(self) -> None:
        if self._stopping:
            raise RuntimeError("the judge pool was closed")

    def _lost(self, error: BaseException) -> str:
        """Discard a worker that died or sent nonsense; says which."""
        how = self._discard()
        self._check_open()
        return f"it sent a message that makes no sense: {error}" if isinstance(error, BadMessage) else how

    def _discard(self) -> str:
        """Kill the process, if any, and say how it ended."""
        with self._worker_lock:
            worker, self._worker = self._worker, None
        return "not started" if worker is None else worker.close()
