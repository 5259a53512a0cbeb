"""The run directory: created once, appended to, never overwritten. One process at a time may write to it. `RunFiles`
reads it leniently.

The lock of a run is released by the operating system when its process ends, for whatever reason.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import itertools
import json
import os
import re
import socket
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from assay.runs import checkpoints, rollouts
from assay.runs.environment import describe_environment
from assay.runs.files import (
    atomic_write,
    from_json,
    is_temporary,
    json_line,
    json_lines,
    make_folder,
    read_json,
    remove_temporaries,
    sync,
    unreadable,
    write_json,
    write_text,
)
from assay.types import Closeable, UserError, describe_error

# Record locks belong to the process: closing any other handle of the file would release the lock, so a lock that this
# process holds is never probed. (flock would be inherited by forked workers, which may outlive the run.)
_held: dict[Path, IO[str]] = {}
_acquiring = threading.Lock()
NAME = ".lock"
MAX_SETTINGS = 1000  # that are read from config.toml, which may be damaged
SETTINGS_OF_MACHINE = ("name", "runs_dir")  # where a run is, not what it does


@atexit.register
def _release_all() -> None:
    while _held:
        _held.popitem()[1].close()


def acquire(run_path: Path) -> None:
    """Become the writer of the run, or raise an error that names the process that is."""
    path = _lock_path(run_path)
    if path in _held:
        return
    file = path.open("a+")
    for _ in range(5):  # a process that lists runs holds each lock for an instant
        if _try_lock(file):
            break
        time.sleep(0.05)
    else:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise UserError(f"{run_path} is being written by {owner}: wait until it ends, or stop it")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    _held[path] = file


def try_acquire(run_path: Path) -> bool:
    """Become the writer of the run, unless it has one already, in this process or another. Returns success."""
    with _acquiring:
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


def is_locked(run_path: Path) -> bool:
    """Whether a process is the writer of this run."""
    path = _lock_path(run_path)
    if path in _held:
        return True
    try:
        file = path.open("r+")
    except OSError:
        return False  # never locked, or not readable
    with file:
        return not _try_lock(file)


def _try_lock(file: IO[str]) -> bool:
    """False if another process holds the lock. On a file system without locks, always True."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


def _lock_path(run_path: Path) -> Path:
    return run_path.resolve() / NAME


_NAME = re.compile(r"\w[\w.+=-]{0,199}")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' cannot name a run: use letters, digits and . _ + = - only")


def as_name(text: str) -> str:
    """Convert a text, such as the stem of a file, to a valid name of a run."""
    return re.sub(r"[^\w.+=-]", "-", text).lstrip("-.+=") or "run"


def check_writable(runs_dir: Path) -> None:
    """Raise unless runs can be created in this folder, which need not exist yet. Access rights are not sufficient."""
    folder = next(p for p in (runs_dir, *runs_dir.absolute().parents) if os.path.lexists(p))
    try:
        tempfile.TemporaryDirectory(prefix=".assay-", dir=folder).cleanup()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{folder} is not writable ({why}): choose another folder with --runs_dir") from None


class Run(Closeable):
    """The directory of one run. The process that creates or resumes it holds the lock until `close` or its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics: IO[str] | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @classmethod
    def create(cls, runs_dir: Path, name: str, config_toml: str) -> Run:
        """Create runs_dir/name, or name-2, name-3, ... if that exists, with config.toml and environment.json."""
        check_name(name)
        try:
            make_folder(runs_dir)
            run = cls(next(path for path in _candidates(runs_dir, name) if _claim(path, config_toml)))
            run.write_environment()
        except OSError as error:
            raise UserError(
                f"cannot create a run in {runs_dir} ({error.strerror or error}): choose another folder with runs_dir"
            ) from error
        return run

    @classmethod
    def open(cls, path: Path, *, write: bool = False) -> Run:
        """Open an existing run. `write`: become its writer, to resume it."""
        if not is_run(path):
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
        """Write versions, machine and command of this session. Later sessions are appended under `resumed`."""
        path = self.path / "environment.json"
        first, now = read_json(path), describe_environment()
        write_json(path, {**first, "resumed": [*first.get("resumed", []), now]} if first else now)

    def record_threads(self, threads: int) -> None:
        """Add the number of CPU threads, which is chosen when the model is loaded, to the entry of this session."""
        path = self.path / "environment.json"
        if environment := read_json(path):
            (environment.get("resumed") or [environment])[-1]["threads"] = threads
            write_json(path, environment)

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
        """All lines of metrics.jsonl, except an incomplete last line."""
        return read_metrics(self.path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.path / "summary.json", summary)

    def read_summary(self) -> dict[str, Any]:
        """The content of summary.json; empty if there is none yet."""
        return read_json(self.path / "summary.json")

    def write_status(self, state: str, total_steps: int, error: str = "") -> None:
        """Write status.json: how the run ended ("running" until then), its planned steps, and why it failed."""
        write_json(self.path / "status.json", {"state": state, "total_steps": total_steps, "error": error})

    def read_status(self) -> dict[str, Any]:
        """The content of status.json; empty for a run that has not begun, or of an earlier version."""
        return read_json(self.path / "status.json")

    @property
    def state(self) -> str:
        """running, finished, stopped (on request), failed (see the error in status.json) or interrupted (killed)."""
        return state_of(is_locked(self.path), self.read_status(), self.read_summary())

    def truncate_after(self, step: int) -> None:
        """Delete everything later than the checkpoint of `step`; the resumed run writes it again.

        Safe to repeat after a crash. Without that checkpoint, everything that belongs to a later step is deleted.
        """
        lines = [(line, row) for line, row in _metrics_lines(self.path) if row["step"] <= step]
        # Lines of this step that were logged after its checkpoint, such as a final evaluation, are written again.
        text = checkpoints.saved_metrics(self.path, step)
        if text is None:  # which lines were logged later is not known, except for the final evaluation
            text = b"".join(line for line, row in lines if "after/accuracy" not in row)
        checkpoints.truncate_after(self.path, step)  # first: a checkpoint must never be newer than the metrics
        rollouts.truncate_after(self.path, step)
        if self.read_summary().get("steps", step) > step:
            (self.path / "summary.json").unlink()
        self._close_metrics()
        with atomic_write(self.path / "metrics.jsonl") as file:
            file.write(text)

    def close(self) -> None:
        self._close_metrics()
        release(self.path)

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def state_of(locked: bool, status: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """See `Run.state`. `locked`: whether a process is the writer of the run."""
    if locked:
        return "running"
    ended = status.get("state")
    if ended == "running":
        return "interrupted"
    return str(ended or ("finished" if summary else "stopped"))


def read_metrics(run_path: Path) -> list[dict[str, Any]]:
    """See `Run.read_metrics`."""
    return [{key: from_json(value) for key, value in row.items()} for _, row in _metrics_lines(run_path)]


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory. Folders that may not be read are not."""
    try:
        return (path / "config.toml").is_file()
    except OSError:
        return False


def access_problem(path: Path) -> str | None:
    """Why a folder that exists cannot be read, and what to do; None if it can be read, or there is no such folder."""
    try:
        os.listdir(path)
        os.stat(f"{path}/.")  # fails without the permission to open files in it
    except PermissionError:
        denied = next((folder for folder in reversed(path.parents) if not _is_searchable(folder)), path)
        return (
            f"{denied} cannot be read (permission denied): run chmod -R u+rX {denied} if it is yours, or ask its owner"
        )
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        return f"{path} cannot be read ({(error.strerror or str(error)).lower()}): check the disk"
    return None


def _is_searchable(folder: Path) -> bool:
    """Whether files in a folder may be opened."""
    try:
        os.stat(f"{folder}/.")
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def unreadable_folders(runs_dir: Path) -> list[str]:
    """Why folders in a folder of runs, or the folder itself, cannot be read: they may be runs."""
    problem = access_problem(runs_dir)
    if problem or not runs_dir.is_dir():
        return [problem] if problem else []
    return [text for path in sorted(runs_dir.iterdir()) if (text := access_problem(path))]


def list_runs(runs_dir: Path) -> list[Run]:
    """The runs of a folder, oldest first."""
    paths = [path for path in runs_dir.iterdir() if is_run(path)] if runs_dir.is_dir() else []
    return [Run(path) for path in sorted(paths, key=lambda path: ((path / "config.toml").stat().st_mtime, path.name))]


def _metrics_lines(run_path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The complete lines of metrics.jsonl, as bytes and parsed."""
    path = run_path / "metrics.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in json_lines(file):
            if not line.is_complete:
                return
            if line.value is None or not isinstance(line.value.get("step"), int):
                raise UserError(f"{path}, line {line.number}: not a line of metrics; fix or delete it")
            yield line.content, line.value


def free_name(runs_dir: Path, name: str) -> str:
    """The name that a new run will get, unless another process takes it first: NAME, or NAME-2, ... if that exists."""
    free = (path for path in _candidates(runs_dir, name) if not path.exists() or (path.is_dir() and _is_free(path)))
    return next(free).name


def _candidates(runs_dir: Path, name: str) -> Iterator[Path]:
    return (runs_dir / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))


def _claim(path: Path, config_toml: str) -> bool:
    """Become the writer of a new or empty folder, and write config.toml; False if it belongs to another run.

    Of several processes that try this, one gets the lock. If a process crashes before it has written config.toml, the
    folder can be used again.
    """
    with suppress(FileExistsError):
        make_folder(path)
    if not path.is_dir() or not _is_free(path) or not try_acquire(path):
        return False
    if not _is_free(path):  # another process was faster, and has ended already
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
    """Whether the folder is empty, except for leftovers of an attempt to start a run."""
    return all(file.name == NAME or is_temporary(file) for file in path.iterdir())


def _open_for_append(path: Path) -> IO[str]:
    """Open metrics.jsonl, without the incomplete line that a crash may have left at its end."""
    with path.open("ab+") as file:
        file.seek(0)
        text = file.read()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            file.truncate(whole)
    sync(path.parent)  # the file may be new
    return path.open("a", encoding="utf-8")


# Reading of runs in which some files may be damaged, missing or unreadable

METRICS = "metrics.jsonl"
FOLDERS = ("rollouts", "evals")
MAX_FILE = 64 * 2**20  # bytes of a file that is read as a whole
MAX_DEPTH = 100  # of nested lists and dictionaries


class Refused(OSError):
    """A file that is not opened, or not read to its end. The message names it."""


class RunFiles:
    """Reads the files of a run. `problems` says what could not be read; only `open` and `read` raise errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._problems: dict[str, str] = {}  # by file

    @property
    def problems(self) -> list[str]:
        """One line per file, also for folders that cannot be listed."""
        for folder in FOLDERS:
            self.names(folder)
        return list(self._problems.values())

    def add_problem(self, text: str) -> None:
        self._problems[text] = text

    def place(self, name: str) -> Path:
        """The path of a file or folder of the run."""
        return self.path / name

    def open(self, name: str) -> IO[bytes]:
        """Open a regular file, to read it. Raises OSError for anything else."""
        path = self.place(name)
        if why := unreadable(path):
            raise Refused(f"{name} {why}")
        # Not blocking: the file may have been replaced by a pipe since the check.
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise Refused(f"{name} has more than {MAX_FILE >> 20} MiB")
        return content

    def text(self, name: str) -> str:
        return self.read(name).decode()

    def config(self) -> dict[str, Any]:
        """The settings; empty if they cannot be read."""
        return self._parsed("config.toml", tomllib.loads)

    def document(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty if it is missing or damaged."""
        return self._parsed(name, json.loads)

    def _parsed(self, name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        self._problems.pop(name, None)
        try:
            value = parse(self.text(name))
            if not isinstance(value, dict):
                raise ValueError("it does not contain an object")
            if is_deeper(value, MAX_DEPTH):
                raise ValueError("it is nested too deeply")
            return value
        except FileNotFoundError:
            pass
        except OSError as error:
            self._problems[name] = reason_of(name, error)
        except (ValueError, RecursionError) as error:
            self._problems[name] = f"{name} is not valid {name.rpartition('.')[2].upper()} ({error})"
        return {}

    def readable_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that can be read."""
        rows = [{key: from_json(value) for key, value in row.items()} for row in self.lines(self.path / METRICS)]
        return [row for row in rows if isinstance(row.get("step"), int)]

    def lines(self, path: Path) -> Iterator[dict[str, Any]]:
        """The lines of a file that are JSON objects. The incomplete last line of metrics is left out without a word:
        the run may be in progress, or was killed.
        """
        name = path.relative_to(self.path).as_posix()
        count = damaged = 0
        try:
            with self.open(name) as file:
                for line in json_lines(file):
                    if line.value is not None:
                        yield line.value
                    elif name == METRICS and not line.is_complete:
                        break
                    count += 1
                    damaged += line.value is None
        except FileNotFoundError:
            return
        except OSError as error:
            self._problems[name] = reason_of(name, error)
        if damaged:
            self._problems[name] = f"{name}: {damaged} of {count} lines cannot be read"

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder of the run; none if it is missing, or cannot be listed."""
        try:
            return sorted(name for name in os.listdir(self.place(folder)) if name.isprintable())
        except FileNotFoundError:
            pass
        except Refused as error:
            self._problems[folder] = str(error)
        except OSError as error:
            self._problems[folder] = f"{folder} cannot be listed ({reason(error)})"
        return []


def reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def reason_of(name: str, error: BaseException) -> str:
    """Why a file cannot be read."""
    if isinstance(error, Refused):
        return str(error)
    return f"{name} cannot be read ({reason(error) if isinstance(error, OSError) else describe_error(error)})"


def is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and dictionaries are nested in more levels than `depth`."""
    if not isinstance(value, (dict, list)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(is_deeper(item, depth - 1) for item in items)


def setting(tree: Any, key: str) -> Any:
    """The value of a dotted key of the config; None if it is not set."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a config by dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def default_settings() -> dict[str, Any]:
    """Defaults of all settings by dotted keys, as they are read from a config file. None: there is no fixed default."""
    from assay.config import TrainConfig  # takes longer to import than the rest

    return {key: _as_read(value) for key, value in flattened(TrainConfig().model_dump()).items()}


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Key, value and default of the settings that differ from their defaults."""
    defaults = default_settings()
    flat = list(flattened(config).items())[:MAX_SETTINGS]
    changed = [(key, value) for key, value in flat if value != defaults.get(key)]
    return [(key, value, defaults.get(key)) for key, value in changed if key not in SETTINGS_OF_MACHINE]


def _as_read(value: Any) -> Any:
    return [_as_read(item) for item in value] if isinstance(value, (list, tuple)) else value
