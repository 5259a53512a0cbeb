"""The parent's side of one judging process. Nothing that the process sends is trusted: it may run a model's code."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from assay.rewards.frames import BadMessage, JsonReader, send
from assay.rewards.fresh import command, ending
from assay.rewards.judge import Judge, one_line
from assay.rewards.sandbox import FINDINGS, Sandbox, environment, is_user_code, level_for, with_hint
from assay.rewards.supervisor import KILL_LIMIT_S, STOP
from assay.types import Status, UserError, Verdict

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
