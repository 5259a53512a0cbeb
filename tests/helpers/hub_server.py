"""A local server in place of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from http_parts import Answer, small_server

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(folder: Path, name: str) -> Iterator[str]:
    """A server with the part of the hub's interface that downloads use, for one model; yields its address."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    tree = [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for path, data in files.items()
    ]
    info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}

    def answer(path: str, body: Any) -> Answer:
        path = path.partition("?")[0]
        if path.startswith(f"/api/models/{name}"):
            data = json.dumps(tree if path.startswith(f"/api/models/{name}/tree/") else info).encode()
        else:
            data = files.get(path.rpartition("/")[2], b"")
        tag = f'"{hashlib.sha1(data).hexdigest()}"'
        return 200 if data else 404, data, {"ETag": tag, "X-Repo-Commit": COMMIT}

    with small_server(answer) as server:
        yield server.url
