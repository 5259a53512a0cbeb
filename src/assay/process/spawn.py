"""Fresh interpreters that work for us over their pipes.

There is no fork of a process that may hold torch, and no second import of the user's script.

A process that looks after a worker: when either the worker or the parent ends, everything the worker started ends.

The supervisor is the process that the parent starts; the worker is its fork. Inside a PID namespace a second supervisor
is the namespace's first process: the kernel kills all others of the namespace when that one ends. Without a namespace
descendants are adopted, searched for and killed. The worker's stderr reaches ours through a pipe, so that the worker
cannot do anything to it but write.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from assay.process import isolation
from assay.process.messages import send_json

_BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {} import main; main()"


def command(module: str, *arguments: str) -> list[str]:
    """Runs `main` of a module, with the modules that can be imported here. `sys.argv[2:]` are the arguments."""
    path = json.dumps([str(place) or os.getcwd() for place in sys.path])
    return [sys.executable, "-P", "-c", _BOOTSTRAP.format(module), path, *arguments]


def take_pipes() -> tuple[int, int]:
    """Over there: keep the pipes for ourselves; whatever users' functions print goes to stderr.

    Programs that users' functions start do not inherit these descriptors.
    """
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return incoming, outgoing


def ending(code: int) -> str:
    """How a process came to its end, in words. Codes above 128 are a shell's way to say: killed by a signal."""
    signum = -code if code < 0 else code - 128
    with suppress(ValueError):
        if signum > 0:
            return f"killed by {signal.Signals(signum).name}"
    return f"exit code {code}"


STOP = signal.SIGUSR2  # asks a supervisor to kill everything and end
KILL_LIMIT_S = 5.0
MAX_PROCESSES = 1024  # of a worker, where the kernel can count them for a namespace
_QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # meant for the parent, which decides when workers end
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_COPIED = 4096  # a pipe that can be written to takes this much without blocking


def start_worker(namespaces: bool, network: bool) -> None:
    """Fork; return in the worker. The calling process becomes its supervisor and ends with the worker's exit code.

    If this system refuses namespaces, say so on stdout and end.
    """
    isolation.die_with_parent(STOP)
    stopped = _signals_to_pipe()
    log, log_end = os.pipe()
    if namespaces:
        _or_refuse(lambda: isolation.enter_namespaces(network))
    else:
        isolation.adopt_orphans()
    child = os.fork()
    if child:
        _release_pipes(log_end)
        _supervise(child, stopped, log, namespaces)
    os.close(log)
    isolation.die_with_parent(signal.SIGKILL)
    if namespaces:
        _or_refuse(isolation.mount_own_proc)
        isolation.limit_processes(MAX_PROCESSES)
        os.close(stopped)
        stopped = _signals_to_pipe()
        child = os.fork()
        if child:
            _release_pipes(log_end)
            _supervise(child, stopped, None, namespaces)
        isolation.die_with_parent(signal.SIGKILL)
        if os.geteuid():
            isolation.drop_capabilities()
    os.close(stopped)
    signal.set_wakeup_fd(-1)
    for signum in (*_QUIET, STOP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
    os.setsid()
    os.dup2(log_end, _STDERR)
    os.close(log_end)


def _or_refuse(step: Callable[[], None]) -> None:
    try:
        step()
    except OSError as error:
        send_json(_STDOUT, {"kind": "refused", "why": error.strerror or str(error)})
        os._exit(0)


def _release_pipes(log_end: int) -> None:
    """The result pipe belongs to the worker alone: the parent sees its end when the worker ends."""
    os.close(log_end)
    os.dup2(_STDERR, _STDOUT)


def _signals_to_pipe() -> int:
    """Signals wake whoever reads from this descriptor, which then holds their numbers."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for signum in (*_QUIET, STOP, signal.SIGCHLD):
        signal.signal(signum, lambda *_: None)
    return reading


def _supervise(child: int, signals: int, log: int | None, namespaces: bool) -> NoReturn:
    """Until the worker ends, the parent is gone (it closed the other end of our stdin), or we are asked to stop."""
    poll = select.poll()
    poll.register(_STDIN, 0)  # hang-ups only: what the parent sends is for the worker
    poll.register(signals, select.POLLIN)
    if log is not None:
        poll.register(log, select.POLLIN)
    code: int | None = None
    while code is None:
        ready = dict(poll.poll())
        if log in ready and log is not None and not _copy(log):
            poll.unregister(log)
        if signals in ready:
            if STOP in os.read(signals, 1000):
                break
            code = _reap(child)
        if _STDIN in ready:
            break
    if os.getpid() != 1:  # the kernel does it when the first process of a namespace ends
        code = _kill_all(child, code, namespaces)
    if log is not None:
        os.set_blocking(log, False)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and _copy(log):
            pass
    os._exit(1 if code is None else code)


def _copy(log: int) -> bool:
    """Pass on some of what the worker wrote to stderr; False when there is no more."""
    if not select.select([], [_STDERR], [], 0.05)[1]:
        return True  # whoever reads our stderr is slow
    try:
        text = os.read(log, _COPIED)
    except BlockingIOError:
        return False
    with suppress(OSError):
        os.write(_STDERR, text)
    return bool(text)


def _reap(child: int) -> int | None:
    """Collect the children that have ended; the exit code of this one, if it is among them."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code if code is None or code >= 0 else 128 - code


def _kill_all(child: int, code: int | None, namespaces: bool) -> int | None:
    """Kill the child and whatever it started. The child's exit code."""
    if code is None:
        os.kill(child, signal.SIGKILL)
        if namespaces:
            os.waitpid(child, 0)  # returns when all in the namespace are gone
    if namespaces:
        return code
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + KILL_LIMIT_S
    while (alive := _descendants()) and time.monotonic() < deadline:
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(child)
        time.sleep(0.002)
    return code


def _descendants() -> list[int]:
    """All processes below this one, from /proc (Linux); elsewhere those of the worker's own group are all we reach."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with suppress(OSError, ValueError, IndexError):
            stat = Path("/proc", name, "stat").read_text(errors="replace") if name.isdigit() else ""
            parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    below, found = {os.getpid()}, []
    while new := [pid for pid, parent in parents.items() if parent in below and pid not in below]:
        below.update(new)
        found += new
    return found
