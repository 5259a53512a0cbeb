"""A gateway before a server, which passes bytes on, or injects faults of the network."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

from assay.system.program import free_port

GARBAGE = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nnonsense!"


class Gateway:
    """Stands before a server and passes bytes on, or does not."""

    def __init__(self, target: int) -> None:
        self.target, self.fault = target, ""
        self.port = free_port()
        self.connections: set[socket.socket] = set()
        self.closed = False
        self.listener = self._listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _listen(self) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(256)
        return listener

    def _accept(self) -> None:
        while not self.closed:
            try:
                client = self.listener.accept()[0]
            except OSError:
                time.sleep(0.01)
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            self.connections.add(client)
            if self.fault == "garbage":
                client.recv(1)
                client.sendall(GARBAGE)
                return
            with socket.create_connection(("127.0.0.1", self.target)) as server:
                back = threading.Thread(target=self._copy, args=(server, client), daemon=True)
                back.start()
                self._copy(client, server)
                back.join()
        self.connections.discard(client)

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.fault == "slow":
                    time.sleep(0.2)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for client in list(self.connections):
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def refuse(self, seconds: float) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()
        time.sleep(seconds)
        self.listener = self._listen()

    def close(self) -> None:
        self.closed = True
        self.cut()
        self.listener.close()
