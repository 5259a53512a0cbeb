"""A small HTTP server whose answers are computed by a function, for tests of engines behind servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

T = TypeVar("T", bound=ThreadingHTTPServer)
Answer = tuple[int, Any]  # status and body: bytes as they are, anything else as JSON


class SmallServer(ThreadingHTTPServer):
    """Calls `answer(path, body)` in a thread per connection, and records all requests. `drop`: close connections."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, answer: Callable[[str, Any], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.drop = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        """Clients that abort close their connection."""

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SmallServer

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = self.rfile.read(size)
        if len(body) < size:  # the client has aborted the request before all of it was sent
            self.close_connection = True
            return
        content = json.loads(body) if body else None
        self.server.requests.append((self.path, content))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.server.drop:
            self.close_connection = True
            return
        status, answer = self.server.answer(self.path, content)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running(server: T) -> Iterator[T]:
    """The server answers requests in a thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def small_server(answer: Callable[[str, Any], Answer]) -> AbstractContextManager[SmallServer]:
    return running(SmallServer(answer))
