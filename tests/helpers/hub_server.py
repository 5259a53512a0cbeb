"""A local server in place of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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

    class HubHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0]
            if path.startswith(f"/api/models/{name}/tree/"):
                data = json.dumps(tree).encode()
            elif path.startswith(f"/api/models/{name}"):
                data = json.dumps(info).encode()
            else:
                data = files.get(path.rpartition("/")[2], b"")
            self.send_response(200 if data else 404)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
