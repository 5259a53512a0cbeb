"""Files of a run: atomic and durable writes, and JSON with non-finite numbers.

After a crash, a file is complete or absent. All JSONL files of runs are read with `json_lines`, which returns damaged
lines as such. The data of users is read by `assay.tasks.sources`, where a damaged line is an error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from assay.types import UserError

# Spelled so that both Python's float() and JavaScript's Number() can read them.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
MAX_LINE = 64 * 2**20  # bytes of a line of a JSONL file
_ENCODER = json.JSONEncoder(allow_nan=False)
_TEMPORARY = re.compile(r"\..+\.tmp-\d+")  # names of the temporary files of `atomic_write`
_DISK_ERRORS = {  # cause and remedy
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk is full", "free some space"),
    errno.EFBIG: ("a file would be larger than this shell or disk allows (see ulimit -f)", "raise that limit"),
    errno.EIO: ("the disk or network drive failed (input/output error)", "check it"),
    errno.ESTALE: ("the network drive has lost a file (stale file handle)", "mount it again"),
    errno.EROFS: ("the disk is read-only", "make it writable"),
}


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def to_json(value: Any, non_finite: Callable[[float], Any] = _name_of) -> Any:
    """Convert a value to types of JSON. Objects of other types become strings; non-finite numbers too, by default."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # for an enum, its value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else non_finite(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item, non_finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item, non_finite) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json(item, non_finite) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays, without importing either
        return to_json(value.tolist(), non_finite)
    return str(value)


def print_json(value: Any) -> None:
    print(json.dumps(to_json(value), indent=2))


def from_json(value: Any) -> Any:
    """Convert a string that stands for a non-finite number back; return other values unchanged."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def json_line(value: Any) -> str:
    """One line of JSON. ASCII escapes allow lone surrogates and keep line separators out of the text."""
    try:
        return _ENCODER.encode(value) + "\n"
    except (TypeError, ValueError):  # only then convert it, which would be slow for every rollout
        return _ENCODER.encode(to_json(value)) + "\n"


def json_object(content: bytes, decode: Callable[[bytes], Any] = json.loads) -> dict[str, Any] | None:
    """The object in a JSON text; None if the text is damaged, or contains something else."""
    try:
        value = decode(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class JsonLine(NamedTuple):
    """A line of a JSONL file."""

    number: int  # from 1
    start: int  # its first byte in the file
    size: int  # in bytes
    content: bytes  # with the newline; of a line that is too long, the end
    value: dict[str, Any] | None  # None: it is not a JSON object, or it is too long

    @property
    def is_complete(self) -> bool:
        """Whether the line ends with a newline: the last line of a run in progress may be half-written."""
        return self.content.endswith(b"\n")


def json_lines(
    file: IO[bytes], limit: int = MAX_LINE, decode: Callable[[bytes], Any] = json.loads
) -> Iterator[JsonLine]:
    """The lines of a JSONL file from its position on. `limit`: bytes of a line that are read."""
    number, start = 0, file.tell()
    while content := file.readline(limit):
        number += 1
        size = len(content)
        while len(content) == limit and not content.endswith(b"\n"):
            content = file.readline(limit)
            size += len(content)
        value = json_object(content, decode) if size == len(content) else None
        yield JsonLine(number, start, size, content, value)
        start += size


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the block ends. After an error, `path` is unchanged."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def reported(path: Path, advice: str) -> Iterator[None]:
    """Errors of the block, which writes a file or folder that the user has named, are the user's to solve."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror or error}): {advice}") from error


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(to_json(value), allow_nan=False, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, damaged or contains something else."""
    try:
        content = path.read_bytes() if path.is_file() else b""  # reading a pipe would never end
    except OSError:
        return {}
    return json_object(content) or {}


Stamp = tuple[int, int, int, int]  # size, times of the last changes of content and file, inode


def as_stamp(found: os.stat_result) -> Stamp:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def stamp_of(path: Path) -> Stamp | None:
    try:
        return as_stamp(path.stat())
    except (OSError, ValueError):
        return None


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def unreadable(path: Path) -> str | None:
    """Why a file cannot be read, as in "is a named pipe"; None if it can, or is missing. A pipe is not opened: that
    would wait for a writer.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            return f"is {_KINDS.get(kind, 'not a regular file')}"
        path.open("rb").close()
    except FileNotFoundError:
        return "is a link to a file that does not exist" if path.is_symlink() else None
    except OSError as error:
        return f"cannot be read ({(error.strerror or str(error)).lower()})"
    return None


def user_folder(variable: str, default: str) -> Path:
    """Our folder among the user's caches or states, as XDG describes them. Raises RuntimeError without a home folder.

    `variable`: of the environment, which may name the parent folder. `default`: that folder, in the home folder.
    """
    given = Path(os.environ.get(variable, ""))
    return (given if given.is_absolute() else Path.home() / default) / "assay"


def disk_error(error: BaseException) -> tuple[str, str] | None:
    """Cause and remedy of an error of the disk; None for other errors."""
    for code, cause_and_remedy in _DISK_ERRORS.items():
        # Libraries that write files wrap the system's error in their own.
        if getattr(error, "errno", None) == code or re.search(rf"(os error |\[Errno ){code}\b", str(error)):
            return cause_and_remedy
    return None


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a folder (names, renames), to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(top: Path) -> None:
    """Flush a folder and everything below it to disk."""
    for path in (*top.rglob("*"), top):
        sync(path)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, replacing a file or empty folder of that name, and flush the new name to disk.

    All renames use this function: without the flush, a power failure may undo them.
    """
    os.replace(source, target)
    for folder in {source.parent, target.parent}:
        sync(folder)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and flush their names to disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def is_temporary(path: Path) -> bool:
    """Whether this is a temporary file of `atomic_write`."""
    return _TEMPORARY.fullmatch(path.name) is not None and path.is_file()


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files that processes left when they died."""
    for path in folder.glob(".*.tmp-*"):
        if is_temporary(path):
            path.unlink(missing_ok=True)
