"""Base class of the engines that run in this process, and a queue of calls that take effect between two steps."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from assay.engine.base import Engine, EngineLoad, Event, Request, TokenScores, WeightSource
from assay.engine.completions import OutputProcessor, handles_of
from assay.engine.sequence import Job, RowState, Sample, check_scored, job_for, unknown_handle
from assay.models.base import digests, fingerprint
from assay.types import UserError

T = TypeVar("T")
RETRY_S = 0.01  # seconds between two attempts of a caller to run its queued command itself


class StepBoundary:
    """A lock that is held during a step, and a queue of commands for the next boundary.

    The thread that gets the lock runs the queued commands: the one that steps the engine or, if none does, the caller.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queue: deque[tuple[Callable[[], Any], Future | None]] = deque()

    def run_queued(self) -> None:
        """Run all queued commands. The caller must hold the lock."""
        with torch.inference_mode():
            while self.queue:
                work, future = self.queue.popleft()
                if future is None:
                    work()
                    continue
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
                    if not isinstance(error, Exception):
                        raise  # Ctrl-C must stop the thread that received it, not only the caller of the command

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` at the next boundary; immediately if no step is running."""
        self.queue.append((work, None))
        self._try_queued(timeout=0)

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` at the next boundary and return its result."""
        future: Future[T] = Future()
        self.queue.append((work, future))
        while not future.done():
            self._try_queued(timeout=RETRY_S)
        return future.result()

    def _try_queued(self, timeout: float) -> None:
        """Run all queued commands if the lock is free within `timeout` seconds."""
        if self.lock.acquire(timeout=timeout):
            try:
                self.run_queued()
            finally:
                self.lock.release()


class LocalEngine(Engine):
    """Implements the methods of `Engine` on top of one iteration, `_iterate`, and a few methods for its parts.

    Methods whose name begins with an underscore run between two steps or within one, in one thread at a time.
    """

    outputs: OutputProcessor

    def __init__(self) -> None:
        self.incoming: deque[tuple[int, Request]] = deque()  # requests that are not accepted yet
        self.next_id = count()
        self.boundary = StepBoundary()

    # -- the interface

    def add(self, request: Request) -> int:
        request_id = next(self.next_id)
        self.incoming.append((request_id, request))
        return request_id

    @torch.inference_mode()
    def step(self, wait: bool = True) -> list[Event]:
        with self.boundary.lock:
            self.boundary.run_queued()
            try:
                self._begin_step()
                while self._admit():
                    self._iterate()
                    if not wait or self.outputs.events:
                        break
                    if self.on_tokens is not None:
                        self.on_tokens(self.outputs.sampled)
                    self.boundary.run_queued()
                self._end_step()
            except BaseException:
                self.drop_requests()
                raise
            return self.outputs.take_events()

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        ids = list(ids)
        self.boundary.post(lambda: self._abort(ids))

    def release(self, handles: Iterable[int]) -> None:
        handles = list(handles)
        self.boundary.post(lambda: self._release(handles))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        check_scored(sequences, temperature, self.info)
        return self.boundary.call(lambda: self._score(sequences, temperature))

    def top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float = 1.0
    ) -> list[TokenScores]:
        check_scored(sequences, temperature, self.info)
        count = min(count, self.info.vocab_size)
        return self.boundary.call(lambda: self._top_logprobs(sequences, starts, count, temperature))

    def update_weights(self, source: WeightSource, version: int) -> None:
        self.boundary.call(lambda: self._update_weights(source, version))

    def fingerprint(self) -> str:
        return self.boundary.call(lambda: fingerprint(self._weights()))

    def digests(self) -> dict[str, str]:
        return self.boundary.call(lambda: digests(self._weights()))

    def sleep(self) -> None:
        self.boundary.call(self._sleep)

    def wake(self) -> None:
        self.boundary.call(self._wake)

    def reset_prefix_cache(self) -> None:
        self.boundary.call(self._reset_prefix_cache)

    def close(self) -> None:
        self.boundary.call(self._close)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self.outputs.jobs), waiting=len(self.incoming))

    # -- implemented by each engine

    @property
    @abstractmethod
    def unfinished(self) -> bool:
        """Whether an accepted request is unfinished."""

    @abstractmethod
    def _admit(self) -> bool:
        """Accept new requests; returns whether there is anything to do."""

    @abstractmethod
    def _iterate(self) -> None:
        """Take at least one decoding step, or read results of earlier steps."""

    @abstractmethod
    def _kept_tokens(self, handle: int) -> Sequence[int] | None:
        """Tokens of a kept sequence; None if the handle is unknown."""

    @abstractmethod
    def _release(self, handles: Iterable[int]) -> None: ...

    @abstractmethod
    def _remove(self, samples: Sequence[Sample]) -> None:
        """Remove running and waiting samples."""

    @abstractmethod
    def drop_requests(self) -> None:
        """Drop all requests after an exception within a step. Kept sequences, also those being continued, stay kept."""

    @abstractmethod
    def _weights(self) -> Iterable[tuple[str, Tensor]]: ...

    @abstractmethod
    def _update_weights(self, source: WeightSource, version: int) -> None: ...

    @abstractmethod
    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]: ...

    @abstractmethod
    def _top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float
    ) -> list[TokenScores]: ...

    @abstractmethod
    def _close(self) -> None: ...

    def _begin_step(self) -> None:
        """Called at the beginning of a step, before requests are accepted."""

    def _end_step(self) -> None:
        """Called at the end of a step."""

    def _sleep(self) -> None:
        if self.unfinished or self.incoming:
            raise UserError("the engine cannot sleep while requests are running: finish or abort them first")

    def _wake(self) -> None:
        """Only for engines whose `_sleep` releases memory."""

    def _reset_prefix_cache(self) -> None:
        """Only for engines with a prefix cache."""

    # -- shared by the engines

    def _new_job(self, request_id: int, request: Request) -> Job | None:
        """Check a request and register its job. None if it is invalid: then it has a `Failed` event."""
        try:
            before = [] if request.continues is None else self._kept_tokens(request.continues)
            if before is None:
                raise unknown_handle(request, request_id)
            job = job_for(request, request_id, before, self.info, can_decode=self.outputs.stopping is not None)
        except UserError as error:
            self.outputs.fail(request_id, str(error))
            return None
        self.outputs.add(job)
        return job

    def _abort(self, ids: Sequence[int | tuple[int, int]]) -> None:
        samples, handles = self.outputs.abort(ids)
        self._drop(samples)
        self._release(handles)

    def _drop(self, samples: Sequence[Sample]) -> None:
        """Remove samples without a result."""
        for sample in samples:
            sample.done = True
            sample.job.unfinished -= 1
            if not sample.job.unfinished:
                self.outputs.remove(sample.job)
        self._remove(samples)

    def _drop_failed(self, ended: Iterable[tuple[Sample, RowState]]) -> None:
        """Drop the remaining samples of requests of which a sample has failed."""
        jobs = {sample.job.id: sample.job for sample, state in ended if state == RowState.BROKEN}
        if jobs:
            self._drop([sample for job in jobs.values() for sample in job.samples if not sample.done])

    def _release_unreported(self) -> None:
        """Release kept sequences whose handles are in events that no caller will receive."""
        self._release(handles_of(self.outputs.events))

    def _continued(self) -> Iterator[tuple[int, list[int]]]:
        """Handles that unfinished requests continue, with the tokens that were kept under them."""
        for job in self.outputs.jobs.values():
            if (handle := job.request.continues) is not None:
                yield handle, list(job.tokens[: len(job.tokens) - len(job.request.prompt_ids)])
