"""Programs that serve a run, such as inference servers: started with a log file, supervised, and always ended.

The program runs under a supervisor (see `spawn`), which kills it and everything it has started when this process ends,
whatever the reason.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from assay.system.spawn import KILL_LIMIT_S, STOP_SIGNALS, ChildProcess, exit_reason, fork_under_supervisor, send

PF_EXITING = 0x4  # flag of Linux in /proc/PID/stat: set before the files of the process are closed
STOP_S = 10.0  # seconds that a program gets after SIGTERM
MAX_LINE = 300  # characters of an error


class SupervisedProgram:
    """A running program. Its output is appended to `log`."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], block_sigterm: bool = False
    ) -> None:
        """`block_sigterm`: the program never receives SIGTERM, which schedulers send to all processes of a job."""
        self.log, self._environment, self._block_sigterm = log, environment, block_sigterm
        self._settings = json.dumps({"command": list(command), "log": str(log), "block_sigterm": block_sigterm})
        self._start()

    def _start(self) -> None:
        self._ended: str | None = None
        # The environment may hold secrets: unlike arguments, other users cannot see it.
        self._child = ChildProcess(__name__, self._settings, supervised=True, environment=self._environment)
        self.pid: int = self._child.receive()

    @property
    def ended(self) -> str | None:
        """How the program ended, e.g. "exit code 1"; None while it is running.

        If it has just ended, waits until its supervisor has killed what it started and reports its exit code.
        """
        if self._ended is None and is_dead(self.pid):
            with suppress(subprocess.TimeoutExpired):
                self._child.process.wait(timeout=KILL_LIMIT_S + 1)
        if self._ended is None and not self._child.running:
            self._ended = exit_reason(self._child.process.returncode)
        return self._ended

    def tail(self) -> str:
        return last_error(self.log)

    def kill(self) -> None:
        """Kill the program without waiting. Its supervisor kills what it has started."""
        if self._child.running and not is_dead(self.pid):  # else its number may be that of another program by now
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def restart(self) -> None:
        """Kill the program, which may not answer to other signals, and start it again."""
        self.kill()
        self.close()
        self._start()

    def close(self) -> None:
        """Ask the program to end, and kill it with everything it has started if it does not."""
        if self.ended is None and self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT if self._block_sigterm else signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._child.process.wait(timeout=STOP_S)
        reason = self._child.close()
        self._ended = self._ended or reason


def last_error(log: Path) -> str:
    """The last error in a log file that names a cause, or else its last line."""
    with suppress(OSError):
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-400:] if line.strip()]
        errors = [line for line in lines if re.search(r"\w(Error|Exception): |\berror: ", line)]
        causes = [line for line in errors if "stack trace" not in line]
        line = (causes or errors or lines or [""])[-1]
        return line if len(line) <= MAX_LINE else "..." + line[-MAX_LINE:]
    return ""


def is_dead(pid: int) -> bool:
    """Whether a process has ended or is about to (its connections are closed by then), on Linux.

    Also if its parent has not noticed yet.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return Path("/proc/self/stat").exists()
    return fields[0] == "Z" or bool(int(fields[6]) & PF_EXITING)


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file at once, readable by this user only: environments hold API keys."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file)
    partial.rename(path)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that no program uses now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def main() -> None:
    """In the child: replace the worker below the supervisor by the program."""
    settings = json.loads(sys.argv[2])
    fork_under_supervisor(namespaces=False, network=True)
    send(1, os.getpid())
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(settings["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, target in enumerate((null, log, log)):
        os.dup2(target, number)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    blocked = {signal.SIGTERM} if settings["block_sigterm"] else set()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - blocked)
    command = settings["command"]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"Error: cannot start {command[0]}: {error.strerror}\n".encode())
        os._exit(127)
