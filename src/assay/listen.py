"""Listening on a port: binding, and connections that wait too long for a request."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from assay.types import UserError

if TYPE_CHECKING:
    import uvicorn

HEADER_TIMEOUT_S = 15.0  # for the headers of a request


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


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
    """Close connections that do not send the headers of a request in time, even if they send a byte now and then.

    uvicorn itself closes only connections that send nothing after a response (`timeout_keep_alive`).
    """
    config.load()
    base: Any = config.http_protocol_class

    class LimitedProtocol(base):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.deadline = self.loop.call_later(HEADER_TIMEOUT_S, self.close_unless_begun)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.deadline.cancel()
            if not self.transport.is_closing():
                wait_s = self.timeout_keep_alive + HEADER_TIMEOUT_S
                self.deadline = self.loop.call_later(wait_s, self.close_unless_begun)

        def connection_lost(self, exc: Exception | None) -> None:
            self.deadline.cancel()
            super().connection_lost(exc)

        def close_unless_begun(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

    config.http_protocol_class = LimitedProtocol
