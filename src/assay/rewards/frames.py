"""Messages between processes of ours: a length, then a pickle. Nobody else is ever listened to."""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


def send(descriptor: int, message: Any) -> None:
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    rest = memoryview(_LENGTH.pack(len(payload)) + payload)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int) -> Any:
    """The next message. EOFError when the other side is gone."""
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return pickle.loads(_read(descriptor, length))


def _read(descriptor: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(descriptor, min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
