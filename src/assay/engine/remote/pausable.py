"""Base class of engines whose servers are paused for a weight update, such as vLLM and SGLang.

A paused server returns what it has sampled. `PausableEngine` requests the rest of such a sample afterwards, with the
new weights. A backend implements `_body`, `_part`, `_allocate` and `_check_server`.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from assay.engine.outputs import StopStrings
from assay.engine.remote.base import RemoteEngine, SampleBatch
from assay.engine.remote.http import Server, ServerError
from assay.engine.sequence import Job
from assay.types import Completion, Finish


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
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    pauses = True
    sender: Any  # sends weights: `send(transport, weights, version)`
    weights_dropped = False  # by a sleep

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

    def _publish(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        self.call_all("POST", *self.pause)
        try:
            self._allocate("weights")
            self.sender.send(self.transport, weights, version)
            self._allocate("kv_cache")
            self._reset_prefix_cache()
        finally:
            self.call_all("POST", *self.resume)
        self.weights_dropped = False

    async def _sample(self, batch: SampleBatch) -> None:
        """A sample that a weight update interrupts is continued with the new weights."""
        server, job, (sample,) = batch.server, batch.job, batch.samples
        ids: list[int] = []
        logprobs: list[float] = []
        spans: list[tuple[int, int]] = []
        while True:
            await self.gate.wait()
            version = self.info.version
            answer = await self._ask(server, self._body(server, job, sample, ids), job.max_length)
            part = self._part(answer, job)
            self._check_version(server, answer, version)
            ids += self._valid_ids(part.token_ids, job.limit - len(ids))
            logprobs += self.valid_logprobs(part.logprobs, len(part.token_ids))
            if part.token_ids:
                spans.append((version, len(part.token_ids)))
            if part.finish is None and len(ids) >= job.limit:
                part.finish = Finish.LENGTH
            if part.finish is not None:
                return batch.sent.finish(sample, self._end(job, ids, logprobs, spans, part.finish, version))
            if part.interrupted and version == self.info.version and self.gate.is_set():
                raise ServerError(
                    f"the {self.kind} server {server.url} aborted a request: does another program control it?"
                )

    def _end(
        self,
        job: Job,
        ids: list[int],
        logprobs: list[float],
        spans: list[tuple[int, int]],
        finish: Finish,
        version: int,
    ) -> Completion:
        params = job.request.params
        if params.stop and self.stopping is not None and (end := first_stop(ids, params.stop, self.stopping)):
            if end < len(ids):
                ids, logprobs, spans = ids[:end], logprobs[:end], truncated(spans, end)
            finish = Finish.STOP
        spans = merged(spans)
        first = spans[0][0] if spans else version
        several = tuple(spans) if len(spans) > 1 else ()
        return self._checked(Completion(ids, logprobs, list(logprobs), finish, first, version_spans=several), job)


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


def truncated(spans: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The version spans of the first `length` tokens."""
    kept: list[tuple[int, int]] = []
    for version, count in spans:
        if length > 0:
            kept.append((version, min(count, length)))
            length -= count
    return kept


def merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The version spans, where neighbors with the same version are one."""
    result: list[tuple[int, int]] = []
    for version, count in spans:
        if result and result[-1][0] == version:
            count += result.pop()[1]
        result.append((version, count))
    return result
