"""The judging process, started by the pool: chunks of items come in at stdin, one message goes out for each verdict."""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from assay.process import isolation, spawn
from assay.process.messages import BadMessage, encode_json, receive, send_bytes, send_json
from assay.process.spawn import take_pipes
from assay.rewards import latex
from assay.rewards.judge import Judge, failed, judge_safely, one_line
from assay.types import Status, UserError, Verdict

CPU_GRACE_S = 120
_CORES = os.cpu_count() or 1
MAX_NEW_TASKS = {"strict": 64, "basic": 1024}  # processes and threads beyond those the machine has now
MAX_FILE_BYTES = {"strict": 0, "basic": 4 << 30}


def main() -> None:
    options = json.loads(sys.argv[2])
    spawn.start_worker(options["namespaces"], options["network"])
    incoming, outgoing = take_pipes()
    # Ctrl-C and a scheduler's SIGTERM are the parent's affair: it closes our stdin. To die before it does would give a
    # wrong verdict. What users' functions start obeys them: programs do not inherit a handler, unlike SIG_IGN.
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, lambda *_: None)
    os.register_at_fork(after_in_child=_obey_signals)
    try:
        setup = receive(incoming)
        judge = _load(setup)
        missing = _confine(setup["level"], setup["user_code"])
    except EOFError:
        return
    except BaseException as error:
        send_json(outgoing, {"kind": "failed", "why": str(error) if isinstance(error, UserError) else one_line(error)})
        return
    latex.loading = lambda: _clock_stopped(outgoing)
    send_json(outgoing, {"kind": "ready", "missing": missing})
    try:
        while True:
            items = receive(incoming)
            if setup["level"] != "off":
                _limit_cpu(len(items) * setup["timeout_s"])
            for index, completion, answer, fields in items:
                send_bytes(outgoing, _judged(judge, index, completion, answer, fields))
    except (EOFError, BrokenPipeError):
        return


def _obey_signals() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _load(setup: Mapping[str, Any]) -> Judge:
    """Before confinement: the judge is trusted, and modules may be compiled and cached."""
    if setup["memory_gb"] is not None:
        isolation.limit("RLIMIT_AS", int(setup["memory_gb"] * 2**30))
    judge: Judge = pickle.loads(setup["judge"])
    prepare = getattr(judge, "prepare", None)
    if prepare is not None:
        prepare()
    return judge


def _confine(level: str, user_code: bool) -> list[str]:
    """Take away what a judge of this level may not use; returns what the system does not offer for it."""
    if level == "off":
        return []
    isolation.limit("RLIMIT_CORE", 0)
    isolation.limit("RLIMIT_FSIZE", MAX_FILE_BYTES[level])
    isolation.limit("RLIMIT_NPROC", isolation.tasks_on_system() + MAX_NEW_TASKS[level])
    if level == "basic":
        return []
    missing, landlock = [], True
    sys.dont_write_bytecode = True
    try:
        isolation.restrict_files(isolation.import_folders(user_code))
    except OSError as error:
        landlock = False
        missing.append(f"limits on reading files ({error.strerror or error})")
    try:
        isolation.confine(read_only=not landlock)
    except OSError as error:
        missing.append(f"a filter of system calls ({error.strerror or error})")
    return missing


def _limit_cpu(seconds: float) -> None:
    """So much time on all cores, for what outlives the clock of the parent."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    isolation.limit("RLIMIT_CPU", int(used.ru_utime + used.ru_stime + _CORES * seconds) + CPU_GRACE_S)


@contextmanager
def _clock_stopped(outgoing: int) -> Iterator[None]:
    send_json(outgoing, {"kind": "loading"})
    try:
        yield
    finally:
        send_json(outgoing, {"kind": "loaded"})


def _judged(judge: Judge, index: int, completion: str, answer: str, fields: Mapping[str, Any]) -> bytes:
    """The message with the verdict. Only plain values travel: what users' judges return may not be any."""
    verdict = judge_safely(judge, completion, answer, fields)
    try:
        return _message(index, verdict)
    except (BadMessage, AttributeError, TypeError, ValueError, OverflowError) as error:
        return _message(index, failed(judge, Status.ERROR, f"the verdict cannot be used: {one_line(error)}"))


def _message(index: int, verdict: Verdict) -> bytes:
    reward = float(verdict.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    message = {
        "kind": "verdict",
        "index": index,
        "reward": reward,
        "status": str(verdict.status.value),
        "parsed": None if verdict.parsed is None else str(verdict.parsed),
        "parts": {str(name): float(value) for name, value in verdict.parts.items()},
        "detail": str(verdict.detail),
    }
    return encode_json(message)
