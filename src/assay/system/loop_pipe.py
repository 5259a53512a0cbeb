"""Messages between the event loops of two processes, over pipes."""

from __future__ import annotations

import asyncio
import pickle
from typing import IO, Any

from assay.system.pipe_messages import LENGTH

BUFFER = 1 << 20  # bytes that are read ahead


class LoopPipe:
    """Sends and receives lists of pickled messages (see `messages`), so both ends must be trusted.

    Messages that are sent in one iteration of the loop, or by callbacks of futures that it finishes, travel together.
    """

    def __init__(self, incoming: IO[bytes], outgoing: IO[bytes]) -> None:
        self._pipes = incoming, outgoing
        self._unsent: list[Any] = []
        self._incoming: asyncio.ReadTransport | None = None
        self._outgoing: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        self._loop, self._reader = asyncio.get_running_loop(), asyncio.StreamReader(BUFFER)
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
