"""Binding to a port, and connections that do not send a request."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from assay import listen
from assay.types import UserError

uvicorn = pytest.importorskip("uvicorn")
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_loopback_addresses() -> None:
    assert all(map(listen.is_loopback, ("127.0.0.1", "localhost", "::1", "127.3.2.1")))
    assert not any(map(listen.is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_a_port_in_use_is_reported_in_one_line() -> None:
    message = r"cannot listen on 127.0.0.1:\d+ \(.*\): choose another --host or --port"
    with listen.bind("127.0.0.1", 0, listen=True) as other, pytest.raises(UserError, match=message):
        listen.bind("127.0.0.1", other.getsockname()[1])
    with pytest.raises(UserError, match=r"cannot listen on nowhere\.invalid"):
        listen.bind("nowhere.invalid", 0)


def test_answers_are_not_delayed() -> None:
    """asyncio sets TCP_NODELAY only for sockets whose protocol is known."""
    with listen.bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


async def app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(1.0 if scope["path"] == "/slow" else 0.0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def server(implementation: str, keep_alive_s: float) -> Iterator[int]:
    """A server with limited headers; gives its port."""
    config = uvicorn.Config(app, http=implementation, lifespan="off", log_level="warning", ws="none")
    config.timeout_keep_alive = keep_alive_s
    listen.limit_headers(config)
    running = uvicorn.Server(config)
    with listen.bind("127.0.0.1", 0, listen=True) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(running.serve([listener])))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


@pytest.mark.parametrize("implementation", ["httptools", "h11"])
def test_connections_that_send_no_complete_request_are_closed(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(implementation)
    monkeypatch.setattr(listen, "HEADER_TIMEOUT_S", 0.3)
    with server(implementation, keep_alive_s=0.3) as port:
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
    monkeypatch.setattr(listen, "HEADER_TIMEOUT_S", 0.2)
    with (
        server(implementation, keep_alive_s=5) as port,
        socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
    ):
        for path in (b"/slow", b"/slow"):
            connection.sendall(REQUEST.replace(b" / ", b" %s " % path))
            received = b""
            while not received.endswith(b"ok"):
                part = connection.recv(1000)
                assert part
                received += part
