"""Base class of engines whose servers are paused for a weight update, such as vLLM and SGLang.

A paused server returns what it has sampled. `PausableEngine` requests the rest of such a sample afterwards, with the
new weights. A backend implements `_body`, `_part`, `_allocate`, `_check_server` and the requests that
load weights.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from assay.engine.base import Capabilities
from assay.engine.completions import StopStrings
from assay.engine.remote.base import RemoteEngine, SampleBatch
from assay.engine.remote.http import Server, ServerError, ServerUnreachable
from assay.engine.remote.transport import FolderTransport, IpcTransport, NcclTransport, Transport
from assay.engine.sequence import Job
from assay.models.base import PolicyModel
from assay.types import Completion, Finish, UserError

Weights = Iterator[tuple[str, Tensor]]


@dataclass
class SampledPart:
    """What a server returned for a sample. Without `finish`, the sample is not complete."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Finish | None
    interrupted: bool = False  # by a pause


class PausableEngine(RemoteEngine):
    path: ClassVar[str]  # of requests for samples
    pause: ClassVar[tuple[str, Any]]  # path and body of the request: running requests return what they have
    resume: ClassVar[tuple[str, Any]]
    length_fields: ClassVar[tuple[str, str]]  # of a request: the largest and the smallest number of new tokens
    lowest_temperature: ClassVar[float]  # above 0 that servers apply as it is
    forbidden_bias: ClassVar[float]  # added to the logits of forbidden tokens
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    capabilities = Capabilities(temperature_logprobs=True, truncated_logprobs=False, inflight_updates=True, score=True)
    group_transport: ClassVar[type[NcclTransport]] = NcclTransport
    pauses = True
    weights_dropped = False  # by a sleep

    def __init__(self, model: PolicyModel, *arguments: Any, **options: Any) -> None:
        self.served: dict[str, Any] = {}  # what each server reports about itself, by URL; `workers`: its processes
        super().__init__(model, *arguments, **options)

    @cached_property
    def stopping(self) -> StopStrings | None:
        return StopStrings(self.options.decode) if self.options.decode is not None else None

    @abstractmethod
    def _body(self, server: Server, job: Job, sample: int, drawn: Sequence[int]) -> dict[str, Any]:
        """The request for the rest of a sample of which `drawn` tokens are there."""

    @abstractmethod
    def _part(self, answer: Any, job: Job) -> SampledPart:
        """What the server returned."""

    def _check_version(self, server: Server, answer: Any, version: int) -> None:
        """Raise `ServerStale` if the server reports that it has sampled with weights before `version`."""

    async def _ask(self, server: Server, body: dict[str, Any], tokens: int) -> Any:
        """Send a request for a sample. `tokens`: see `HttpServers.request`."""
        return await self.post(server, self.path, body, tokens=tokens)

    @abstractmethod
    def _allocate(self, *tags: str) -> None:
        """Allocate memory that a sleep has released: "weights", "kv_cache"."""

    def _publish(self, weights: Weights, version: int) -> None:
        self.call_all("POST", *self.pause)
        try:
            self._allocate("weights")
            self.send(weights, version)
            self._allocate("kv_cache")
            self._reset_prefix_cache()
        finally:
            self.call_all("POST", *self.resume)
        self.weights_dropped = False

    # -- how weights get into the servers

    @abstractmethod
    def _load_folder(self, folder: str, version: int) -> None: ...

    @abstractmethod
    def _send_shared(self, transport: IpcTransport, weights: Weights, version: int) -> None: ...

    @abstractmethod
    def _group_request(self, place: dict[str, Any], transport: NcclTransport) -> tuple[str, Any]:
        """Path and body of the request to join the group of processes. `place`: where and as which ranks."""

    @abstractmethod
    def _update_request(self, names: list[str], dtypes: list[str], shapes: list[list[int]], version: int) -> Any:
        """Path and body of the request to receive these weights."""

    def _check_update(self, answer: Any) -> None:
        """Raise an error if an update has failed."""

    def send(self, weights: Weights, version: int) -> None:
        """Replace all weights of all servers. Cached prefixes are not dropped."""
        with self._explained():
            match self.transport:
                case FolderTransport():
                    with self.transport.written(weights, version) as folder:
                        self._load_folder(str(folder), version)
                case IpcTransport():
                    self._send_shared(self.transport, weights, version)
                case NcclTransport():
                    self._broadcast(self.transport, weights, version)

    def choose_transport(self) -> Transport:
        if self.settings.transport != "nccl":
            return super().choose_transport()
        return self.joined(
            self.group_transport(torch.device(self.options.device), self.options.dtype, self.nccl_host())
        )

    def joined(self, transport: NcclTransport) -> NcclTransport:
        """Let all servers join a group of processes with this one."""
        world = 1 + sum(served.workers for served in self.served.values())
        offset, posts = 1, {}
        for server in self.servers:
            place = {"master_address": transport.host, "master_port": transport.port, "world_size": world}
            posts[server] = self._group_request({**place, "rank_offset": offset}, transport)
            offset += self.served[server.url].workers
        with self._explained():
            self.call_during(partial(transport.connect, world), posts, self._check_update, transport.abort)
        return transport

    def _broadcast(self, transport: NcclTransport, weights: Weights, version: int) -> None:
        for chunk in transport.chunks(weights):
            names, tensors = [name for name, _ in chunk], [tensor for _, tensor in chunk]
            dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
            request = self._update_request(names, dtypes, [list(tensor.shape) for tensor in tensors], version)
            posts = dict.fromkeys(self.servers, request)
            self.call_during(partial(transport.broadcast, chunk), posts, self._check_update, transport.abort)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Errors of an update say what may be wrong."""
        try:
            yield
        except ServerUnreachable:
            raise
        except ServerError as error:
            raise UserError(
                f"a {self.kind} server cannot load the weights ({error}): it must serve the same model, and for "
                f"the transport folder see the same folder ({self.section}.folder); its log has the cause"
            ) from None

    # -- requests

    def _sampling(self, job: Job, drawn: Sequence[int]) -> dict[str, Any]:
        """The sampling parameters that all servers have. Those that are off are given too: otherwise defaults apply."""
        params = job.request.params
        if 0 < params.temperature < self.lowest_temperature:
            raise UserError(
                f"{self.kind} has no temperatures between 0 and {self.lowest_temperature}: {params.temperature:g}"
            )
        limit = job.limit - len(drawn)
        lengths = limit, min(limit, max(0, params.min_new_tokens - len(drawn)))
        fields: dict[str, Any] = dict(zip(self.length_fields, lengths, strict=True))
        fields |= {"temperature": params.temperature, "top_p": params.top_p, "min_p": params.min_p}
        fields |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        fields |= {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
        if params.forbidden_token_ids:
            fields["logit_bias"] = {str(token): self.forbidden_bias for token in params.forbidden_token_ids}
        return fields

    @abstractmethod
    async def _prompt_scores(self, server: Server, ids: list[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, at temperature 1."""

    async def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        if temperature != 1.0:
            raise UserError(f"{self.kind} scores given tokens at temperature 1 only")
        lists = [[int(token) for token in sequence] for sequence in sequences]
        return await asyncio.gather(*(self._prompt_scores(server, ids) for ids in lists))

    async def _sample(self, batch: SampleBatch) -> None:
        """A sample that a weight update interrupts is continued with the new weights."""
        server, job, (sample,) = batch.server, batch.job, batch.samples
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []  # of the weights, by token
        while True:
            await self.gate.wait()
            version = self.info.version
            answer = await self._ask(server, self._body(server, job, sample, ids), job.max_length)
            part = self._part(answer, job)
            self._check_version(server, answer, version)
            ids += self._valid_ids(part.token_ids, job.limit - len(ids))
            logprobs += self.valid_logprobs(part.logprobs, len(part.token_ids))
            versions += [version] * len(part.token_ids)
            if part.finish is None and len(ids) >= job.limit:
                part.finish = Finish.LENGTH
            if (finish := part.finish) is not None:
                break
            if part.interrupted and version == self.info.version and self.gate.is_set():
                raise ServerError(
                    f"the {self.kind} server {server.url} aborted a request: does another program control it?"
                )
        params = job.request.params
        if params.stop and self.stopping is not None and (end := first_stop(ids, params.stop, self.stopping)):
            ids, logprobs, versions, finish = ids[:end], logprobs[:end], versions[:end], Finish.STOP
        spans = [(span_version, len(list(tokens))) for span_version, tokens in groupby(versions)]
        first = spans[0][0] if spans else version
        several = tuple(spans) if len(spans) > 1 else ()
        completion = Completion(ids, logprobs, list(logprobs), finish, first, version_spans=several)
        batch.sent.finish(sample, self._checked(completion, job))


def sample_seed(seed: int, sample: int, position: int) -> int:
    """The seed of one sample, from 0 to 2**63 - 1."""
    digest = hashlib.blake2b(f"{seed} {sample} {position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def first_stop(ids: Sequence[int], stops: tuple[str, ...], stopping: StopStrings) -> int:
    """Number of tokens up to the one that completes a stop string; 0 if none does."""
    for position in np.flatnonzero(stopping.suspects(np.asarray(ids), stops)).tolist():
        if stopping.completed(ids[: position + 1], stops):
            return position + 1
    return 0
