"""The judging process, started by the pool: chunks of items come in at stdin, one message goes out for each verdict."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from assay.rewards import latex
from assay.rewards.frames import receive, send
from assay.rewards.fresh import take_pipes
from assay.rewards.judge import Judge, judge_safely, one_line
from assay.types import UserError, Verdict

ORPHAN_GRACE_S = 120.0


def main() -> None:
    incoming, outgoing = take_pipes()
    # Ctrl-C and a scheduler's SIGTERM are the parent's affair: it closes our stdin. To die before it does would give a
    # wrong verdict. (A handler, unlike SIG_IGN, is not passed on to what users' functions start.)
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, lambda *_: None)
    try:
        setup = receive(incoming)
        judge = _start(setup)
    except EOFError:
        return
    except BaseException as error:
        send(outgoing, ("failed", str(error) if isinstance(error, UserError) else one_line(error)))
        return
    latex.loading = lambda: _clock_stopped(outgoing)
    send(outgoing, ("ready",))
    try:
        while True:
            for index, completion, answer, fields in receive(incoming):
                # The kernel ends us if the parent died while we are stuck: no bytecode need run for that.
                signal.setitimer(signal.ITIMER_REAL, setup["timeout_s"] + ORPHAN_GRACE_S)
                verdict = judge_safely(judge, completion, answer, fields)
                send(outgoing, ("verdict", index, _plain(verdict)))
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (EOFError, BrokenPipeError):
        return


def _start(setup: dict[str, Any]) -> Judge:
    _limit_memory(setup["memory_gb"])
    judge: Judge = pickle.loads(setup["judge"])
    prepare = getattr(judge, "prepare", None)
    if prepare is not None:
        prepare()
    return judge


def _limit_memory(gigabytes: float | None) -> None:
    if gigabytes is None:
        return
    import resource

    limit = int(gigabytes * 2**30)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with suppress(ValueError, OSError):  # not every system lets one limit address space
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@contextmanager
def _clock_stopped(outgoing: int) -> Iterator[None]:
    send(outgoing, ("loading",))
    try:
        yield
    finally:
        send(outgoing, ("loaded",))


def _plain(verdict: Verdict) -> tuple[float, str, str | None, dict[str, float], str]:
    """Only plain values travel: what users' functions return may not exist in the parent."""
    parts = {str(name): float(value) for name, value in verdict.parts.items()}
    parsed = None if verdict.parsed is None else str(verdict.parsed)
    return float(verdict.reward), str(verdict.status.value), parsed, parts, str(verdict.detail)
