"""Binding to a port, and connections that do not send a request."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from assay.system import http_server
from assay.types import UserError

uvicorn = pytest.importorskip("uvicorn")
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_loopback_addresses() -> None:
    assert all(map(http_server.is_loopback, ("127.0.0.1", "localhost", "::1", "127.3.2.1")))
    assert not any(map(http_server.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_port_in_use_is_reported_in_one_line() -> None:
    message = r"cannot listen on 127.0.0.1:\d+ \(.*\): choose another --host or --port"
    with http_server.bind("127.0.0.1", 0, listen=True) as other, pytest.raises(UserError, match=message):
        http_server.bind("127.0.0.1", other.getsockname()[1])
    with pytest.raises(UserError, match=r"cannot listen on nowhere\.invalid"):
        http_server.bind("nowhere.invalid", 0)


def test_answers_are_not_delayed() -> None:
    """asyncio sets TCP_NODELAY only for sockets whose protocol is known."""
    with http_server.bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


async def app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(0.5 if scope["path"] == "/slow" else 0.0)
    body = b"ok".rjust(2 if scope["path"] != "/long" else 16 << 20)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def server(implementation: str, keep_alive_s: float) -> Iterator[int]:
    """A server with limited headers; gives its port."""
    config = uvicorn.Config(app, http=implementation, lifespan="off", log_level="warning", ws="none")
    config.timeout_keep_alive = keep_alive_s
    http_server.limit_headers(config)
    running = uvicorn.Server(config)
    with http_server.bind("127.0.0.1", 0, listen=True) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


def read_response(connection: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"ok"):
        part = connection.recv(1000)
        assert part
        received += part
    return received


@pytest.mark.parametrize("implementation", ["httptools", "h11"])
def test_connections_that_send_no_complete_request_are_closed(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(implementation)
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.15)
    with server(implementation, keep_alive_s=0.15) as port:
        for beginning in (b"", b"GET / HTTP/1.1\r\nHost:"):  # nothing, or half of the first request
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(beginning)
                assert connection.recv(100) == b""
        # Half of the second request, which uvicorn itself would wait for without end; and nothing after the first.
        for beginning in (b"GET / HTTP/1.1\r\nX:", b""):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(REQUEST)
                received = connection.recv(1000)
                connection.sendall(beginning)
                while part := connection.recv(1000):
                    received += part
                assert received.count(b"HTTP/1.1 200") == 1 and received.endswith(b"ok")


@pytest.mark.parametrize("implementation", ["httptools", "h11"])
def test_a_long_answer_is_not_cut_off(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(implementation)
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.1)
    with (
        server(implementation, keep_alive_s=5) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
    ):
        for path in (b"/slow", b"/slow"):
            connection.sendall(REQUEST.replace(b" / ", b" %s " % path))
            read_response(connection)


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {  # the beginning of a connection, and what is repeated
    "a header": (GET + b"X: ", b"a"),
    "headers": (GET, b"X-Y: abc\r\n"),
    "the request line": (b"GET /", b"a"),
    "headers of a later request": (GET + b"\r\n" + GET, b"X-Y: abc\r\n"),
    "trailers": (CHUNKED + b"0\r\n", b"X-Y: abc\r\n"),
    "a chunk extension": (CHUNKED + b"5;x=", b"a"),
    "pipelined requests": (REQUEST.replace(b" / ", b" /slow "), REQUEST),
}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("implementation", ["httptools", "h11"])
def test_endless_headers_close_the_connection_and_take_no_memory(implementation: str) -> None:
    pytest.importorskip(implementation)
    with server(implementation, keep_alive_s=5) as port:
        before = resident_mb()
        for kind, (beginning, unit) in ENDLESS.items():
            if (implementation, kind) == ("h11", "pipelined requests"):
                continue  # uvicorn reads them one by one
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(beginning)
                with pytest.raises(ConnectionError):
                    for _ in range(128):
                        connection.sendall(unit * ((128 << 10) // len(unit)))
                    pytest.fail(f"16 MiB of {kind} were accepted")
        assert resident_mb() - before < 32


@pytest.mark.parametrize("implementation", ["httptools", "h11"])
def test_long_headers_and_large_bodies_are_accepted(implementation: str) -> None:
    pytest.importorskip(implementation)
    header, chunk = b"X: %s\r\n\r\n" % (b"a" * 60_000), b"186a0\r\n%s\r\n" % (b"a" * 100_000)
    with server(implementation, keep_alive_s=5) as port:
        for request in (GET + header, CHUNKED + 20 * chunk + b"0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                for _ in range(2):
                    connection.sendall(request)
                    assert read_response(connection).startswith(b"HTTP/1.1 200")


def test_a_connection_whose_client_does_not_read_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_TIMEOUT_S", 0.2)
    request = REQUEST.replace(b" / ", b" /long ")
    with server("h11", keep_alive_s=5) as port:
        for pause_s in (0.7, 4, 12):  # a busy machine may need longer to notice that nothing is read
            with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
                connection.sendall(request)
                received = 0
                while received < 16 << 20:  # slow, but without a long pause
                    received += len(connection.recv(4 << 20))
                    time.sleep(0.05)
                connection.sendall(request)
                time.sleep(pause_s)
                received = 0
                with suppress(ConnectionError):
                    while part := connection.recv(4 << 20):
                        received += len(part)
            if received < 16 << 20:
                return
        pytest.fail("the whole response was sent to a client that did not read for 12 s")
