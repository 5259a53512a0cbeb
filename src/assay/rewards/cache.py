"""Replies on disk, one file each. Several processes may use a folder: files are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from assay.types import UserError


class ReplyCache:
    """JSON objects by request. The file name is a digest of the request; a damaged file counts as missing."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"judge.cache: cannot create {self.folder}: {error.strerror or error}") from None

    def get(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            reply = json.loads(self._file(request).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return reply if isinstance(reply, dict) else None

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
        except OSError:
            with suppress(OSError):
                os.unlink(name)

    def _file(self, request: Mapping[str, Any]) -> Path:
        text = json.dumps(request, sort_keys=True, ensure_ascii=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self.folder / digest[:2] / f"{digest[2:]}.json"
