"""Messages between processes over pipes: a length, then the payload.

`send` and `receive` use pickle, so both ends must be trusted. Sandboxed workers answer in JSON: they may run code that
a model wrote, and unpickling executes code.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import struct
import time
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

MAX_JSON = 16 << 20  # bytes per message

READ_AHEAD = 1 << 20  # bytes that a `LoopPipe` buffers
_CHUNK = 1 << 16  # bytes per read: the capacity of a pipe
LENGTH = struct.Struct("<Q")
_encode = json.JSONEncoder(ensure_ascii=False).encode


class BadMessage(Exception):
    """A message violates the protocol; the text says how, in one line."""


def send(descriptor: int, message: Any, deadline: float | None = None) -> None:
    """Send a pickled message.

    With a deadline the descriptor must be non-blocking; raises TimeoutError if the message is not written by then.
    """
    send_bytes(descriptor, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), deadline)


def receive(descriptor: int) -> Any:
    """Return the next pickled message. Raises EOFError if the other end is closed."""
    (length,) = LENGTH.unpack(_read(descriptor, LENGTH.size))
    return pickle.loads(_read(descriptor, length))


def send_json(descriptor: int, message: dict[str, Any]) -> None:
    send_bytes(descriptor, encode_json(message))


def encode_json(message: dict[str, Any]) -> bytes:
    """Encode a message; lone surrogates, NaN and infinities are preserved. Raises BadMessage if it is too long."""
    payload = _encode(message).encode("utf-8", "surrogatepass")
    if len(payload) > MAX_JSON:
        raise BadMessage(f"it is longer than {MAX_JSON >> 20} MiB")
    return payload


class LoopPipe:
    """Sends and receives lists of pickled messages between event loops, so both ends must be trusted.

    Messages that are sent in one iteration of the loop, or by callbacks of futures that it finishes, travel together.
    """

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._pipes = incoming, outgoing
        self._unsent: list[Any] = []
        self._incoming: asyncio.ReadTransport | None = None
        self._outgoing: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        import asyncio  # late: most processes that use this module need no event loop

        self._loop, self._reader = asyncio.get_running_loop(), asyncio.StreamReader(READ_AHEAD)
        incoming, outgoing = self._pipes
        protocol = asyncio.StreamReaderProtocol(self._reader)
        self._incoming, _ = await self._loop.connect_read_pipe(lambda: protocol, incoming)
        self._outgoing, _ = await self._loop.connect_write_pipe(asyncio.BaseProtocol, outgoing)

    def close(self) -> None:
        """Close both pipes. What is not written yet is lost."""
        if self._incoming is not None:
            self._incoming.close()
        if self._outgoing is not None and not self._outgoing.is_closing():
            self._outgoing.abort()

    def send(self, message: Any) -> None:
        """Never waits."""
        if not self._unsent:
            self._loop.call_soon(self._loop.call_soon, self._flush)
        self._unsent.append(message)

    async def receive(self) -> list[Any]:
        """The next messages. Raises EOFError or OSError if the other end is closed."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    def _flush(self) -> None:
        payload, self._unsent = pickle.dumps(self._unsent, protocol=pickle.HIGHEST_PROTOCOL), []
        if self._outgoing is not None and not self._outgoing.is_closing():
            self._outgoing.write(LENGTH.pack(len(payload)) + payload)


class JsonReader:
    """Reads messages from an untrusted process, buffering all bytes that are available."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()

    def receive(self, deadline: float, limit: int = MAX_JSON) -> dict[str, Any]:
        """Return the next message, a dict with a text `kind`, of at most `limit` bytes.

        Raises EOFError if the other end is closed, TimeoutError at the deadline, BadMessage if it is malformed.
        """
        (length,) = LENGTH.unpack(self._take(LENGTH.size, deadline))
        if length > limit:
            raise BadMessage(f"it announces {length} bytes")
        payload = self._take(length, deadline)
        try:
            message = json.loads(payload.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"it is not JSON ({type(error).__name__})") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise BadMessage("it has no kind")
        return message

    def _take(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            if not _wait_until_ready(self._descriptor, select.POLLIN, deadline):
                raise TimeoutError
            part = os.read(self._descriptor, _CHUNK)
            if not part:
                raise EOFError
            self._buffer += part
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def send_bytes(descriptor: int, payload: bytes, deadline: float | None = None) -> None:
    rest = memoryview(LENGTH.pack(len(payload)) + payload)
    while rest:
        if deadline is not None and not _wait_until_ready(descriptor, select.POLLOUT, deadline):
            raise TimeoutError
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), _CHUNK))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _wait_until_ready(descriptor: int, event: int, deadline: float) -> bool:
    """Return whether the descriptor can be read or written before the deadline. After the deadline it is polled once,
    so that a parent that reads late does not count as a slow worker."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
