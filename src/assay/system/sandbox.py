"""Sandboxed worker processes: sandbox levels, their limits, and the loop that a worker of a `WorkerPool` runs.

strict  code of this package: no network, no new processes, no changes to files; only what imports need can be read
basic   users' code: a process namespace, few environment variables, resource limits; files and network as usual
off     on request: the whole environment, and no limits except time and memory

At every level a worker is killed together with everything it started.
"""

from __future__ import annotations

import builtins
import json
import os
import pickle
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import isawaitable
from types import ModuleType
from typing import Any, Literal

from assay.system import isolation
from assay.system.awaiting import value_of
from assay.system.spawn import (
    encode_json,
    fork_under_supervisor,
    ignore_stop_signals,
    receive,
    send_bytes,
    send_json,
    take_pipes,
)
from assay.types import UserError, describe_error

Level = Literal["strict", "basic", "off"]

CPU_GRACE_S = 120
MAX_NEW_TASKS = {"strict": 64, "basic": 1024}  # processes and threads beyond those that the machine runs now
MAX_FILE_BYTES = {"strict": 0, "basic": 4 << 30}

_CORES = os.cpu_count() or 1
_PYTHON = (
    "PYTHONPATH PYTHONHOME PYTHONHASHSEED PYTHONUTF8 PYTHONIOENCODING PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX "
    "PYTHONWARNINGS PYTHONFAULTHANDLER PYTHONMALLOC PYTHONUNBUFFERED PYTHONNOUSERSITE PYTHONUSERBASE"
)
_ALWAYS = f"PATH LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH DYLD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX {_PYTHON}".split()
_USER = "HOME USER LOGNAME SHELL XDG_CACHE_HOME HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE SSL_CERT_FILE SSL_CERT_DIR"
_BASIC = f"CUDA_VISIBLE_DEVICES CUDA_HOME {_USER}".split()
_PATTERN = re.compile(r"LC_[A-Z]+|[A-Z]+_NUM_THREADS")
_outgoing: int | None = None  # in a worker: the pipe to the parent
_paused = False  # in a worker: whether the time limit is paused


@dataclass(frozen=True)
class WorkerSettings:
    """What every worker of a pool is started with."""

    function: bytes  # pickled; called in the worker with the fields of an item, returns values that JSON can express
    timeout_s: float
    memory_gb: float | None
    level: Level
    user_code: bool  # modules of the user's project must be importable
    environment: dict[str, str]
    concurrent: bool = False  # the function is `async`: the items of a message are processed concurrently


def environment(level: Level, pass_env: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables of a worker: no tokens or keys except those named in `pass_env`."""
    if level == "off":
        return {"OMP_NUM_THREADS": "1", **os.environ}
    names = {*_ALWAYS, *pass_env, *(_BASIC if level == "basic" else ())}
    passed = {name: value for name, value in os.environ.items() if name in names or _PATTERN.fullmatch(name)}
    # With a fixed hash seed, sets of strings have the same order in every process.
    return {"OMP_NUM_THREADS": "1", "HOME": "/", "PYTHONHASHSEED": "0", **passed}


def in_worker() -> bool:
    """Whether this process is a worker of a pool, and already confined."""
    return _outgoing is not None


@contextmanager
def time_limit_paused() -> Iterator[None]:
    """Pause the time limit of the current item: for imports that take longer than the item itself.

    The parent limits the sum of all pauses. Outside of a worker, and within another pause, this does nothing.
    """
    global _paused
    if _outgoing is None or _paused:
        yield
        return
    _paused = True
    send_json(_outgoing, {"kind": "paused"})
    try:
        yield
    finally:
        _paused = False
        send_json(_outgoing, {"kind": "resumed"})


def pause_for_imports() -> None:
    """From now on, the first import of a module in the main thread does not count against the time limit."""
    original = builtins.__import__

    def timed(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        if level or name in sys.modules or threading.current_thread() is not threading.main_thread():
            return original(name, globals, locals, fromlist, level)
        with time_limit_paused():
            return original(name, globals, locals, fromlist, level)

    builtins.__import__ = timed


def main() -> None:
    """Run a worker: receive its settings, then lists of (index, item); send one message per item."""
    global _outgoing
    options = json.loads(sys.argv[2])
    fork_under_supervisor(options["namespaces"], options["network"])
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    try:
        settings: WorkerSettings = receive(incoming)
        function = _load(settings)
        missing = confine(settings.level, settings.user_code)
    except EOFError:
        return
    except BaseException as error:
        why = str(error) if isinstance(error, UserError) else describe_error(error)
        send_json(outgoing, {"kind": "failed", "why": why})
        return
    _outgoing = outgoing
    send_json(outgoing, {"kind": "ready", "missing": missing})
    if settings.user_code:
        pause_for_imports()
    try:
        while True:
            items = receive(incoming)
            if settings.level != "off":
                _limit_cpu(len(items) * settings.timeout_s)
            for answer in _answers(function, items, settings):
                send_bytes(outgoing, answer)
    except (EOFError, BrokenPipeError):
        return


def _load(settings: WorkerSettings) -> Callable[..., Any]:
    """Unpickle and prepare the function. It is trusted; unconfined, its modules can be compiled and cached."""
    if settings.memory_gb is not None:
        isolation.limit("RLIMIT_AS", int(settings.memory_gb * 2**30))
    function = pickle.loads(settings.function)
    getattr(function, "prepare", lambda: None)()
    return function


def confine(level: Level, user_code: bool) -> list[str]:
    """Confine this process to a sandbox level; return the names of protections that the system does not offer."""
    if level == "off":
        return []
    isolation.limit("RLIMIT_CORE", 0)
    isolation.limit("RLIMIT_FSIZE", MAX_FILE_BYTES[level])
    isolation.limit("RLIMIT_NPROC", isolation.tasks_on_system() + MAX_NEW_TASKS[level])
    if level == "basic":
        return []
    missing: list[str] = []
    sys.dont_write_bytecode = True
    with isolation.refusal_noted(missing, "limits on reading files"):
        isolation.restrict_files(isolation.import_folders(user_code))
    with isolation.refusal_noted(missing, "a filter of system calls"):
        isolation.filter_system_calls(read_only=bool(missing))
    return missing


def _limit_cpu(seconds: float) -> None:
    """Limit the CPU time on all cores, for code that outlives the parent's clock."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    isolation.limit("RLIMIT_CPU", int(used.ru_utime + used.ru_stime + _CORES * seconds) + CPU_GRACE_S)


def _answers(
    function: Callable[..., Any], items: Sequence[tuple[int, Sequence[Any]]], settings: WorkerSettings
) -> Iterator[bytes]:
    """Call the function with each item; yield the messages about the results in order."""
    if not settings.concurrent:
        for index, item in items:
            yield _answer(index, partial(_finished, function, item))
        return
    import asyncio  # late: most workers do not need it

    async def answer(index: int, item: Sequence[Any]) -> bytes:
        limit = asyncio.timeout(settings.timeout_s)
        try:
            async with limit:
                value = await value_of(function(*item))
        except BaseException as error:
            return encode_json({"kind": "timeout", "index": index}) if limit.expired() else _failed(index, error)
        return _answer(index, lambda: value)

    async def gather() -> list[bytes]:
        return await asyncio.gather(*(answer(*item) for item in items))

    yield from _event_loop().run_until_complete(gather())


def _answer(index: int, result: Callable[[], Any]) -> bytes:
    try:
        return encode_json({"kind": "result", "index": index, "value": result()})
    except BaseException as error:  # SystemExit, and libraries whose timeouts derive from BaseException
        return _failed(index, error)


def _failed(index: int, error: BaseException) -> bytes:
    return encode_json({"kind": "error", "index": index, "detail": describe_error(error)})


def _finished(function: Callable[..., Any], item: Sequence[Any]) -> Any:
    result = function(*item)
    return _event_loop().run_until_complete(value_of(result)) if isawaitable(result) else result


@cache
def _event_loop() -> Any:
    """The event loop of this worker, in which objects of the function can live from item to item."""
    import asyncio

    return asyncio.new_event_loop()
