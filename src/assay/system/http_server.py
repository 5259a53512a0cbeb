"""HTTP servers: binding a port, limits on connections before a request reaches the application, and signals."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from assay.types import UserError

if TYPE_CHECKING:
    import uvicorn

HEADER_TIMEOUT_S = 15.0  # for the headers of a request
MAX_HEADER_BYTES = 1 << 16  # of a request line with its headers, of trailers, and of a chunk extension
MAX_PIPELINED = 16  # requests of a connection that wait for the response to an earlier one
READ_TIMEOUT_S = 300.0  # for a client to read anything of a response that does not fit into the buffers


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_same_origin(headers: Mapping[str, str], scheme: str = "http") -> bool:
    """Whether a request is not caused by a web page of another origin. Other ports of this machine are other origins.

    Browsers report this in the headers. Clients that are not browsers send neither header.
    """
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return False
    return headers.get("origin") in (None, f"{scheme}://{headers.get('host')}")


def bind(host: str, port: int, *, listen: bool = False) -> socket.socket:
    """A socket that is bound, so that a port that is in use is reported early. `listen`: connections are queued."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol given, asyncio sets TCP_NODELAY. Otherwise short answers wait 40 ms for an acknowledgment.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        if listen:
            listener.listen()
    except (OSError, UnicodeError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot listen on {host}:{port} ({reason}): choose another --host or --port (0: any free port)"
        ) from None
    return listener


def limit_headers(config: uvicorn.Config) -> None:
    """Close connections with long or slow headers, with too many pipelined requests, or with unread responses.

    uvicorn itself closes only connections that send nothing after a response (`timeout_keep_alive`). Its parser h11
    limits the length of headers, its parser httptools does not.
    """
    config.h11_max_incomplete_event_size = MAX_HEADER_BYTES - 1
    config.load()
    base: Any = config.http_protocol_class
    is_h11 = not hasattr(base, "on_headers_complete")

    class LimitedProtocol(base):
        header_bytes = 0  # since the connection was made, or since the last body part or end of a request

        def data_received(self, data: bytes) -> None:
            while data and not self.transport.is_closing():
                room = MAX_HEADER_BYTES - self.header_bytes
                part, data = data[:room], data[room:]
                self.header_bytes += 0 if is_h11 else len(part)
                super().data_received(part)
                if self.header_bytes >= MAX_HEADER_BYTES:
                    self.transport.close()

        # Only httptools calls the next three.
        def on_headers_complete(self) -> None:
            self.header_bytes = 0
            super().on_headers_complete()
            if len(self.pipeline) > MAX_PIPELINED:
                self.transport.close()

        def on_body(self, body: bytes) -> None:
            self.header_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self.header_bytes = 0
            super().on_message_complete()

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.deadline = self.unread = self.loop.call_later(HEADER_TIMEOUT_S, self.close_unless_begun)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.deadline.cancel()
            if not self.transport.is_closing():
                wait_s = self.timeout_keep_alive + HEADER_TIMEOUT_S
                self.deadline = self.loop.call_later(wait_s, self.close_unless_begun)

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self.deadline, self.unread):
                timer.cancel()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.abort_unless_read(last_size=sys.maxsize)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.unread.cancel()

        def abort_unless_read(self, last_size: int) -> None:
            """The buffer only shrinks while writing is paused. `last_size`: its bytes at the last check."""
            size = self.transport.get_write_buffer_size()
            if size >= last_size:
                self.transport.abort()
            else:
                self.unread = self.loop.call_later(READ_TIMEOUT_S, self.abort_unless_read, size)

        def close_unless_begun(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    config.http_protocol_class = LimitedProtocol


def make_http_server(app: Any, on_ready: Callable[[], None], **options: Any) -> Any:
    """A server that calls `on_ready` when connections are accepted. `options`: see `uvicorn.Config`."""
    import uvicorn

    class HttpServer(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # `serve_until_stopped` handles signals: uvicorn would raise them again at the end

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                on_ready()

        def stop(self) -> None:
            """Stop after the running requests; the second time immediately."""
            self.force_exit = self.should_exit
            self.should_exit = True

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", ws="none", server_header=False, **options
    )
    limit_headers(config)
    return HttpServer(config)


async def serve_until_stopped(server: Any, listener: socket.socket, on_stop: Callable[[], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. `on_stop`: called when the server only finishes the running requests."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.stop()
        on_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            loop.add_signal_handler(number, stop)
    await server.serve([listener])
