"""`assay serve MODEL -- COMMAND`: a program that uses the server, and ends it when it ends itself."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress

from assay.types import UserError

STOP_S = 10.0  # seconds that the program gets after SIGTERM


class ClientProgram:
    """Runs while the server does. Ctrl-C is left to the program, which gets it from the terminal."""

    def __init__(self, command: Sequence[str]) -> None:
        if not command or shutil.which(command[0]) is None:
            name = f"'{command[0][:200]}' is not a program" if command else "no program is given"
            raise UserError(f"{name}: after -- comes the command of a client, e.g. -- lm_eval --model ...")
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: OSError | None = None

    def start(self, url: str, api_key: str) -> None:
        """Called in the event loop of the server, when it accepts connections. `url`: of the API."""
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *_: None)  # a handler of Python is not inherited by the program
        key = api_key or "none"  # clients refuse to start without one
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key}
        self._task = asyncio.ensure_future(self._run(os.environ | variables))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def stop(self) -> None:
        """Pass SIGTERM on to it."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def exit_code(self) -> int:
        """As a shell reports it."""
        if self._error is not None:
            raise UserError(f"cannot run {self._command[0][:200]}: {self._error.strerror}")
        code = None if self._process is None else self._process.returncode
        if code is None:  # killed at the end of the server
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    async def _run(self, environment: dict[str, str]) -> None:
        try:
            self._process = await asyncio.create_subprocess_exec(*self._command, env=environment)
            await self._process.wait()
        except OSError as error:
            self._error = error
        except asyncio.CancelledError:  # the server has ended first
            if self._process is not None:
                self.stop()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_S)
            raise
        signal.raise_signal(signal.SIGTERM)  # stops the server in order
