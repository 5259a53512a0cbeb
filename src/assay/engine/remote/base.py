"""Base class of the engines that are HTTP servers, such as vLLM.

A `ServerClient` passes requests to the event loop of the engine. A task per sample sends an HTTP request to the server
with the fewest unfinished samples, and resolves the sample's future; if the future is cancelled, the task is cancelled,
which closes the connection. Sampling changes nothing on the server: a request whose connection is lost is sent again,
to another server if there is one. `SupervisedServers` describes what happens to a server that fails.

A backend derives from `RemoteEngine` and implements `_check_server`, `_sample`, `_sharing_obstacle` and `_publish`; the
other methods whose names begin with an underscore have defaults.

Several ranks share the servers. The first rank of a tensor-parallel group samples for the group. Weights are published
by the main rank (rank 0 of all); the other ranks only take part in gathering them. A `UserError` of one rank is raised
on all of them.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from assay.config import RemoteEngineConfig
from assay.engine.base import Capabilities, EngineInfo, EngineOptions, RequestError, WeightSource
from assay.engine.client import SentRequest, ServerEngine
from assay.engine.remote.http import (
    JOIN_S,
    Server,
    ServerBusy,
    ServerError,
    ServerFailed,
    ServerState,
    ServerUnreachable,
    SupervisedServers,
    allowed_connections,
)
from assay.engine.remote.launch import LaunchedServers, SaveTokenizer
from assay.engine.remote.transport import FolderTransport, IpcTransport, NcclTransport, Transport
from assay.engine.sequence import Job, check_scored, job_for, unknown_handle
from assay.mesh import cpu_group, gathered, shared_result
from assay.models.base import PolicyModel
from assay.system.openai_client import key_of
from assay.types import Completion, UserError, missing_extra

T = TypeVar("T")
ATTEMPTS = 4  # of a request whose connection is lost
MAX_WAIT_S = 5.0  # between two attempts of a request that a busy server refused


class Ranks:
    """The ranks that use the same servers: all of them, and the tensor-parallel `group` of this one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.world = cpu_group() if several else None
        self.group = cpu_group(group) if several and group is not None and group.size() > 1 else None
        self.leads = self.group is None or self.group.rank() == 0
        self.is_main = not several or dist.get_rank() == 0

    def from_leader(self, work: Callable[[], T]) -> T:
        """Call `work` on the first rank of the tensor-parallel group; all its ranks get the result or `UserError`."""
        return work() if self.group is None else shared_result(work, self.group)

    def on_main(self, work: Callable[[], T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Call `work` on the main rank and `meanwhile` on all others; all get the result or `UserError`."""
        if not self.is_main:
            meanwhile()
        return work() if self.world is None else shared_result(work, self.world)

    def union_of_leaders(self, values: Iterable[str]) -> set[str]:
        """The values of the first ranks of all groups, on all ranks."""
        return set[str]().union(*self._gathered(list(values) if self.leads else []))

    def barrier(self) -> None:
        self.on_leaders(lambda: None)

    def on_leaders(self, work: Callable[[], None]) -> None:
        """Call `work` on the first rank of every group. A `UserError` is raised on all ranks."""
        error: UserError | None = None
        if self.leads:
            try:
                work()
            except UserError as raised:
                error = raised
        if first := next((raised for raised in self._gathered(error) if raised is not None), None):
            raise first

    def _gathered(self, item: T) -> list[T]:
        return [item] if self.world is None else gathered(item, self.world)


@dataclass(eq=False)
class SampleBatch:
    """Samples of one request that are sent as one HTTP request."""

    sent: SentRequest
    job: Job
    samples: list[int]
    server: Server
    counted: int = 0  # samples that the server's counter includes
    label: list[Any] | None = None  # of requests that the server starts together

    def assign(self, server: Server) -> None:
        self.end()
        self.server, self.counted = server, len(self.samples)
        server.running += self.counted

    def end(self, *_: object) -> None:
        self.server.running -= self.counted
        self.counted = 0


class RemoteEngine(SupervisedServers, ServerEngine):
    """See the description of this module."""

    settings_type: ClassVar[type[RemoteEngineConfig]]
    capabilities: ClassVar[Capabilities]  # that servers have at most
    launcher: ClassVar[Callable[..., LaunchedServers]]  # starts servers
    dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # that servers can have; empty: all
    pauses: ClassVar[bool] = False  # no requests are sent during an update of weights, for which servers are paused
    splits_samples: ClassVar[bool] = True  # one HTTP request per sample; False: one for all samples of a request

    def __init__(
        self, model: PolicyModel, settings: Any = None, save_tokenizer: SaveTokenizer | None = None, **given: Any
    ) -> None:
        """`settings`: of type `settings_type`. `save_tokenizer`: needed to start servers. `given`: `EngineOptions`.

        The weights have version -1 until the first `update_weights`.
        """
        options, settings = EngineOptions(**given), settings or self.settings_type()
        if self.dtypes and options.dtype not in self.dtypes:
            raise UserError(
                f"{self.kind} has no float64: set engine.dtype to float32 or bfloat16, or use another engine"
            )
        if importlib.util.find_spec("httpx") is None:
            raise missing_extra(f"engine {self.kind.lower()}", self.extra or self.section)
        self.options, self.settings, self.ranks = options, settings, Ranks(options.group)
        self.leads, self.asleep, self.sent = self.ranks.leads, False, set()
        self.size = model.parameter_count * options.dtype.itemsize
        max_length = min(model.max_length, options.max_length or model.max_length)
        self.info = EngineInfo(-1, max_length, options.max_batch, options.dtype, self.capabilities, model.vocab_size)
        keys, launched = dict.fromkeys(settings.urls, key_of(settings.api_key_env, self.section)), None
        if not keys:
            launched = self.launcher(settings, options) if self.ranks.is_main else None
            keys = self.ranks.on_main(lambda: launched.start(model, save_tokenizer))  # type: ignore[union-attr]
        self.health_timeout_s, self.recover_s = settings.health_timeout_s, settings.recover_s
        self.notify = options.notify or (lambda line: None)
        super().__init__(keys, settings.timeout_s, launched)
        self.slots = asyncio.Semaphore(min(options.max_batch * len(keys), allowed_connections()))
        self.waking, self.gate = asyncio.Lock(), asyncio.Event()
        self.gate.set()  # cleared while servers are paused
        if launched is not None:
            weakref.finalize(self, launched.close)
            atexit.register(close_at_exit, weakref.ref(self))
        try:
            self.ranks.on_leaders(self._check_servers)
            self.ranks.on_main(self._prepare)
            self._watch()
        except BaseException:
            self.close()
            raise

    def from_leader(self, work: Callable[[], T]) -> T:
        return self.ranks.from_leader(work)

    # -- implemented by each backend; these run on the leaders, `_publish` and the later ones on the main rank

    def _check_servers(self) -> None:
        for server in self.servers:
            self._check_server(server)

    def _prepare(self) -> None:
        """Called on the main rank after `_check_servers`."""
        self.transport = self.choose_transport()

    def choose_transport(self) -> Transport:
        """The transport of weights in the settings, or the fastest that is possible."""
        kind, device, dtype = self.settings.transport, torch.device(self.options.device), self.options.dtype
        if kind in ("auto", "ipc"):
            obstacle = self._sharing_obstacle(device)
            if not obstacle:
                return IpcTransport(device, dtype)
            if kind == "ipc":
                raise UserError(obstacle)
        return self.folder_transport(dtype)

    @abstractmethod
    def _sharing_obstacle(self, device: torch.device) -> str:
        """Why servers cannot read weights in the memory of this process on the device; empty if they can."""

    @property
    def cluster(self) -> Any:
        """The `RayServers` of a run on a cluster; None elsewhere."""
        return None if self.launched is None else self.launched.cluster

    def folder_transport(self, dtype: torch.dtype) -> FolderTransport:
        """A folder that all servers see, or that every node gets a copy of."""
        if self.cluster is not None and not self.settings.folder:
            return self.cluster.transport(dtype, self.size)
        return FolderTransport(self.settings.folder, dtype, self.size)

    def nccl_host(self) -> str:
        """The address of this host for servers that take part in collective operations."""
        return (self.cluster.node if self.cluster is not None else "") or self.settings.nccl_host

    @abstractmethod
    async def _sample(self, batch: SampleBatch) -> None:
        """Request the samples of `batch` from its server, and finish each after `_checked`.

        With `splits_samples`, there is always one. The request is repeated after a lost connection.
        """

    def _started(self, batches: Sequence[SampleBatch]) -> None:
        """Called in the thread of the event loop, before the HTTP requests of these batches are sent."""

    @abstractmethod
    def _publish(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Load full weights into all servers; they must not use cached prefixes of earlier weights afterwards.

        If `self.asleep`, the servers sleep; they must be awake afterwards.
        """

    def _fingerprint(self) -> str | None:
        return None

    def _sleep(self) -> None:
        """Release memory of the servers."""

    def _wake(self) -> None:
        """Allocate it again. May be called by several ranks, and while the servers are awake."""

    def _reset_prefix_cache(self) -> None:
        """Only for servers with a prefix cache."""

    def _checked(self, completion: Completion, job: Job) -> Completion:
        """A completion that a server returned, if its tokens and log-probabilities are valid."""
        ids = self._valid_ids(completion.token_ids, job.limit, least=1)
        for values in (completion.engine_logprobs, completion.sampling_logprobs):
            self.valid_logprobs(values, len(ids))
        return completion

    def _valid_ids(self, ids: Any, limit: int, least: int = 0) -> list[int]:
        """Tokens that a server returned, if they are in the vocabulary and not too many."""
        if not isinstance(ids, list):
            raise self.garbage("something that is not a list of tokens")
        vocabulary = self.info.vocab_size
        if not least <= len(ids) <= limit or not all(type(token) is int and 0 <= token < vocabulary for token in ids):
            raise self.garbage(f"{len(ids)} tokens, where {least} to {limit} of the vocabulary were expected")
        return ids

    # -- the interface

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        check_scored(sequences, temperature, self.info)
        return self.ranks.from_leader(lambda: self.score_anywhere(sequences, temperature))

    def score_each(self, sequences: Sequence[Sequence[int]]) -> dict[str, list[list[float]]]:
        check_scored(sequences, 1.0, self.info)
        return self.ranks.from_leader(lambda: self.score_everywhere(sequences))

    @torch.inference_mode(False)
    @torch.no_grad()
    def update_weights(self, source: WeightSource, version: int) -> None:
        able = self.info.capabilities.inflight_updates  # which only leaders know
        self.ranks.on_leaders(lambda: None if able else self._check_idle(f"{self.kind} cannot update weights"))
        weights = iter(source.weights())
        retired = [server.url for server in self.all_servers if server.state is ServerState.RETIRED]
        unusable = self.ranks.union_of_leaders(retired)

        def publish() -> tuple[list[str], dict[str, str]]:
            try:
                self.adopt(server.url for server in self.serving() if server.url not in unusable)
                if not isinstance(self.transport, NcclTransport):  # its group of processes cannot change
                    self.invite()
                elif self.launched is not None:
                    self.launched.refuse_changes(self.notify)
                self._publish(weights, version)
                self.admit(version)
            except UserError as error:
                if not self._has_lost_all(str(error)):
                    raise
            finally:
                drain(weights)  # the other ranks gather all weights, also if this one failed
            return [server.url for server in self.serving()], self.launched.keys() if self.launched is not None else {}

        try:
            if self.pauses:
                self.loop.post(self.gate.clear)
            self.ranks.barrier()
            serving, keys = self.ranks.on_main(publish, meanwhile=lambda: drain(weights))
            if self.launched is None and keys:  # of the main rank
                self.follow(keys)
            self.adopt(serving)
            self.require(self.serving())
            self.asleep = False
            self.info = replace(self.info, version=version)
        finally:
            self.loop.post(self.gate.set)

    def follow(self, keys: Mapping[str, str]) -> None:
        before = len(self.all_servers)
        super().follow(keys)
        for _ in range(self.options.max_batch * (len(self.all_servers) - before)):
            self.loop.post(self.slots.release)

    def _has_lost_all(self, reason: str) -> bool:
        """Whether all servers have failed, after an update has ended with an error."""
        if self.info.version < 0:
            return False
        for server in self.servers:
            if server.state is ServerState.JOINING:
                self.retire(server, reason)
        with suppress(ServerError):  # retires servers that do not answer
            self.call_each("GET", self.health_path, timeout_s=JOIN_S, is_json=False)
        return self.lost

    def fingerprint(self) -> str | None:
        return self.ranks.on_main(self._fingerprint) if self.info.capabilities.fingerprint else None

    def sleep(self) -> None:
        self.ranks.on_leaders(partial(self._check_idle, "the engine cannot sleep"))
        if self.options.sleep_while_training and not self.asleep:
            self.ranks.on_main(self._sleep_unless_lost)
            self.asleep = True

    def _sleep_unless_lost(self) -> None:
        try:
            self._sleep()
        except ServerError:
            if not self.lost:
                raise

    def _check_idle(self, what: str) -> None:
        if self.load.running:
            raise UserError(f"{what} while requests are running: finish or abort them first")

    def wake(self) -> None:
        if self.asleep:
            self.ranks.on_main(self._wake)
            self.asleep = False

    def reset_prefix_cache(self) -> None:
        if not self.asleep:  # sleeping servers have none
            self.ranks.on_main(self._reset_prefix_cache)

    # -- the event loop: these run in its thread

    def serve(self, requests: Sequence[SentRequest]) -> None:
        batches: list[SampleBatch] = []
        for sent in requests:
            try:
                batches += self._start(sent, self._job(sent))
            except UserError as error:
                sent.fail(RequestError({sent.id: str(error)}))
        self._started(batches)

    def _job(self, sent: SentRequest) -> Job:
        """Raises a `UserError` if the request is invalid."""
        if sent.request.continues is not None:
            raise unknown_handle(sent.request, sent.id)
        job = job_for(sent.request, sent.id, (), self.info, can_decode=self.options.decode is not None)
        job.tokens = [index(token) for token in job.tokens]  # JSON has no NumPy integers
        return job

    def _start(self, sent: SentRequest, job: Job) -> list[SampleBatch]:
        """Assign a request to the server with the fewest unfinished samples, and start its tasks."""
        server, samples = self.least_busy(), sent.unfinished
        groups = [[sample] for sample in samples] if self.splits_samples else [samples]
        batches = [SampleBatch(sent, job, group, server) for group in groups]
        for batch in batches:
            batch.assign(server)
            task = sent.start(batch.samples, partial(self._serve, batch))
            task.add_done_callback(batch.end)  # also called for a task that is cancelled before it begins
        return batches

    async def _serve(self, batch: SampleBatch) -> None:
        if self.asleep:
            await self._wake_servers()
        async with self.slots:
            await self._sample_with_retries(batch)

    async def _wake_servers(self) -> None:
        async with self.waking:
            if self.asleep:
                await asyncio.to_thread(self._wake)  # on this rank alone: others may have no requests
                self.asleep = False

    async def _sample_with_retries(self, batch: SampleBatch) -> None:
        lost, wait_s, started = 0, 0.1, time.monotonic()
        while True:
            self.require(self.serving())
            server = batch.server
            try:
                return await self.guarded(server, self._sample(batch))
            except ServerBusy:
                if self.timeout_s and time.monotonic() - started > self.timeout_s:
                    raise
            except ServerError as error:
                retired = await self.retire_if_failed(server, error, repeated=lost == ATTEMPTS - 1)
                other = self.least_busy(avoided=server)
                if not retired:
                    lost += 1
                    may_retry = isinstance(error, ServerUnreachable) or (
                        isinstance(error, ServerFailed) and other is not server
                    )
                    if not may_retry or lost == ATTEMPTS:
                        raise
                self.retries += 1
                batch.assign(other)
                if retired:
                    continue
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def close(self) -> None:
        self.end_requests()
        if self.loop.running:
            self._disconnect()
        if isinstance(self.transport, FolderTransport):
            self.transport.close()
        if self.launched is not None:
            self.launched.close()


def close_at_exit(engine: weakref.ref[RemoteEngine]) -> None:
    """Close an engine before its servers end with this process, so that it does not report them as failed."""
    if (found := engine()) is not None:
        found.close()


def drain(weights: Iterator[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass
