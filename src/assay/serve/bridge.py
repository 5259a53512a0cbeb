"""The engine as the event loop of the server sees it: submit requests, await their events, abort them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from assay.engine.base import Event, Failed, Finished, Request
from assay.serve.protocol import ApiError

BATCH_S = 5.0  # seconds that a batch of requests waits for its last one


class Port(Protocol):
    """Access to the engine, in this process or another one. The methods do not wait."""

    def add(self, requests: Sequence[Request]) -> list[int]:
        """Queue requests together and return their ids. Their events reach `EngineBridge.receive`."""

    def abort(self, ids: Iterable[int]) -> None: ...

    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of `EngineControl` in the engine's process."""


class Disconnected(Exception):
    """The client has closed the connection."""


class Submission:
    """The requests of one HTTP request, and their events that were not taken yet."""

    __slots__ = ("_bridge", "_disconnected", "_events", "_waiter", "indices", "unfinished")

    def __init__(self, bridge: EngineBridge, requests: Sequence[Request], ids: Sequence[int]) -> None:
        self._bridge = bridge
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._disconnected = False
        self.indices: dict[int, int] = {}  # position of a request by its id
        self.unfinished = sum(request.params.n for request in requests)
        for index, request_id in enumerate(ids):
            self.indices[request_id] = index
            bridge.submissions[request_id] = self

    async def events(self) -> list[Event]:
        """New events, at least one. They are collected while the event loop is busy."""
        if self._disconnected:
            raise Disconnected
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            if self._disconnected:
                raise Disconnected
        taken, self._events = self._events, []
        return taken

    def put(self, event: Event) -> None:
        self._events.append(event)
        if isinstance(event, Finished):
            self.unfinished -= 1
        elif isinstance(event, Failed):
            self.unfinished = 0
        if self._waiter is not None:
            self._wake()

    def disconnect(self) -> None:
        """The client is gone: `events` raises."""
        self._disconnected = True
        if self._waiter is not None:
            self._wake()

    def close(self) -> None:
        """Forget the requests; abort them unless they are finished."""
        for request_id in self.indices:
            self._bridge.submissions.pop(request_id, None)
        if self.unfinished:
            self._bridge.port.abort(list(self.indices))

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class RequestBatches:
    """Requests that arrive in separate HTTP requests, but reach the engine together.

    An idle engine then computes the same as if it was called directly: which sequences are computed together
    determines the last bits of log-probabilities.
    """

    def __init__(self, bridge: EngineBridge, timeout_s: float = BATCH_S) -> None:
        self._bridge, self._timeout_s = bridge, timeout_s
        self._waiting: dict[str, dict[int, tuple[Request, asyncio.Future[Submission]]]] = {}

    async def submit(self, request: Request, name: str, index: int, total: int) -> Submission:
        """Wait for all `total` requests of the batch `name`, at most for the time limit, then submit them in order."""
        loop = asyncio.get_running_loop()
        batch = self._waiting.setdefault(name, {})
        if index in batch:
            message = f"request {index} of the batch '{name[:60]}' is already waiting: use a new name"
            raise ApiError(409, message, "batch")
        if not batch:
            loop.call_later(self._timeout_s, self._submit, name, batch)
        future: asyncio.Future[Submission] = loop.create_future()
        batch[index] = request, future
        if len(batch) >= total:
            self._submit(name, batch)
        return await future

    def _submit(self, name: str, batch: dict[int, tuple[Request, asyncio.Future[Submission]]]) -> None:
        if self._waiting.get(name) is not batch:
            return  # submitted before the time limit
        del self._waiting[name]
        waiting = [batch[index] for index in sorted(batch) if not batch[index][1].cancelled()]
        for (_, future), one in zip(waiting, self._bridge.submit_apart([r for r, _ in waiting]), strict=True):
            future.set_result(one)


class EngineBridge:
    """Routes events to the submissions of one event loop."""

    def __init__(self) -> None:
        self.submissions: dict[int, Submission] = {}  # by request id
        self.port: Port  # set before the first request

    def submit(self, requests: Sequence[Request]) -> Submission:
        return Submission(self, requests, self.port.add(requests))

    def submit_apart(self, requests: Sequence[Request]) -> list[Submission]:
        """Add requests together, with a submission for each."""
        ids = self.port.add(requests)
        return [Submission(self, [request], [one]) for request, one in zip(requests, ids, strict=True)]

    def receive(self, events: Iterable[Event]) -> None:
        """Called in the event loop, with all events of an engine step."""
        submissions = self.submissions
        for event in events:
            submission = submissions.get(event.request_id)
            if submission is not None:  # else it was aborted
                submission.put(event)
