"""A small HTTP server whose answers are computed by a function, for tests of engines behind servers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

T = TypeVar("T", bound=ThreadingHTTPServer)
# Status and body (bytes as they are, anything else as JSON), and more headers.
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]


class JsonServer(ThreadingHTTPServer):
    """Calls `respond` in a thread per connection, with the path, the JSON body and the headers of a request."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def respond(self, path: str, body: Any, headers: dict[str, str]) -> Answer | None:
        """None: the connection is closed."""
        raise NotImplementedError

    def handle_error(self, *_: object) -> None:
        """Clients that abort close their connection."""


class SmallServer(JsonServer):
    """Answers with `answer(path, body)`, and records all requests. `drop`: close connections."""

    def __init__(self, answer: Callable[[str, Any], Answer]) -> None:
        super().__init__()
        self.answer = answer
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.drop = False

    def respond(self, path: str, body: Any, headers: dict[str, str]) -> Answer | None:
        self.requests.append((path, body))
        self.headers.append(headers)
        return None if self.drop else self.answer(path, body)

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


def parsed(body: bytes) -> Any:
    """The JSON value of a body; the bytes if it is something else, None if it is empty."""
    try:
        return json.loads(body) if body else None
    except ValueError:
        return body


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JsonServer

    def do_POST(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = self.rfile.read(size)
        if len(body) < size:  # the client has aborted the request before all of it was sent
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.respond(self.path, parsed(body), headers)
        if answer is None:
            self.close_connection = True
            return
        status, content, *more = answer
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(data)), **dict(*more)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST

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
