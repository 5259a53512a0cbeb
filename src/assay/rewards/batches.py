"""The items of one call of a pool: cut into chunks for the workers, put together again in order."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from assay.types import Verdict

Item = tuple[str, str, Mapping[str, Any]]  # completion, gold answer, fields

MAX_CHUNK = 64
MAX_CHUNK_CHARS = 1_000_000


class Batch:
    """The verdicts of one call of `judge`, filled in by several threads."""

    def __init__(self, size: int) -> None:
        self._verdicts: list[Verdict | None] = [None] * size
        self._missing = size
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, index: int, verdict: Verdict) -> None:
        with self._changed:
            assert self._verdicts[index] is None, "an item was judged twice"
            self._verdicts[index] = verdict
            self._missing -= 1
            if not self._missing:
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def wait(self) -> list[Verdict]:
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._error is not None or not self._missing)
            except BaseException as error:  # interrupted: nobody waits for the rest, so it is not worth judging
                self._error = error
                raise
            if self._error is not None:
                raise self._error
            return [verdict for verdict in self._verdicts if verdict is not None]


class JudgeChunk:
    """Some items of a batch, with their places in it; shortened from the front as verdicts come in."""

    def __init__(self, batch: Batch, items: list[tuple[int, str, str, dict[str, Any]]], retried: bool = False) -> None:
        self.batch = batch
        self.items = items
        self.retried = retried  # a worker was lost on the first item already

    def put(self, verdict: Verdict) -> None:
        self.batch.put(self.items[0][0], verdict)
        del self.items[0]
        self.retried = False

    def first_again(self) -> JudgeChunk:
        """Take out the first item, to be judged once more in another worker."""
        return JudgeChunk(self.batch, [self.items.pop(0)], retried=True)

    def halves(self) -> list[JudgeChunk]:
        middle = (len(self.items) + 1) // 2
        return [JudgeChunk(self.batch, part) for part in (self.items[:middle], self.items[middle:]) if part]


def split(batch: Batch, items: Sequence[Item], workers: int) -> list[JudgeChunk]:
    """Small enough that all workers have work to the end and no message is huge."""
    size = max(1, min(MAX_CHUNK, -(-len(items) // (workers * 4))))
    chunks: list[JudgeChunk] = []
    room = 0
    for index, (completion, answer, fields) in enumerate(items):
        if not chunks or len(chunks[-1].items) == size or len(completion) > room:
            chunks.append(JudgeChunk(batch, []))
            room = MAX_CHUNK_CHARS
        chunks[-1].items.append((index, completion, answer, dict(fields)))
        room -= len(completion)
    return chunks
