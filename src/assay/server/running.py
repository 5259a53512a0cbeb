"""The samples of an HTTP request, which a disconnect cancels, and requests that reach the engine together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

from assay.engine.base import Request, RequestError, TokenChunk
from assay.engine.client import EngineClient
from assay.server.protocol import ApiError
from assay.types import Completion, describe_error

BATCH_S = 5.0  # seconds that a batch of requests waits for its last one


def failure(error: BaseException) -> ApiError:
    """The answer to a request that has failed."""
    of_request = isinstance(error, RequestError)
    return ApiError(500, str(error) if of_request else f"the engine failed: {describe_error(error)}")


class RunningSamples:
    """The samples of all prompts of an HTTP request. They are aborted if the block ends before they are finished."""

    def __init__(self, client: EngineClient, requests: Sequence[Request]) -> None:
        self._futures: list[asyncio.Future[Completion]] = []
        self._events: list[tuple[int, TokenChunk | Completion]] = []
        self._waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for request in requests:
            self._futures += client.submit(request, partial(self._put, len(self._futures)))
        for future in self._futures:
            future.add_done_callback(self._wake)
        self._unfinished = dict(enumerate(self._futures))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for future in self._unfinished.values():
            future.cancel()

    async def completions(self) -> list[Completion]:
        """All completions. Raises an `ApiError` if a request fails."""
        try:
            return await asyncio.gather(*self._futures)
        except Exception as error:
            raise failure(error) from None

    async def events(self) -> list[tuple[int, TokenChunk | Completion]]:
        """New tokens and completions, at least one, with the index of their sample. Raises as `completions`."""
        events: list[tuple[int, TokenChunk | Completion]] = []
        while not events:
            await self._waiter
            self._waiter = asyncio.get_running_loop().create_future()
            events, self._events = self._events, []
            for index in [index for index, future in self._unfinished.items() if future.done()]:
                try:
                    events.append((index, self._unfinished.pop(index).result()))
                except Exception as error:
                    raise failure(error) from None
        return events

    def _put(self, first: int, chunk: TokenChunk) -> None:
        self._events.append((first + chunk.sample, chunk))
        self._wake()

    def _wake(self, *_: object) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)


@asynccontextmanager
async def until_disconnect(scope: Any, receive: Any) -> AsyncIterator[None]:
    """Cancel the block when the client of an HTTP request disconnects."""
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope["assay.closed"] = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not scope.get("assay.closed") or task.uncancel():
            raise  # the server stops
    finally:
        watcher.cancel()


class RequestBatches:
    """Requests that arrive in separate HTTP requests, but reach the engine together.

    An idle engine then computes the same as if it was called directly: which sequences are computed together
    determines the last bits of log-probabilities.
    """

    def __init__(self, timeout_s: float = BATCH_S) -> None:
        self._timeout_s = timeout_s
        self._waiting: dict[str, dict[int, asyncio.Future[None]]] = {}

    async def join(self, name: str, index: int, total: int) -> None:
        """Wait for all `total` requests of a batch, at most for the time limit.

        They continue in their order, in the same iteration of the event loop.
        """
        loop, batch = asyncio.get_running_loop(), self._waiting.setdefault(name, {})
        if index in batch:
            message = f"request {index} of the batch '{name[:60]}' is already waiting: use a new name"
            raise ApiError(409, message, "batch")
        if not batch:
            loop.call_later(self._timeout_s, self._start, name, batch)
        batch[index] = loop.create_future()
        if len(batch) >= total:
            loop.call_soon(self._start, name, batch)  # the last one must wait, too, to keep its place
        await batch[index]

    def _start(self, name: str, batch: dict[int, asyncio.Future[None]]) -> None:
        if self._waiting.get(name) is batch:  # else it has started before the time limit
            del self._waiting[name]
            for index in sorted(batch):
                if not batch[index].done():  # else its client has disconnected
                    batch[index].set_result(None)
