"""Sequences of concurrent requests, collected into batches."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from assay.engine.base import EngineLoad

Item = TypeVar("Item")
Result = TypeVar("Result")


class SequenceBatches(ABC, Generic[Item, Result]):
    """Collects the sequences of concurrent requests, and computes those that wait as soon as the last batch is done."""

    def __init__(self, limit: int) -> None:
        """`limit`: maximum `size` of all sequences of a batch together; a larger sequence is a batch of its own."""
        self._limit = limit
        self._waiting: deque[tuple[Item, asyncio.Future[Result]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._running = 0  # sequences that are being computed

    @abstractmethod
    async def compute(self, items: list[Item]) -> Sequence[Result]:
        """One result per sequence. An exception fails all of them."""

    def size(self, item: Item) -> int:
        return 1

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self._running, len(self._waiting))

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """One result per sequence. If the caller is cancelled, sequences that wait are not computed."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        if self._task is None:
            self._task = loop.create_task(self._run())
        return await asyncio.gather(*futures)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while batch := self._take():
            self._running = len(batch)
            try:
                outcomes: Sequence[Result | Exception] = await self.compute([item for item, _ in batch])
            except Exception as error:
                outcomes = [error] * len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():  # the request was cancelled
                    continue
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
        self._running, self._task = 0, None

    def _take(self) -> list[tuple[Item, asyncio.Future[Result]]]:
        """The sequences that have waited longest: at least one."""
        batch: list[tuple[Item, asyncio.Future[Result]]] = []
        size = 0
        while self._waiting:
            item, future = self._waiting[0]
            size += self.size(item)
            if batch and size > self._limit and not future.done():
                break
            self._waiting.popleft()
            if future.done():  # the request was cancelled
                size -= self.size(item)
            else:
                batch.append((item, future))
        return batch
