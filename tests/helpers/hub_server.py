"""A local server in place of the Hugging Face hub."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

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


@dataclass
class Uploads:
    """What a hub has received. `files`: by path, of all repositories. `denied`: if not 0, the status of all answers."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    denied: int = 0


@contextmanager
def upload_hub() -> Iterator[Uploads]:
    """A server with the part of the hub's interface that uploads use. Large files are uploaded before the commit."""
    uploads, stored = Uploads(), dict[str, bytes]()

    def answer(path: str, body: Any) -> Answer:
        path = path.partition("?")[0]
        uploads.tokens.add(server.headers[-1].get("authorization", ""))
        if uploads.denied:
            return uploads.denied, {"error": "you shall not write"}
        if path == "/api/repos/create":
            uploads.created.append(body)
            name = f"{body.get('organization', 'me')}/{body['name']}"
            return 200, {"url": f"{uploads.url}/{name}", "id": name}
        if path == "/api/validate-yaml":  # of the model card
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            large = [file["path"].endswith((".safetensors", ".gguf")) for file in body["files"]]
            files = zip(body["files"], large, strict=True)
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
                for file, lfs in files
            ]
            return 200, {"files": modes}
        if path.endswith("/info/lfs/objects/batch"):
            actions = [
                {**item, "actions": {"upload": {"href": f"{uploads.url}/store/{item['oid']}"}}}
                for item in body["objects"]
            ]
            return 200, {"transfer": "basic", "objects": actions}
        if path.startswith("/store/"):
            stored[path.rpartition("/")[2]] = body if isinstance(body, bytes) else json.dumps(body).encode()
            return 200, {}
        if "/commit/" in path:
            for item in map(json.loads, body.splitlines()):
                value = item["value"]
                if item["key"] == "file":
                    uploads.files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    uploads.files[value["path"]] = stored[value["oid"]]
                elif item["key"] == "deletedFile":
                    del uploads.files[value["path"]]
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            return 200, {
                "commitUrl": f"{uploads.url}/{name}/commit/{COMMIT}",
                "commitOid": COMMIT,
                "pullRequestUrl": None,
            }
        if "/tree/" in path:
            return 200, [{"type": "file", "path": name, "size": 1, "oid": COMMIT} for name in uploads.files]
        return 404, {"error": f"unknown path {path}"}

    # Large files go through HTTP, not through the protocol of the binary package hf-xet.
    with small_server(answer) as server, mock.patch("huggingface_hub.constants.HF_HUB_DISABLE_XET", True):
        uploads.url = server.url
        yield uploads
