"""Messages between processes over pipes: a length, then the content.

`send` and `receive` use pickle, which is only for messages of trusted processes. Judging processes answer in JSON: they
may run code that a model wrote, and loading a pickle executes code.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import struct
import time
from typing import Any

MAX_JSON = 16 << 20  # bytes of one message

_PART = 1 << 16  # bytes read at a time: what a pipe holds
_LENGTH = struct.Struct("<Q")
_encode = json.JSONEncoder(ensure_ascii=False).encode


class BadMessage(Exception):
    """What came is not a message as agreed. Says in one line what is wrong with it."""


def send(descriptor: int, message: Any, deadline: float | None = None) -> None:
    """TimeoutError if the other side has not taken all of it by the deadline; the descriptor is non-blocking then."""
    send_bytes(descriptor, pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL), deadline)


def receive(descriptor: int) -> Any:
    """The next message. EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return pickle.loads(_read(descriptor, length))


def send_json(descriptor: int, message: dict[str, Any]) -> None:
    send_bytes(descriptor, encode_json(message))


def encode_json(message: dict[str, Any]) -> bytes:
    """Surrogates, NaN and infinities survive. BadMessage if it is too long."""
    payload = _encode(message).encode("utf-8", "surrogatepass")
    if len(payload) > MAX_JSON:
        raise BadMessage(f"it is longer than {MAX_JSON >> 20} MiB")
    return payload


class JsonReader:
    """Messages from a process that is not trusted. All that has arrived is read at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._arrived = bytearray()

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next one. EOFError when the other side is gone, TimeoutError at the deadline, BadMessage if malformed."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size, deadline))
        if length > MAX_JSON:
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
        while len(self._arrived) < size:
            if not _ready(self._descriptor, select.POLLIN, deadline):
                raise TimeoutError
            part = os.read(self._descriptor, _PART)
            if not part:
                raise EOFError
            self._arrived += part
        taken = bytes(self._arrived[:size])
        del self._arrived[:size]
        return taken


def send_bytes(descriptor: int, payload: bytes, deadline: float | None = None) -> None:
    rest = memoryview(_LENGTH.pack(len(payload)) + payload)
    while rest:
        if deadline is not None and not _ready(descriptor, select.POLLOUT, deadline):
            raise TimeoutError
        rest = rest[os.write(descriptor, rest) :]


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), _PART))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def _ready(descriptor: int, event: int, deadline: float) -> bool:
    """Wait until it can be read or written. Past the deadline, look once: a late reader is not a slow judge."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
