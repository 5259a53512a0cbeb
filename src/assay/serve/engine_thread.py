"""Steps the engine of a server in a thread of its own, and hands the events of each step to the connections.

HTTP is handled by an event loop, or by several processes with one each, which must not wait for a step of the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from assay.engine.base import Engine, Event, Failed, Finished, Request
from assay.types import describe_error

Receive = Callable[[list[Event]], None]


class Connection:
    """The requests of one event loop. Their events reach `receive`, in the engine's thread, after each step."""

    def __init__(self, thread: EngineThread, receive: Receive) -> None:
        self._thread, self.receive = thread, receive

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests together: an idle engine starts with all of them."""
        return self._thread.add(self, requests)

    def abort(self, ids: Iterable[int]) -> None:
        self._thread.abort(self, ids)

    def close(self) -> None:
        """Abort the requests of this connection; it receives no more events."""
        self._thread.abort(self, None)


class EngineThread:
    """Owns an engine: no other code may call its `step`. Requests must not keep sequences: connections have no handles.

    An exception of `step` fails all requests. Later requests are served.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._owners: dict[int, tuple[Connection, int]] = {}  # by id: of unfinished requests, with unfinished samples
        self._step_once = self._closed = False
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def connect(self, receive: Receive) -> Connection:
        return Connection(self, receive)

    def close(self) -> None:
        """Drop all requests, stop the thread and close the engine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ids = list(self._owners)
            self._owners.clear()
            self._work.notify()
        self.engine.abort(ids)  # the thread may be waiting for their events
        self._thread.join()
        self.engine.close()

    # -- for connections

    def add(self, connection: Connection, requests: Sequence[Request]) -> list[int]:
        with self._lock:  # until all ids are registered: the first event may arrive immediately
            if self._closed:
                raise RuntimeError("the engine is closed")
            ids = [self.engine.add(request) for request in requests]
            self._owners |= {
                one: (connection, max(request.params.n, 1)) for one, request in zip(ids, requests, strict=True)
            }
            self._work.notify()
            return ids

    def abort(self, connection: Connection, ids: Iterable[int] | None) -> None:
        """Abort requests of a connection; None: all of them. Other ids are ignored."""
        with self._lock:
            wanted = set(self._owners) if ids is None else self._owners.keys() & set(ids)
            own = [one for one in wanted if self._owners[one][0] is connection]
            for request_id in own:
                del self._owners[request_id]
        if own:
            self.engine.abort(own)  # without the lock: a queued weight update may run first
            with self._lock:  # the current step may have missed the command, and no other step may be due
                self._step_once = True
                self._work.notify()

    # -- the thread

    def _serve(self) -> None:
        while self._wait_for_work():
            try:
                events = self.engine.step()
            except BaseException as error:  # of any kind: clients must not wait forever
                events = self._failures(error)
            for connection, own in self._by_connection(events).items():
                connection.receive(own)  # without the lock, so that it may add and abort requests
            del events  # a waiting thread must not keep completions alive

    def _wait_for_work(self) -> bool:
        """Wait until a step is due; False if the thread has to end."""
        with self._lock:
            while not (self._owners or self._step_once or self._closed):
                self._work.wait()
            self._step_once = False
            return not self._closed

    def _by_connection(self, events: Iterable[Event]) -> dict[Connection, list[Event]]:
        batches: dict[Connection, list[Event]] = {}
        with self._lock:
            for event in events:
                if (owner := self._owners.get(event.request_id)) is None:
                    continue  # aborted while its last step was running
                connection, left = owner
                left = 0 if isinstance(event, Failed) else left - isinstance(event, Finished)
                if left:
                    self._owners[event.request_id] = connection, left
                else:
                    del self._owners[event.request_id]
                batches.setdefault(connection, []).append(event)
        return batches

    def _failures(self, error: BaseException) -> list[Event]:
        line = f"the engine failed: {describe_error(error)}"
        with self._lock:
            ids = list(self._owners)
        self.engine.abort(ids)  # some may have been added after the engine dropped all its requests
        return [Failed(request_id, line) for request_id in ids]
