"""Replies on disk, one file each. Several processes may use a folder: files are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from assay.types import UserError

MAX_BYTES = 64 * 2**20  # of one reply


class ReplyCache:
    """JSON objects by request. The file name is a digest of the request.

    A file without a valid reply counts as missing. The first such file, or the first reply that cannot be stored, is
    reported by a warning.
    """

    def __init__(self, folder: str | Path, is_valid: Callable[[Mapping[str, Any]], bool] = bool) -> None:
        self.folder, self.is_valid = Path(folder).expanduser(), is_valid
        self._warned = False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Where everyone may write, other users could choose rewards.
            self._only_own = bool(self.folder.stat().st_mode & stat.S_IWOTH)
        except OSError as error:
            raise UserError(f"judge.cache: cannot create {self.folder}: {error.strerror or error}") from None

    def get(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        file = self._file(request)
        try:
            return self._read(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cannot read {file} ({error.strerror or error})")
        except (ValueError, RecursionError) as error:
            self._warn(f"{file} is not a reply ({error})")
        return None

    def _read(self, file: Path) -> dict[str, Any]:
        with open(file, "rb", opener=_open) as opened:
            info = os.fstat(opened.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
                raise ValueError("not a regular file" if info.st_size <= MAX_BYTES else "too large")
            if self._only_own and info.st_uid != os.geteuid():
                raise ValueError("written by another user, in a folder that everyone may write to")
            reply = json.loads(opened.read(MAX_BYTES))
        if not isinstance(reply, dict) or not self.is_valid(reply):
            raise ValueError("it has another form")
        return reply

    def put(self, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """Store a reply. A disk that is full or not writable is no reason to fail: the reply is then not stored."""
        file = self._file(request)
        name = ""
        try:
            file.parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as new:
                name = new.name
                json.dump(reply, new)
            os.replace(name, file)
        except OSError as error:
            self._warn(f"cannot write {file} ({error.strerror or error})")
            with suppress(OSError):
                os.unlink(name)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"judge.cache: {problem}; replies that are not cached are requested again", stacklevel=3)

    def _file(self, request: Mapping[str, Any]) -> Path:
        text = json.dumps(request, sort_keys=True, ensure_ascii=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest[2:]}.json"


def _open(path: str, flags: int) -> int:
    """Open neither the target of a link nor a pipe that waits for a writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
