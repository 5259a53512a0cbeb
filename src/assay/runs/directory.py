"""One writer a run: a lock that the system drops when its process dies, however it dies.

A run's folder: made once, appended to, never overwritten.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from assay.runs import checkpoints, rollouts
from assay.runs.environment import describe_environment
from assay.runs.files import (
    is_temporary,
    json_line,
    make_folder,
    number,
    read_json,
    remove_temporaries,
    replacing,
    sync,
    write_json,
    write_text,
)
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


_NAME = re.compile(r"\w[\w.+=-]{0,199}")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' cannot name a run: use letters, digits and . _ + = - only")


def as_name(text: str) -> str:
    """A text, such as a file's stem, as the name of a run."""
    return re.sub(r"[^\w.+=-]", "-", text).lstrip("-.+=") or "run"


class Run:
    """The folder of one run. Whoever creates or resumes it holds its lock until `close` or death."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: IO[str] | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @classmethod
    def create(cls, runs_dir: Path, name: str, config_toml: str) -> Run:
        """Make runs_dir/name, or name-2, name-3, ... where that is taken, and write down how it was started."""
        check_name(name)
        try:
            make_folder(runs_dir)
            path = next(path for path in _candidates(runs_dir, name) if _claim(path, config_toml))
            run = cls(path)
            run.write_environment()
        except OSError as error:
            raise UserError(
                f"cannot make a run in {runs_dir} ({error.strerror or error}): choose another folder with runs_dir"
            ) from error
        return run

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> Run:
        """An existing run; with `write`, to go on with it (one process at a time)."""
        if not (path / "config.toml").is_file():
            raise UserError(f"{path} is not a run directory: there is no config.toml in it")
        run = cls(path)
        if write:
            try:
                acquire(path)
                checkpoints.recover(path)
                run.write_environment()
            except OSError as error:
                raise UserError(f"cannot write to {path} ({error.strerror or error}): make it writable") from error
        return run

    def write_environment(self) -> None:
        """Versions, machine and command of this start; the first start stays, later ones go under `resumed`."""
        path = self.path / "environment.json"
        first, now = read_json(path), describe_environment()
        write_json(path, {**first, "resumed": [*first.get("resumed", []), now]} if first else now)

    @property
    def config_toml(self) -> str:
        return (self.path / "config.toml").read_text()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        if self._metrics is None:
            self._metrics = _open_for_append(self.path / "metrics.jsonl")
        self._metrics.write(json_line({"step": step, **metrics}))
        self._metrics.flush()

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every line of metrics.jsonl; a last line that is still being written, or was torn by a crash, is left out."""
        return read_metrics(self.path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def read_summary(self) -> dict[str, Any]:
        """summary.json, or nothing while there is none."""
        return read_json(self.path / "summary.json")

    @property
    def state(self) -> str:
        """running, finished or stopped."""
        if is_held(self.path):
            return "running"
        return "finished" if self.read_summary() else "stopped"

    def cut_back(self, step: int) -> None:
        """Forget everything later than the checkpoint of `step`, so that a resumed run writes it anew.

        Safe to repeat after a crash. Without that checkpoint, whatever belongs to a later step goes.
        """
        intact = checkpoints.metrics_intact(self.path, step)
        lines = [(line, row) for line, row in _metrics_lines(self.path) if row["step"] <= step]
        if not intact:  # their length is another: then only the final evaluation is known to be later
            lines = [(line, row) for line, row in lines if "after/accuracy" not in row]
        text = b"".join(line + b"\n" for line, _ in lines)
        checkpoints.cut_back(self.path, step)  # first: a checkpoint must never be newer than the metrics
        rollouts.cut_back(self.path, step)
        if self.read_summary().get("steps", step) > step:
            (self.path / "summary.json").unlink()
        self._close_metrics()
        with replacing(self.path / "metrics.jsonl") as file:
            # What was logged of this very step after its checkpoint, such as a final evaluation, is made again.
            file.write(text[: checkpoints.metrics_bytes(self.path, step)] if intact else text)

    def close(self) -> None:
        self._close_metrics()
        release(self.path)

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """See Run.read_metrics."""
    return [{key: number(value) for key, value in row.items()} for _, row in _metrics_lines(run_path)]


def list_runs(runs_dir: Path) -> list[Run]:
    """The runs of a folder, oldest first."""
    found = [path for path in runs_dir.iterdir() if (path / "config.toml").is_file()] if runs_dir.is_dir() else []
    return [Run(path) for path in sorted(found, key=lambda path: ((path / "config.toml").stat().st_mtime, path.name))]


def _metrics_lines(run_path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The finished lines of metrics.jsonl, as they stand there and as they read."""
    path = run_path / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # no newline: not finished
    for count, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(f"{path}, line {count}: not a line of metrics; mend or delete it")
        yield line, row


def _candidates(runs_dir: Path, name: str) -> Iterator[Path]:
    yield runs_dir / name
    count = 2
    while True:
        yield runs_dir / f"{name}-{count}"
        count += 1


def _claim(path: Path, config_toml: str) -> bool:
    """Become the writer of a new or empty folder, and give it its config.toml; False where it belongs to another run.

    Of several racing processes one gets the lock. A crash before there is a config.toml leaves the folder free.
    """
    with suppress(FileExistsError):
        make_folder(path)
    if not path.is_dir() or not _is_free(path) or not try_acquire(path):
        return False
    if not _is_free(path):  # another process was quicker, and has ended already
        release(path)
        return False
    remove_temporaries(path)
    try:
        write_text(path / "config.toml", config_toml)
    except OSError:
        release(path)
        raise
    return True


def _is_free(path: Path) -> bool:
    """Whether nothing is in the folder but traces of an attempt to start a run."""
    return all(file.name == NAME or is_temporary(file) for file in path.iterdir())


def _open_for_append(path: Path) -> IO[str]:
    """metrics.jsonl, without the half line that a crash may have left at its end."""
    with path.open("ab+") as file:
        file.seek(0)
        text = file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            file.truncate(whole)
    sync(path.parent)  # the file may be new
    return path.open("a", encoding="utf-8")
