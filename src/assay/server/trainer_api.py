"""Endpoints for our trainer: generation with exact numbers, scores, weight updates and fingerprints; and the calls of
the engine that are not requests.

All but scores are enabled by `http.allow_updates`, because they change what is served.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from assay.engine.base import Engine, Event, Failed, Finished, Request, TokenChunk, TokenScores
from assay.engine.remote.server_side import gpu_of, shared_buffer, weights_of_buffer, weights_of_folder
from assay.engine.remote.wire import FLOATS, IDS, WireError, event_to_json, pack, request_from_json, unpack
from assay.server.protocol import ApiError, Fields
from assay.server.service import (
    PROMPT_TOKENS,
    SAMPLED_TOKENS,
    RunningSamples,
    Service,
    json_response,
    until_disconnect,
)
from assay.system.awaiting import SequenceBatches, run_in_thread
from assay.types import Completion, UserError, describe_error

Endpoint = Callable[[HttpRequest], Awaitable[Response]]
Batch = list[Any]  # its name, the index of the request, the number of requests
NDJSON = b"application/x-ndjson"
MAX_VERSION = 1 << 53
CALLS = 4  # threads for calls of the engine that wait
# Tokens of the sequences that are scored in one call of the engine, by device: running requests wait for it.
SCORED_TOKENS = {"cpu": 1024, "cuda": 8192}
CHUNK_S = 60.0  # seconds after which an update without further weights is given up


def parse_request(tree: Mapping[str, Any]) -> tuple[Request, Batch | None]:
    """A request, and the batch of requests that it belongs to."""
    batch = Fields(tree).get("batch", list)
    if batch is not None and ([*map(type, batch)] != [str, int, int] or not 0 <= batch[1] < batch[2]):
        raise ApiError(400, "'batch' must be a name, an index and a larger number of requests", "batch")
    return request_from_json(tree), batch


def parse_scored(tree: Mapping[str, Any]) -> tuple[list[list[int]], float]:
    fields = Fields(tree)
    sequences = [unpack(sequence, IDS) for sequence in fields.get("sequences", list, [])]
    return sequences, fields.number("temperature", 1.0, 0.0, 100.0)


def parse_weights(tree: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    fields = Fields(tree)
    transport = fields.get("transport", str, "folder")
    if transport not in ("folder", "ipc"):
        raise ApiError(400, f"unknown transport '{transport[:60]}': use folder or ipc", "transport")
    source = {"transport": transport, "path": fields.get("path", str, ""), "chunk": fields.get("chunk", dict)}
    if transport == "folder" and not source["path"]:
        raise ApiError(400, "'path' is missing", "path")
    return source, fields.integer("version", 0, 0, MAX_VERSION)


class EventStream(Response):
    """The events of one request, one JSON object per line."""

    def __init__(self, service: Service, request: Request, batch: Batch | None) -> None:
        self.service, self.request, self.batch = service, request, batch

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service, samples = self.service, max(self.request.params.n, 1)
        with service.admitted(samples):
            service.metrics.add(PROMPT_TOKENS, len(self.request.prompt_ids))
            async with until_disconnect(scope, receive):
                if self.batch is not None and not service.cfg.frontends:
                    await service.batches.join(*self.batch)
                with RunningSamples(service.client, [self.request]) as running:
                    await self._send_events(running, samples, send)

    async def _send_events(self, running: RunningSamples, left: int, send: Any) -> None:
        headers = [(b"content-type", NDJSON)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        events: list[Event]
        while left:
            try:
                arrived = await running.events()
                events = [new if isinstance(new, TokenChunk) else Finished(0, sample, new) for sample, new in arrived]
                finished = [new for _, new in arrived if isinstance(new, Completion)]
                left -= len(finished)
                self.service.metrics.add(SAMPLED_TOKENS, sum(len(completion.token_ids) for completion in finished))
            except ApiError as error:
                events, left = [Failed(0, error.message)], 0
            body = "".join(f"{json.dumps(event_to_json(event))}\n" for event in events).encode()
            await send({"type": "http.response.body", "body": body, "more_body": left > 0})


def trainer_routes(service: Service) -> list[Route]:
    async def call(name: str, *args: Any) -> Any:
        try:
            return await service.call(name, *args)
        except UserError as error:
            raise ApiError(400, str(error)) from None

    async def parsed(request: HttpRequest, parse: Callable[[Mapping[str, Any]], Any]) -> Any:
        try:
            return await service.parse(request, parse)
        except WireError as error:
            raise ApiError(400, str(error)) from None

    def guarded(name: str, endpoint: Endpoint, method: str = "POST") -> Route:
        async def checked(request: HttpRequest) -> Response:
            if not service.cfg.allow_updates:
                raise ApiError(403, "weight updates are disabled: start the server with --allow-updates")
            return await endpoint(request)

        return Route(f"/engine/{name}", checked, methods=[method])

    async def info(request: HttpRequest) -> Response:
        return json_response({**await call("info"), "model": service.model})

    async def generate(request: HttpRequest) -> Response:
        return EventStream(service, *await parsed(request, parse_request))

    async def score(request: HttpRequest) -> Response:
        scores = await call("score", *await parsed(request, parse_scored))
        return json_response({"scores": [pack(values, FLOATS) for values in scores]})

    async def weights(request: HttpRequest) -> Response:
        source, version = await parsed(request, parse_weights)
        await call("update_weights", source, version)
        return json_response({"version": version})

    async def fingerprint(request: HttpRequest) -> Response:
        digest = await call("fingerprint")
        return json_response({"fingerprint": digest, "version": await call("version")})

    async def digests(request: HttpRequest) -> Response:
        return json_response(await call("digests"))

    def action(name: str) -> Endpoint:
        async def run(request: HttpRequest) -> Response:
            await call(name)
            return json_response({})

        return run

    return [
        Route("/engine/score", score, methods=["POST"]),
        *(guarded(endpoint.__name__, endpoint) for endpoint in (generate, weights)),
        *(guarded(endpoint.__name__, endpoint, "GET") for endpoint in (info, fingerprint, digests)),
        *(guarded(name, action(name)) for name in ("sleep", "wake", "reset_prefix_cache")),
    ]


# -- the engine


@dataclass
class FolderWeights:
    """The weights in the safetensors files of a folder, as a `WeightSource`."""

    folder: str

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError

        try:
            yield from weights_of_folder(Path(self.folder))
        except (OSError, ValueError, SafetensorError) as error:  # e.g. a path that is too long
            raise UserError(f"cannot read the weights in {self.folder[:300]}: {describe_error(error)}") from None


class ChunkedUpdate:
    """A weight update that arrives in chunks of GPU memory of another process, as a `WeightSource`."""

    def __init__(self, engine: Engine, version: int) -> None:
        self.version, self._device = version, engine.info.device
        self._chunks: queue.SimpleQueue[tuple[dict[str, Any], Future[None]] | None] = queue.SimpleQueue()
        self._done = run_in_thread(lambda: self._run(engine), "weight-update")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        while (item := self._next()) is not None:
            chunk, copied = item
            yield from weights_of_buffer(shared_buffer(chunk["handle"], self._device), chunk)
            torch.cuda.synchronize(self._device)
            copied.set_result(None)

    def load(self, chunk: dict[str, Any]) -> None:
        """Returns when the engine has copied these weights, so that the sender can use the memory again."""
        copied: Future[None] = Future()
        self._chunks.put((chunk, copied))
        wait([copied, self._done], return_when=FIRST_COMPLETED)
        if not copied.done():
            self._done.result()
            raise UserError("the weight update ended before all weights were copied")

    def finish(self) -> None:
        self._chunks.put(None)
        self._done.result()

    def _next(self) -> tuple[dict[str, Any], Future[None]] | None:
        try:
            return self._chunks.get(timeout=CHUNK_S)
        except queue.Empty:
            raise UserError(f"no further weights arrived for {CHUNK_S:g} s: has the trainer ended?") from None

    def _run(self, engine: Engine) -> None:
        try:
            engine.update_weights(self, self.version)
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"damaged weights: {describe_error(error)}") from error


@dataclass(frozen=True)
class Scored:
    """A sequence to score."""

    ids: Sequence[int]
    start: int  # position of the first token whose score is needed
    count: int  # number of likely tokens at each position
    temperature: float


class ScoreBatches(SequenceBatches[Scored, TokenScores]):
    """Computes sequences of concurrent requests in one call of the engine."""

    def __init__(self, engine: Engine, threads: ThreadPoolExecutor) -> None:
        super().__init__(SCORED_TOKENS.get(engine.info.device.type, SCORED_TOKENS["cpu"]))
        self._engine, self._threads = engine, threads

    def size(self, item: Scored) -> int:
        return len(item.ids)

    async def compute(self, items: list[Scored]) -> Sequence[TokenScores]:
        groups: dict[tuple[int, float], list[int]] = {}
        for index, item in enumerate(items):
            groups.setdefault((item.count, item.temperature), []).append(index)
        results: dict[int, TokenScores] = {}
        for options, indices in groups.items():
            sequences, starts = [items[index].ids for index in indices], [items[index].start for index in indices]
            call = partial(self._engine.top_logprobs, sequences, starts, *options)
            scores = await asyncio.get_running_loop().run_in_executor(self._threads, call)
            results.update(zip(indices, scores, strict=True))
        return [results[index] for index in range(len(items))]


class EngineControl:
    """Calls of the engine that are not requests. Those that wait for a step boundary run in threads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._chunked: ChunkedUpdate | None = None
        self._updating = threading.Lock()
        self._threads = ThreadPoolExecutor(CALLS, thread_name_prefix="engine-call")
        self._scores = ScoreBatches(engine, self._threads)

    async def call(self, name: str, *args: Any) -> Any:
        """Call a method of this object, or else of the engine."""
        if name == "load":  # these do not wait for the engine
            return self.engine.load
        if name == "version":
            return self.engine.info.version
        if name == "info":
            return self.info()
        if name == "top_logprobs":
            return await self.top_logprobs(*args)
        method = self.update_weights if name == "update_weights" else getattr(self.engine, name)
        return await asyncio.get_running_loop().run_in_executor(self._threads, method, *args)

    async def top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float
    ) -> list[TokenScores]:
        """Together with the sequences of other calls that wait."""
        pairs = zip(sequences, starts, strict=True)
        return await self._scores.submit([Scored(ids, start, count, temperature) for ids, start in pairs])

    def close(self) -> None:
        self._scores.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def info(self) -> dict[str, Any]:
        info = self.engine.info
        capabilities = asdict(info.capabilities) | {"handles": False}
        sizes = {"max_length": info.max_length, "max_batch": info.max_batch, "vocab_size": info.vocab_size}
        dtype = str(info.dtype).removeprefix("torch.")
        gpu = gpu_of(info.device)
        return {"version": info.version, **sizes, "dtype": dtype, "gpu": gpu, "capabilities": capabilities}

    def update_weights(self, source: dict[str, Any], version: int) -> None:
        """`source`: a folder, or one chunk of weights in GPU memory; without either, the chunks are complete."""
        with self._updating:
            if source["transport"] == "folder":
                self.engine.update_weights(FolderWeights(source["path"]), version)
                return
            if self.engine.info.device.type != "cuda":
                raise UserError("the server's engine is not on a GPU: use the transport 'folder'")
            update = self._chunked
            if update is None or update.version != version:
                update = self._chunked = ChunkedUpdate(self.engine, version)
            try:
                update.finish() if source["chunk"] is None else update.load(source["chunk"])
            except BaseException:
                self._chunked = None
                raise
            if source["chunk"] is None:
                self._chunked = None
