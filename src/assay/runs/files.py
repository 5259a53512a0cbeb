"""Writing so that a crash never leaves half a file under its real name, and JSON that stays JSON."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

# The spelling that both Python's float() and JavaScript's Number() read back.
NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_ENCODER = json.JSONEncoder(allow_nan=False)
_TEMPORARY = re.compile(r"\..+\.tmp-\d+")  # what `replacing` calls its files
_TROUBLES = {  # why nothing more can be written, and what to do about it
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk is full", "free some space"),
    errno.EFBIG: ("a file would be larger than this shell or disk allows (see ulimit -f)", "raise that limit"),
    errno.EIO: ("the disk or network drive fails (input/output error)", "check it"),
    errno.ESTALE: ("the network drive has lost a file (stale file handle)", "mount it again"),
    errno.EROFS: ("the disk can only be read", "make it writable"),
}


def plain(value: Any) -> Any:
    """The value in JSON's own types. Non-finite numbers become strings; what JSON cannot hold becomes its text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum's value, not its name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _name_of(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays, without importing either
        return plain(value.tolist())
    return str(value)


def _name_of(value: float) -> str:
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def number(value: Any) -> Any:
    """Undo what `plain` did to a non-finite number; anything else as it is."""
    return NON_FINITE.get(value, value) if isinstance(value, str) else value


def json_line(value: Any) -> str:
    """One line. ASCII escapes let lone surrogates through and keep line separators out of the text."""
    try:
        return _ENCODER.encode(value) + "\n"
    except (TypeError, ValueError):  # it needs `plain`, which would be slow for every rollout
        return _ENCODER.encode(plain(value)) + "\n"


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes the place of `path` at the end, whole and on disk, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(plain(value), allow_nan=False, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file is missing, damaged or holds something else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def trouble(error: BaseException) -> tuple[str, str] | None:
    """What keeps the disk from being written to, and the remedy; None for errors that have nothing to do with it."""
    for code, found in _TROUBLES.items():
        # Libraries that write by themselves wrap the system's error in their own.
        if getattr(error, "errno", None) == code or re.search(rf"(os error |\[Errno ){code}\b", str(error)):
            return found
    return None


def sync(path: Path) -> None:
    """Put a file's content on disk, or a folder's own entries (names, renames)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(top: Path) -> None:
    """Put a folder and everything below it on disk."""
    for path in (*top.rglob("*"), top):
        sync(path)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder its name, replacing a file or empty folder of that name, and put the new name on disk.

    All renames go through here: without the second half, a power cut may undo them after the fact.
    """
    os.replace(source, target)
    for folder in {source.parent, target.parent}:
        sync(folder)


def make_folder(path: Path) -> None:
    """Create a folder with its parents, where missing, and put their names on disk."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def is_temporary(path: Path) -> bool:
    """Whether `replacing` writes, or wrote, this file."""
    return _TEMPORARY.fullmatch(path.name) is not None and path.is_file()


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files of dead writers, and nothing else."""
    for path in folder.glob(".*.tmp-*"):
        if is_temporary(path):
            path.unlink(missing_ok=True)
