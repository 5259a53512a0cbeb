"""Run programs that a model wrote, each with its tests, in disposable processes.

The runner is a supervised process (see `spawn`) without network and with access to the files of the standard library
only. For every program it forks two children: one for the tests, one for the program. A child has no other descriptors
than its pipes, no capabilities, hard limits on memory and CPU time, and a filter of system calls that refuses new
processes and threads, sockets, signals and changes to files. The children receive the tests and the program directly:
the runner, from which the next program is forked, never has them in its memory.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from assay.system import isolation
from assay.system.harness import ProgramConnection, ProgramServer, run_tests
from assay.system.sandbox import environment
from assay.system.spawn import (
    BadMessage,
    ChildProcess,
    JsonReader,
    exit_reason,
    fork_under_supervisor,
    ignore_stop_signals,
    receive,
    send_json,
    take_pipes,
)
from assay.types import UserError

GRACE_S = 1.0  # after the time limit, for the tests to report it
START_LIMIT_S = 60.0
STAGES = ("done", "syntax", "raised", "timeout", "lost", "invalid")

# Modules that programs often import: in the runner's memory, an import costs nothing.
_MODULES = (
    *("abc", "array", "bisect", "calendar", "cmath", "collections", "collections.abc", "contextlib", "copy"),
    *("dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "inspect", "io"),
    *("itertools", "json", "math", "numbers", "operator", "queue", "random", "re", "statistics", "string", "struct"),
    *("textwrap", "time", "types", "typing", "unicodedata"),
)
_MAX_DESCRIPTORS = 256
_TESTS_MEMORY = 2 << 30
_STARTUP_CPU_S = 2
_LOST = 3  # exit code of the tests if the program ended before them


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may use for all its tests together."""

    timeout_s: float = 3.0
    memory_mb: int = 512


@dataclass(frozen=True)
class ProgramResult:
    """`stage`: done; syntax (it cannot be compiled); raised (an exception before the first test); timeout; lost (its
    process ended); invalid (the tests are at fault)."""

    stage: str
    passed: list[bool]
    detail: str


class RunnerLost(Exception):
    """The runner ended or does not answer: a new one is needed."""


class ProgramRunner(ChildProcess):
    """The runner as seen from the process that judges."""

    def __init__(self, namespaces: bool = True) -> None:
        options = json.dumps({"namespaces": namespaces})
        super().__init__(__name__, options, supervised=True, environment=environment("strict"))
        self._messages = JsonReader(self.output)
        os.set_blocking(self.input, False)

    def wait_until_ready(self) -> list[str] | None:
        """Return the protections that the system does not offer; None if it refuses namespaces."""
        message = self._receive(time.monotonic() + START_LIMIT_S)
        return None if message["kind"] == "refused" else [str(name) for name in message.get("missing", ())]

    def run(self, program: str, tests: Mapping[str, Any], limits: ProgramLimits) -> ProgramResult:
        """Run a program with its tests (see `TestSession`). Raises RunnerLost."""
        deadline = time.monotonic() + limits.timeout_s + GRACE_S + START_LIMIT_S
        try:
            for part in (asdict(limits), dict(tests), program):
                self.send(part, deadline)
        except (BrokenPipeError, TimeoutError) as error:
            raise RunnerLost(type(error).__name__) from None
        report: dict[str, Any] | None = None
        while (message := self._receive(deadline))["kind"] != "end":
            report = message
        return _result(report, message)

    def _receive(self, deadline: float) -> dict[str, Any]:
        try:
            return self._messages.receive(deadline)
        except (EOFError, TimeoutError, BadMessage) as error:
            raise RunnerLost(type(error).__name__) from None


def start_runner(allow_unconfined: bool = False) -> ProgramRunner:
    """Start a runner, without namespaces if the system refuses them."""
    for namespaces in (True, False):
        runner = ProgramRunner(namespaces)
        try:
            missing = runner.wait_until_ready()
        except RunnerLost:
            raise UserError(f"the process that runs programs ended at startup: {runner.close()}") from None
        if missing is not None:
            break
        runner.close()
    if missing and not allow_unconfined:
        runner.close()
        raise UserError(
            f"programs written by a model would run without {', and without '.join(missing)}, which this system does "
            "not offer: use Linux 5.13 or later, or set task.args.allow_unconfined = true in a container of your own"
        )
    return runner


def _result(report: Mapping[str, Any] | None, end: Mapping[str, Any]) -> ProgramResult:
    if report is None and end.get("timed_out"):
        return ProgramResult("timeout", [], "the tests did not end")
    if report is None or report.get("stage") not in STAGES:
        return ProgramResult("invalid", [], f"the tests ended without a report: {end.get('tests')}")
    detail = str(report["detail"])
    if report["stage"] == "lost" and end.get("program"):
        detail = f"{detail} ({end['program']})"
    return ProgramResult(report["stage"], [passed is True for passed in report["passed"]], detail)


def main() -> None:
    """Run the runner."""
    fork_under_supervisor(json.loads(sys.argv[2])["namespaces"], network=False)
    incoming, outgoing = take_pipes()
    ignore_stop_signals()
    for name in _MODULES:
        importlib.import_module(name)
    readable, listable = isolation.standard_library()
    sys.path[:] = [listable[0], *(folder for folder in sys.path if os.path.basename(folder) == "lib-dynload")]
    sys.dont_write_bytecode = True
    missing: list[str] = []
    with isolation.refusal_noted(missing, "limits on reading files"):
        isolation.restrict_files(readable, listable=listable)
    confinement = _Confinement(landlock=not missing)
    if confinement.rules is None:
        missing.append("a filter of system calls")
    gc.collect()
    gc.freeze()  # children need not copy pages to collect garbage
    send_json(outgoing, {"kind": "ready", "missing": missing})
    with suppress(EOFError, BrokenPipeError):
        while True:
            limits = ProgramLimits(**receive(incoming))
            send_json(outgoing, {"kind": "end", **_run(limits, confinement, incoming, outgoing)})


def _run(limits: ProgramLimits, confinement: _Confinement, incoming: int, outgoing: int) -> dict[str, Any]:
    """Fork the tests, then the program; return how they ended when the tests have reported."""
    requests_end, requests = os.pipe()
    replies, replies_end = os.pipe()
    alive, alive_end = os.pipe()  # a byte says that the tests are ready; closed when they end

    def test() -> int:
        tests = receive(incoming)
        os.setsid()
        confinement.apply((requests, replies, alive_end, outgoing), _TESTS_MEMORY, limits.timeout_s)

        def connect() -> ProgramConnection:
            os.write(alive_end, b"x")
            return ProgramConnection(requests, replies, limits.timeout_s)

        return _LOST if run_tests(tests, connect, outgoing) == "lost" else 0

    def run_program() -> NoReturn:
        source = receive(incoming)
        os.setsid()
        confinement.apply((requests_end, replies_end), limits.memory_mb << 20, limits.timeout_s)
        ProgramServer(requests_end, replies_end).serve(source)

    tests_pid = _fork(test)
    for descriptor in (requests, replies, alive_end):
        os.close(descriptor)
    ready = os.read(alive, 1)  # empty if the tests are invalid
    program_pid = _fork(run_program)
    for descriptor in (requests_end, replies_end):
        os.close(descriptor)
    poll = select.poll()
    poll.register(alive, select.POLLHUP)
    timed_out = not poll.poll((limits.timeout_s + GRACE_S) * 1000 if ready else 0) and bool(ready)
    os.close(alive)
    tests_end = _end(tests_pid, 0.0 if timed_out else 1.0)
    lost = tests_end == exit_reason(_LOST)
    if not ready and tests_end != exit_reason(0):
        raise SystemExit("the tests could not be read")
    return {"timed_out": timed_out, "tests": tests_end, "program": _end(program_pid, 0.2 if lost else 0.0)}


def _fork(function: Callable[[], int]) -> int:
    """Run a function, which returns an exit code, in a child."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = function()
        finally:
            os._exit(code)
    return pid


def _end(pid: int, wait_s: float) -> str:
    """Kill a child that does not end by itself; return how it ended, or an empty string if it was killed."""
    deadline, pause = time.monotonic() + wait_s, 0.0001
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return exit_reason(os.waitstatus_to_exitcode(status))
        if time.monotonic() >= deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return ""


class _Confinement:
    """Confines children, and first the runner: to the standard library (Landlock), and by a filter of system calls."""

    def __init__(self, landlock: bool) -> None:
        self._null = os.open(os.devnull, os.O_RDWR)
        self.rules: list[bytes] | None = None  # None: the system does not accept a filter of system calls
        with suppress(OSError):
            isolation.install_filter(isolation.forking_filter())  # once, because a long filter takes a millisecond
            self.rules = isolation.forked_filter(read_only=not landlock)

    def apply(self, keep: tuple[int, ...], memory: int, seconds: float) -> None:
        for number in range(3):
            os.dup2(self._null, number)
        start = 3
        for descriptor in (*sorted(keep), _MAX_DESCRIPTORS):
            os.closerange(start, descriptor)
            start = descriptor + 1
        cpu = int(seconds) + _STARTUP_CPU_S
        limits = {"CORE": 0, "FSIZE": 0, "NPROC": 0, "NOFILE": 64, "AS": memory, "CPU": cpu}
        for name, value in limits.items():
            with suppress(ValueError, OSError, AttributeError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        with suppress(OSError):
            isolation.drop_capabilities()
        if self.rules is not None:
            isolation.install_filter(self.rules)
