"""Steps an engine on servers, for the checks of engines in this process (`check_engine`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any

from assay.engine.base import Event, Failed, Finished, Request, TokenChunk
from assay.engine.client import ClientThread, ServerEngine
from assay.types import Completion


class Stepped:
    """Turns the futures of a client into the events of an `Engine`. Other attributes are those of the engine."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine, self.thread, self.ids = engine, ClientThread(engine), count()
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.futures: dict[tuple[int, int], asyncio.Future[Completion]] = {}  # unfinished, by request and sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def add(self, request: Request) -> int:
        request_id = next(self.ids)
        self.thread.run(self._submit(request_id, request))
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        while self.futures:
            try:
                event = self.events.get(timeout=60 if wait else 0.001)
            except Empty:
                break
            if any(key[0] == event.request_id for key in self.futures) and self._is_wanted(event):
                return [event]
        return []

    def _is_wanted(self, event: Event) -> bool:
        if isinstance(event, Failed):
            self.futures = {key: future for key, future in self.futures.items() if key[0] != event.request_id}
            return True
        key = event.request_id, event.sample
        return (self.futures.pop(key, None) if isinstance(event, Finished) else self.futures.get(key)) is not None

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        named = set(ids)
        self.thread.run(self._cancel([key for key in self.futures if key in named or key[0] in named]))

    def release(self, handles: Iterable[int]) -> None:
        self.thread.client.release(handles)

    async def _submit(self, request_id: int, request: Request) -> None:
        def receive(chunk: TokenChunk) -> None:
            self.events.put(TokenChunk(request_id, chunk.sample, chunk.token_ids, chunk.logprobs))

        for sample, future in enumerate(self.thread.client.submit(request, receive)):
            self.futures[request_id, sample] = future
            future.add_done_callback(partial(self._on_end, request_id, sample))

    def _on_end(self, request_id: int, sample: int, future: asyncio.Future[Completion]) -> None:
        if not future.cancelled():
            error = future.exception()
            failed = Failed(request_id, str(error))
            self.events.put(failed if error is not None else Finished(request_id, sample, future.result()))

    async def _cancel(self, keys: list[tuple[int, int]]) -> None:
        for key in keys:
            self.futures.pop(key).cancel()
