"""One writer a run: a lock that the system drops when its process dies, however it dies."""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from assay.types import UserError

# Record locks belong to the process: closing any other handle on the file would drop ours, so never probe a held one.
# (flock would be inherited by forked workers that may outlive the run.)
_held: dict[Path, IO[str]] = {}
_one_at_a_time = threading.Lock()
NAME = ".lock"


@atexit.register
def _release_all() -> None:
    while _held:
        _held.popitem()[1].close()


def acquire(run_path: Path) -> None:
    """Become the run's writer, or say who is."""
    path = _lock_path(run_path)
    if path in _held:
        return
    file = path.open("a+")
    if not any(_try_lock(file) for _ in _patience()):
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise UserError(f"{run_path} is being written by {owner}: wait until that ends, or stop it")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held[path] = file


def try_acquire(run_path: Path) -> bool:
    """Become the run's writer, unless it has one already, in this process or another."""
    with _one_at_a_time:
        if _lock_path(run_path) in _held:
            return False
        try:
            acquire(run_path)
        except UserError:
            return False
        return True


def release(run_path: Path) -> None:
    file = _held.pop(_lock_path(run_path), None)
    if file is not None:
        file.close()


def is_held(run_path: Path) -> bool:
    """Whether a living process writes to this run."""
    path = _lock_path(run_path)
    if path in _held:
        return True
    try:
        file = path.open("r+")
    except OSError:
        return False  # never locked, or not ours to look into
    with file:
        return not _try_lock(file)


def _try_lock(file: IO[str]) -> bool:
    """False if another process holds it. A file system without locks gives everyone a free hand."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _patience() -> Iterator[int]:
    """A few tries: somebody listing runs holds each lock for an instant."""
    for attempt in range(5):
        yield attempt
        time.sleep(0.05)


def _lock_path(run_path: Path) -> Path:
    return run_path.resolve() / NAME
