"""Judging in worker processes, with a hard time limit for each answer.

Each worker is a fresh interpreter, owned by one thread of ours that feeds it chunks from a shared queue. So `judge` may
be called from any thread.

The items of one call of a pool: cut into chunks for the workers, put together again in order.

The parent's side of one judging process. Nothing that the process sends is trusted: it may run a model's code.

How far judging processes are confined, and what they find in their environment.

strict  judges of this package and the Python tool: no network, no new processes, no changes to files, and reads only of
        what imports need
basic   users' own code: a process namespace, few environment variables, resource limits; files and network as usual
off     on request: the whole environment, and no limits but time and memory

At every level a worker and everything it started is killed together.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import pickle
import queue
import re
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from assay.process.messages import BadMessage, JsonReader, send
from assay.process.spawn import KILL_LIMIT_S, STOP, command, ending
from assay.rewards.judge import FunctionJudge, Judge, failed, judge_safely, one_line
from assay.types import Status, UserError, Verdict


class JudgePool:
    """Judges items in `workers` processes; verdicts come back in the order of the items.

    An answer that takes longer than `timeout_s` gets status timeout; its worker is killed, with everything it started,
    and replaced. If a worker dies (a crash, the kernel's out-of-memory killer), its answer is judged once more in a new
    one; if that dies too, the status is error. Each process may use `memory_gb` of address space. `sandbox` and
    `pass_env` are those of the `reward` settings: see `assay.rewards.pool`. `workers=0` judges in this process: for
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


Item = tuple[str, str, Mapping[str, Any]]  # completion, gold answer, fields

MAX_CHUNK = 64
MAX_CHUNK_CHARS = 1_000_000


class Batch:
    """The verdicts of one call of `judge`, filled in by several threads."""

    def __init__(self, size: int) -> None:
        self._verdicts: list[Verdict | None] = [None] * size
        self._missing = size
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, index: int, verdict: Verdict) -> None:
        with self._changed:
            assert self._verdicts[index] is None, "an item was judged twice"
            self._verdicts[index] = verdict
            self._missing -= 1
            if not self._missing:
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self) -> list[Verdict]:
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._error is not None or not self._missing)
            except BaseException as error:  # interrupted: nobody waits for the rest, so it is not worth judging
                self._error = error
                raise
            if self._error is not None:
                raise self._error
            return [verdict for verdict in self._verdicts if verdict is not None]


class JudgeChunk:
    """Some items of a batch, with their places in it; shortened from the front as verdicts come in."""

    def __init__(self, batch: Batch, items: list[tuple[int, str, str, dict[str, Any]]], retried: bool = False) -> None:
        self.batch = batch
        self.items = items
        self.retried = retried  # a worker was lost on the first item already

    def put(self, verdict: Verdict) -> None:
        self.batch.put(self.items[0][0], verdict)
        del self.items[0]
        self.retried = False

    def first_again(self) -> JudgeChunk:
        """Take out the first item, to be judged once more in another worker."""
        return JudgeChunk(self.batch, [self.items.pop(0)], retried=True)

    def halves(self) -> list[JudgeChunk]:
        middle = (len(self.items) + 1) // 2
        return [JudgeChunk(self.batch, part) for part in (self.items[:middle], self.items[middle:]) if part]


def split(batch: Batch, items: Sequence[Item], workers: int) -> list[JudgeChunk]:
    """Small enough that all workers have work to the end and no message is huge."""
    size = max(1, min(MAX_CHUNK, -(-len(items) // (workers * 4))))
    chunks: list[JudgeChunk] = []
    room = 0
    for index, (completion, answer, fields) in enumerate(items):
        if not chunks or len(chunks[-1].items) == size or len(completion) > room:
            chunks.append(JudgeChunk(batch, []))
            room = MAX_CHUNK_CHARS
        chunks[-1].items.append((index, completion, answer, dict(fields)))
        room -= len(completion)
    return chunks


START_LIMIT_S = 120.0  # to start an interpreter and import what the judge needs
_STATUSES = [str(status.value) for status in Status]
LOST = (EOFError, BrokenPipeError, BadMessage)  # what a worker raises that died, or that cannot be trusted any more


class StartFailed(Exception):
    """The worker could not take up its work; the message is for the user."""


class WorkerSettings:
    """What all workers of a pool are started with."""

    def __init__(
        self, judge: Judge, timeout_s: float, memory_gb: float | None, sandbox: Sandbox, pass_env: Sequence[str]
    ) -> None:
        self.judge = judge
        self.timeout_s = timeout_s
        self.level = level_for(judge, sandbox)
        self.environment = environment(self.level, pass_env)
        self.setup = {
            "judge": _pickled(judge),
            "timeout_s": timeout_s,
            "memory_gb": memory_gb,
            "level": self.level,
            "user_code": is_user_code(judge),
        }

    def hinted(self, detail: str) -> str:
        return with_hint(detail, self.level, self.environment)


class WorkerProcess:
    """A fresh interpreter in a session of its own, with a supervisor that kills it and all it started.

    Owned by one thread; only `stop` may be called by others.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._loads = 0
        self._ended = threading.Lock()  # held while the process is reaped, whose number may then be another's
        namespaces = settings.level != "off" and FINDINGS.no_namespaces is None
        options = {"namespaces": namespaces, "network": settings.level != "strict"}
        self._process = subprocess.Popen(
            command("assay.rewards.worker", json.dumps(options)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=settings.environment,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input = self._process.stdin.fileno()
        self._messages = JsonReader(self._process.stdout.fileno())
        os.set_blocking(self._input, False)

    def prepare(self) -> bool:
        """Hand over the judge and wait until it is loaded. False: start another, without namespaces."""
        deadline = time.monotonic() + START_LIMIT_S
        try:
            send(self._input, self._settings.setup, deadline)
            message = self._messages.receive(deadline)
        except TimeoutError:
            raise StartFailed(f"a judging process was not ready after {START_LIMIT_S:g} s") from None
        if message["kind"] == "refused":
            FINDINGS.no_namespaces = str(message.get("why"))
            return False
        if message["kind"] == "failed":
            why = self._settings.hinted(str(message.get("why")))
            raise StartFailed(f"the judge cannot be used in a worker process: {why}")
        if message["kind"] != "ready":
            raise BadMessage("it came before the judge was ready")
        missing = [str(name) for name in message.get("missing") or ()]
        if self._settings.level != "off" and FINDINGS.no_namespaces is not None:
            missing.append(f"a process namespace ({FINDINGS.no_namespaces})")
        FINDINGS.missing(self._settings.level, missing)
        return True

    def send(self, items: Sequence[Any]) -> None:
        """Items to judge. TimeoutError if the process does not read them."""
        send(self._input, items, time.monotonic() + START_LIMIT_S)

    def next_verdict(self, index: int) -> Verdict:
        """The verdict on the item with this index. TimeoutError when its time is over, one of LOST if there is none."""
        deadline = time.monotonic() + self._settings.timeout_s
        loading = False
        while True:
            message = self._messages.receive(deadline)
            if message["kind"] == "loading" and not self._loads:  # once: a worker must not stop its clock at will
                self._loads, loading = 1, True
                deadline = time.monotonic() + START_LIMIT_S
            elif message["kind"] == "loaded" and loading:
                loading = False
                deadline = time.monotonic() + self._settings.timeout_s
            else:
                return self._verdict(message, index)

    def _verdict(self, message: dict[str, Any], index: int) -> Verdict:
        if message["kind"] != "verdict" or type(message.get("index")) is not int or message["index"] != index:
            raise BadMessage("it is not the verdict that was asked for")
        reward, status, parsed = message.get("reward"), message.get("status"), message.get("parsed")
        parts, detail = message.get("parts"), message.get("detail")
        if type(reward) is not float or not math.isfinite(reward) or status not in _STATUSES:
            raise BadMessage("its reward or status is none")
        if not isinstance(parsed, str | None) or not isinstance(detail, str) or not isinstance(parts, dict):
            raise BadMessage("its fields are not what a verdict has")
        if not all(type(value) is float for value in parts.values()):
            raise BadMessage("its parts are not numbers")
        if status == Status.ERROR.value:
            detail = self._settings.hinted(detail)
        return Verdict(reward, Status(status), parsed, parts, detail)

    def stop(self) -> None:
        """Have everything killed, without waiting."""
        with self._ended:
            if self._process.returncode is None:
                self._process.send_signal(STOP)

    def close(self) -> str:
        """Kill it and all it started, if it has not ended, and say how it ended."""
        with self._ended:
            try:
                self._process.wait(timeout=0.05)  # one that died by itself leaves its own exit code
            except subprocess.TimeoutExpired:
                self._process.send_signal(STOP)
                try:
                    self._process.wait(timeout=KILL_LIMIT_S + 1)
                except subprocess.TimeoutExpired:
                    os.killpg(self._process.pid, signal.SIGKILL)
                    self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return ending(self._process.returncode)


def _pickled(judge: Judge) -> bytes:
    try:
        return pickle.dumps(judge)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"this judge cannot be sent to worker processes: {one_line(error)}; "
            "make it a dataclass at the top of a module, or name a function by its path"
        ) from None


Level = Literal["strict", "basic", "off"]
Sandbox = Literal["auto", "strict", "off"]  # what users may choose

_PYTHON = (
    "PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX "
    "PYTHONWARNINGS PYTHONFAULTHANDLER PYTHONMALLOC PYTHONUNBUFFERED PYTHONNOUSERSITE PYTHONUSERBASE"
)
_ALWAYS = f"PATH LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX {_PYTHON}".split()
_USER = "HOME USER LOGNAME SHELL XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE SSL_CERT_FILE SSL_CERT_DIR"
_FOR_USERS = f"CUDA_VISIBLE_DEVICES CUDA_HOME {_USER}".split()
_PATTERN = re.compile(r"LC_[A-Z]+|[A-Z]+_NUM_THREADS")


def level_for(judge: Any, sandbox: Sandbox) -> Level:
    if sandbox != "auto":
        return sandbox
    return "basic" if is_user_code(judge) else "strict"


def is_user_code(judge: Any) -> bool:
    """Whether judging runs code that is not part of this package."""
    inner = getattr(judge, "judge", None)
    if inner is not None and not isinstance(judge, FunctionJudge):
        return _is_foreign(judge) or is_user_code(inner)
    return isinstance(judge, FunctionJudge) or _is_foreign(judge)


def _is_foreign(judge: Any) -> bool:
    module = judge.__module__ if hasattr(judge, "__qualname__") else type(judge).__module__
    return module.partition(".")[0] != "assay"


def environment(level: Level, pass_env: Sequence[str] = ()) -> dict[str, str]:
    """The environment variables of a worker: no tokens or keys but those the user names."""
    missing = [name for name in pass_env if name not in os.environ]
    if missing:
        raise UserError(f"reward.pass_env names {missing[0]}, which is not set: set it, or leave it out")
    if level == "off":
        return {"OMP_NUM_THREADS": "1", **os.environ}
    names = {*_ALWAYS, *pass_env, *(_FOR_USERS if level == "basic" else ())}
    passed = {name: value for name, value in os.environ.items() if name in names or _PATTERN.fullmatch(name)}
    # With a fixed hash seed, sets of texts have the same order in every process.
    return {"OMP_NUM_THREADS": "1", "HOME": "/", "PYTHONHASHSEED": "0", **passed}


def with_hint(detail: str, level: Level, passed: Mapping[str, str]) -> str:
    """A failure that comes from confinement says which setting allows what was tried."""
    if level == "off":
        return detail
    for name in re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\b[A-Z]{5,}\b", detail):
        if name in os.environ and name not in passed:
            return f'{detail} (judging processes do not see {name}: set reward.pass_env = ["{name}"])'
    if level == "strict" and re.search(
        r"PermissionError|Errno 1[,\]]|Errno 13\b|Permission denied|not permitted", detail
    ):
        return f"{detail} (the sandbox allows no network, files or new processes: see reward.sandbox)"
    return detail


class _Findings:
    """What this system refuses, as workers report it; said once per process."""

    def __init__(self) -> None:
        self.no_namespaces: str | None = None
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def missing(self, level: Level, names: Iterable[str]) -> None:
        names = list(names)
        if not names:
            return
        text = f"judging processes ({level} sandbox) run without {', and without '.join(names)}"
        with self._lock:
            if text in self._told:
                return
            self._told.add(text)
        warnings.warn(f"{text}: this system does not offer it (docs/tasks.md, 'Isolation')", stacklevel=2)


FINDINGS = _Findings()
