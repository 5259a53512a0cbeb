"""Base class of the engines that are HTTP servers, such as vLLM.

An event loop in its own thread sends the requests: each to the server with the fewest unfinished samples, and as one
HTTP request per sample, so that a sample can be aborted by closing its connection. Sampling changes nothing on the
server: a request whose connection is lost is sent again, to another server if there is one. `supervise` describes what
happens to a server that fails.

A backend derives from `RemoteEngine` and implements `_check_servers`, `_payload`, `_parse` and `_publish`; the other
methods whose names begin with an underscore have defaults.

Several ranks share the servers. The first rank of a tensor-parallel group sends the group's requests and shares the
events with the other ranks, so all of them must make the same calls. Weights are published by the main rank (rank 0 of
all); the other ranks only take part in gathering them. A `UserError` of one rank is raised on all of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from operator import index
from typing import Any, ClassVar

import torch
from torch import Tensor

from assay.endpoint import LoopThread
from assay.engine.base import (
    Capabilities,
    Engine,
    EngineInfo,
    EngineLoad,
    EngineOptions,
    Event,
    Failed,
    Finished,
    Request,
    TokenChunk,
    WeightSource,
)
from assay.engine.remote.http import (
    Server,
    ServerBusy,
    ServerError,
    ServerFailed,
    ServerState,
    ServerUnreachable,
    allowed_connections,
    is_lost,
)
from assay.engine.remote.launch import LaunchedServers
from assay.engine.remote.ranks import Ranks
from assay.engine.remote.supervise import JOIN_S, SupervisedServers
from assay.engine.remote.transport import FolderTransport, IpcTransport, NcclTransport
from assay.engine.sequence import Job, check_scored, job_for, unknown_handle
from assay.models.base import PolicyModel
from assay.types import Completion, Finish, UserError

POLL_S = 0.001  # `step(wait=False)` waits this long for an event, so that a caller that polls does not spin
ATTEMPTS = 4  # of a request whose connection is lost
MAX_WAIT_S = 5.0  # between two attempts of a request that a busy server refused


@dataclass(eq=False)
class SampleBatch:
    """Samples of one request that are sent as one HTTP request."""

    job: Job
    samples: list[int]
    server: Server
    counted: int = 0  # samples that the server's counter includes

    def assign(self, server: Server) -> None:
        self.end()
        self.server, self.counted = server, len(self.samples)
        server.running += self.counted

    def end(self, *_: object) -> None:
        self.server.running -= self.counted
        self.counted = 0


@dataclass(eq=False)
class RunningRequest:
    job: Job
    samples: set[int]  # neither finished nor aborted
    tasks: dict[int, asyncio.Task] = field(default_factory=dict)  # by sample


class RequestQueue:
    """The running requests of an engine that is served elsewhere, and their events. `loop` runs their tasks."""

    loop: LoopThread

    def _open_queue(self) -> None:
        self.next_id = count()
        self.events: deque[Event] = deque()
        self.running: dict[int, RunningRequest] = {}
        self.error: BaseException | None = None  # an unexpected exception in the thread, raised by `step`
        self.arrived = threading.Condition()  # guards the four above

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        for one in ids:
            request_id, sample = one if isinstance(one, tuple) else (one, None)
            with self.arrived:
                self.events = deque(event for event in self.events if not concerns(event, request_id, sample))
                if (running := self.running.get(request_id)) is None:
                    continue
                dropped = running.samples & ({sample} if sample is not None else running.samples)
                running.samples -= dropped
                if not running.samples:
                    del self.running[request_id]
                self.arrived.notify_all()
            self.loop.post(partial(cancel_unneeded, running))

    @property
    def load(self) -> EngineLoad:
        with self.arrived:
            return EngineLoad(running=sum(len(one.samples) for one in self.running.values()), waiting=0)

    def _take(self, wait: bool) -> list[Event]:
        """New events, as `step` returns them."""
        with self.arrived:
            if not wait and not self.events and self.running:
                self.arrived.wait(POLL_S)
            while wait and not self.events and self.running and self.error is None:
                self.arrived.wait()
            if self.error is not None:
                error, self.error = self.error, None
                raise error
            events, self.events = list(self.events), deque()
            return events

    # -- these run in the thread of the loop

    def _finish(self, running: RunningRequest, sample: int, completion: Completion, streamed: bool = False) -> None:
        """Put the last events of a sample. `streamed`: its chunks were put before."""
        job = running.job
        with self.arrived:
            if sample not in running.samples:
                return  # aborted
            running.samples.discard(sample)
            if not running.samples:
                del self.running[job.id]
            if job.request.stream and not streamed:
                chunk = TokenChunk(job.id, sample, list(completion.token_ids), list(completion.engine_logprobs))
                self.events.append(chunk)
            self.events.append(Finished(job.id, sample, completion))
            self.arrived.notify_all()

    def _fail(self, running: RunningRequest, error: str) -> None:
        with self.arrived:
            if not running.samples:
                return  # aborted, or another sample has failed
            running.samples.clear()
            del self.running[running.job.id]
            self.events.append(Failed(running.job.id, f"{running.job.name}: {error}"))
            self.arrived.notify_all()
        cancel_unneeded(running)


class RemoteEngine(RequestQueue, SupervisedServers, Engine):
    """Implements `Engine` for servers. See the description of this module."""

    splits_samples: ClassVar[bool] = True  # one HTTP request per sample; False: one for all samples of a request

    def __init__(
        self,
        model: PolicyModel,
        urls: Sequence[str],
        options: EngineOptions,
        capabilities: Capabilities,
        *,
        timeout_s: float = 0.0,
        health_timeout_s: float = 0.0,
        recover_s: float = 0.0,
        api_key: str = "",
        ranks: Ranks | None = None,
        launched: LaunchedServers | None = None,
    ) -> None:
        """`ranks`: those of the group, if they exist already. Other arguments: see `SupervisedServers`.

        The served weights have version -1 until the first `update_weights`.
        """
        super().__init__(urls, timeout_s, api_key, launched, health_timeout_s, options.notify, recover_s)
        self.options = options
        self.ranks = ranks or Ranks(options.group)
        self.size = model.parameter_count * options.dtype.itemsize
        self.transport: FolderTransport | IpcTransport | NcclTransport | None = None
        max_length = min(model.max_length, options.max_length or model.max_length)
        self.info = EngineInfo(-1, max_length, options.max_batch, options.dtype, capabilities, model.vocab_size)
        self._open_queue()
        self.asleep = False
        connections = min(options.max_batch * len(self.all_servers), allowed_connections())
        self.slots = self.loop.call(semaphore(connections))
        if launched is not None:
            weakref.finalize(self, launched.close)  # at the latest when the process ends
        try:
            self.ranks.on_leaders(self._check_servers)
            self.ranks.on_main(self._prepare)
            self._watch()
        except BaseException:
            self._close()
            raise

    @property
    def has_weights(self) -> bool:
        return self.info.version >= 0

    @property
    def can_recover(self) -> bool:
        return super().can_recover and not isinstance(self.transport, NcclTransport)  # see `update_weights`

    # -- implemented by each backend; these run on the leaders, `_publish` and the later ones on the main rank

    def _check_servers(self) -> None:
        """Raise a `UserError` unless all servers are reachable and serve this model, vocabulary and length."""
        for server in self.servers:
            self._check_server(server)

    def _prepare(self) -> None:
        """Called on the main rank after `_check_servers`: choose the transport of weights, for example."""

    @abstractmethod
    def _payload(self, job: Job, samples: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """Path and JSON body of the HTTP request for these samples (with `splits_samples` always one)."""

    @abstractmethod
    def _parse(self, response: Any, job: Job, samples: Sequence[int], version: int) -> list[Completion]:
        """Completions of the samples, made with `_completion`. `version`: of the weights when the request was sent."""

    @abstractmethod
    def _publish(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load full weights into all servers; they must not use cached prefixes of earlier weights afterwards.

        If `self.asleep`, the servers sleep; they must be awake afterwards.
        """

    def _begin_update(self) -> None:
        """Called on all ranks before an update. Engines with `inflight_updates` must not send requests until its end.

        `_end_update` follows, also if the update fails.
        """

    def _end_update(self) -> None:
        pass

    def _fingerprint(self) -> str | None:
        return None

    def _sleep(self) -> None:
        """Release memory of the servers."""

    def _wake(self) -> None:
        """Allocate it again. May be called by several ranks, and while the servers are awake."""

    def _reset_prefix_cache(self) -> None:
        """Only for servers with a prefix cache."""

    async def _generate(self, server: Server, job: Job, samples: Sequence[int]) -> list[Completion]:
        path, payload = self._payload(job, samples)
        version, tokens = self.info.version, len(samples) * job.max_length
        return self._parse(await self.post(server, path, payload, tokens=tokens), job, samples, version)

    def _completion(
        self,
        job: Job,
        token_ids: Any,
        engine_logprobs: Any,
        sampling_logprobs: Any,
        finish: Finish,
        version: int,
        **more: Any,
    ) -> Completion:
        """A completion of what a server returned, if its tokens and log-probabilities are valid."""
        ids = self._valid_ids(token_ids, job.limit, least=1)
        engine, sampling = (self.valid_logprobs(one, len(ids)) for one in (engine_logprobs, sampling_logprobs))
        return Completion(ids, engine, sampling, finish, version, **more)

    def _valid_ids(self, ids: Any, limit: int, least: int = 0) -> list[int]:
        """Tokens that a server returned, if they are in the vocabulary and not too many."""
        if not isinstance(ids, list):
            raise self.garbage("something that is not a list of tokens")
        vocabulary = self.info.vocab_size
        if not least <= len(ids) <= limit or not all(type(one) is int and 0 <= one < vocabulary for one in ids):
            raise self.garbage(f"{len(ids)} tokens, where {least} to {limit} of the vocabulary were expected")
        return ids

    # -- the interface

    def add(self, request: Request) -> int:
        request_id = next(self.next_id)
        if not self.ranks.leads:
            return request_id
        try:
            if request.continues is not None:
                raise unknown_handle(request, request_id)
            limits = {"max_length": self.info.max_length, "vocabulary": self.info.vocab_size}
            job = job_for(request, request_id, (), can_decode=self.options.decode is not None, **limits)
            job.tokens = [index(token) for token in job.tokens]  # JSON has no NumPy integers
        except UserError as error:
            with self.arrived:
                self.events.append(Failed(request_id, str(error)))
            return request_id
        running = RunningRequest(job, {sample.index for sample in job.samples})
        with self.arrived:
            self.running[request_id] = running
        self.loop.post(partial(self._start, running))
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        return self.ranks.from_leader(lambda: self._step(wait))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        check_scored(sequences, temperature, self.info.max_length, self.info.vocab_size)
        return self.ranks.from_leader(lambda: self._score_anywhere(sequences, temperature))

    def score_each(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        check_scored(sequences, 1.0, self.info.max_length, self.info.vocab_size)
        return self.ranks.from_leader(lambda: self._score_everywhere(sequences))

    @torch.inference_mode(False)
    @torch.no_grad()
    def update_weights(self, source: WeightSource, version: int) -> None:
        self.ranks.on_leaders(self._check_idle_for_update)
        weights = iter(source.weights())
        retired = [server.url for server in self.all_servers if server.state is ServerState.RETIRED]
        unusable = self.ranks.union_of_leaders(retired)

        def publish() -> list[str]:
            try:
                self.adopt(server.url for server in self.serving() if server.url not in unusable)
                if not isinstance(self.transport, NcclTransport):  # its group of processes cannot change
                    self.invite()
                self._publish(weights, version)
                self.admit(version)
            except UserError as error:
                if not self._has_lost_all(str(error)):
                    raise
            finally:
                drain(weights)  # the other ranks gather all weights, also if this one failed
            return [server.url for server in self.serving()]

        try:
            self._begin_update()
            self.ranks.barrier()
            self.adopt(self.ranks.on_main(publish, meanwhile=lambda: drain(weights)))
            self.require(self.serving())
            self.asleep = False
            self.info = replace(self.info, version=version)
        finally:
            self._end_update()

    def _has_lost_all(self, reason: str) -> bool:
        """Whether all servers have failed, after an update has ended with an error."""
        if not self.has_weights:
            return False
        for server in self.servers:
            if server.state is ServerState.JOINING:
                self.retire(server, reason)
        with suppress(ServerError):  # retires servers that do not answer
            self.call_each("GET", self.health_path, timeout_s=JOIN_S, is_json=False)
        return self.lost

    def _check_idle_for_update(self) -> None:
        if self.running and not self.info.capabilities.inflight_updates:
            raise UserError(f"{self.kind} cannot update weights while requests are running: finish or abort them")

    def fingerprint(self) -> str | None:
        return self.ranks.on_main(self._fingerprint) if self.info.capabilities.fingerprint else None

    def sleep(self) -> None:
        self.ranks.on_leaders(self._check_idle)
        if self.options.sleep_while_training and not self.asleep:
            self.ranks.on_main(self._sleep_unless_lost)
            self.asleep = True

    def _sleep_unless_lost(self) -> None:
        try:
            self._sleep()
        except ServerError:
            if not self.lost:
                raise

    def _check_idle(self) -> None:
        if self.running:
            raise UserError("the engine cannot sleep while requests are running: finish or abort them first")

    def wake(self) -> None:
        if self.asleep:
            self.ranks.on_main(self._wake)
            self.asleep = False

    def reset_prefix_cache(self) -> None:
        if not self.asleep:  # sleeping servers have none
            self.ranks.on_main(self._reset_prefix_cache)

    def close(self) -> None:
        self.abort(list(self.running))
        self._close()

    # -- the event loop: these run in its thread

    def _start(self, running: RunningRequest) -> None:
        """Assign a request to the server with the fewest unfinished samples, and start its tasks."""
        server = self.least_busy()
        samples = sorted(running.samples)
        for group in [[one] for one in samples] if self.splits_samples else [samples]:
            part = SampleBatch(running.job, group, server)
            part.assign(server)
            task = asyncio.ensure_future(self._serve(running, part))
            task.add_done_callback(part.end)  # also called for a task that is cancelled before it begins
            running.tasks |= dict.fromkeys(group, task)

    async def _serve(self, running: RunningRequest, part: SampleBatch) -> None:
        """Serve some samples of one request, and put their events."""
        try:
            async with self.slots:
                completions = await self._generate_with_retries(part)
            for sample, completion in zip(part.samples, completions, strict=True):
                self._finish(running, sample, completion)
        except UserError as error:
            self._fail(running, str(error))
        except Exception as error:  # a bug: `step` raises it
            with self.arrived:
                self.error = error
                self.arrived.notify_all()

    async def _generate_with_retries(self, part: SampleBatch) -> list[Completion]:
        lost, wait_s, started = 0, 0.1, time.monotonic()
        while True:
            self.require(self.serving())
            try:
                return await self.guarded(part.server, self._generate(part.server, part.job, part.samples))
            except ServerBusy:
                if self.timeout_s and time.monotonic() - started > self.timeout_s:
                    raise
            except ServerError as error:
                retired = await self.retire_if_failed(part.server, error, repeated=lost == ATTEMPTS - 1)
                other = self.least_busy(avoided=part.server)
                if not retired:
                    lost += 1
                    may_retry = isinstance(error, ServerUnreachable) or (
                        isinstance(error, ServerFailed) and other is not part.server
                    )
                    if not may_retry or lost == ATTEMPTS:
                        raise
                self.retries += 1
                part.assign(other)
                if retired:
                    continue
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    # -- the rest

    def _score_anywhere(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        while True:
            self.require(self.serving())
            server = self.least_busy()
            try:
                return self._checked_score(server, sequences, temperature)
            except ServerError as error:
                if not self.retire(server, str(error), is_lost(error)):
                    raise

    def _score_everywhere(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        scores: dict[str, list[list[float]]] = {}
        for server in self.serving():
            try:
                scores[server.url] = self._checked_score(server, sequences)
            except ServerError as error:
                if not self.retire(server, str(error), is_lost(error)):
                    raise
        return self.require(scores)

    def _step(self, wait: bool) -> list[Event]:
        if self.asleep and self.running:
            self._wake()  # on this rank alone: others may have no requests
            self.asleep = False
        return self._take(wait)

    def _close(self) -> None:
        if self.loop.running:
            self._disconnect()
        if isinstance(self.transport, FolderTransport):
            self.transport.close()
        if self.launched is not None:
            self.launched.close()


def concerns(event: Event, request_id: int, sample: int | None) -> bool:
    return event.request_id == request_id and (sample is None or getattr(event, "sample", None) == sample)


def cancel_unneeded(running: RunningRequest) -> None:
    """Cancel the HTTP requests of which no sample is needed any more."""
    needed = {id(running.tasks[sample]) for sample in running.samples if sample in running.tasks}
    current = asyncio.current_task() if running.tasks else None
    for task in running.tasks.values():
        if id(task) not in needed and task is not current:
            task.cancel()


def drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


async def semaphore(value: int) -> asyncio.Semaphore:
    return asyncio.Semaphore(value)
