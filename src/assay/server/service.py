"""What the routes of the server share: counters, access rules, limits, reading of requests, running samples, responses.

All counters of a process are in one array of numbers with a fixed layout. Several processes use parts of one shared
array, and any of them can report the sums.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, Self

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from assay.config import HttpConfig
from assay.engine.base import EngineLoad, Request, RequestError, TokenChunk
from assay.engine.client import EngineClient
from assay.server.protocol import ApiError, RequestParser, parse_object
from assay.system.http_server import is_loopback
from assay.system.openai_client import key_of
from assay.text import Renderer
from assay.types import Completion, UserError, describe_error

JSON = "application/json"
BATCH_S = 5.0  # seconds that a batch of requests waits for its last one
LONG_BODY = 1 << 16  # bytes from which a body is parsed and tokenized in a thread, so that other requests are served
TOKEN_TEXTS = 1 << 16  # cached texts of tokens

ENDPOINTS = ("completions", "chat", "classify", "models", "engine", "other")
CLOSED = 499  # the client has disconnected
STATUSES = (200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 429, CLOSED, 500, 503)
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
REQUESTS = len(ENDPOINTS) * len(STATUSES)
HISTOGRAM = len(BUCKETS) + 2  # one count per bucket, one for longer times, and the sum
PROMPT_TOKENS, SAMPLED_TOKENS, ACTIVE = REQUESTS, REQUESTS + 1, REQUESTS + 2
FIRST_TOKEN = ACTIVE + 1
LATENCY = FIRST_TOKEN + HISTOGRAM
SIZE = LATENCY + HISTOGRAM


class Metrics:
    """The counters of one process, and the sums over all processes."""

    def __init__(self, values: MutableSequence[float] | None = None, part: int = 0) -> None:
        """`values`: the shared array, a multiple of `SIZE` numbers. `part`: the index of this process."""
        self._values: MutableSequence[float] = [0.0] * SIZE if values is None else values
        self._start = part * SIZE

    def add(self, index: int, amount: float = 1.0) -> None:
        self._values[self._start + index] += amount

    def count_request(self, endpoint: str, status: int) -> None:
        known = status if status in STATUSES else 500 if status >= 500 else 400 if status >= 400 else 200
        self.add(ENDPOINTS.index(endpoint) * len(STATUSES) + STATUSES.index(known))

    def observe(self, histogram: int, seconds: float) -> None:
        self.add(histogram + bisect_left(BUCKETS, seconds))
        self.add(histogram + HISTOGRAM - 1, seconds)

    def total(self, index: int) -> float:
        return sum(self._values[index::SIZE])

    @property
    def active(self) -> int:
        """Samples of all processes that are requested and not finished."""
        return int(self.total(ACTIVE))

    def render(self, load: EngineLoad, version: int) -> str:
        lines: list[str] = []
        counts = {
            (endpoint, status): self.total(row * len(STATUSES) + column)
            for row, endpoint in enumerate(ENDPOINTS)
            for column, status in enumerate(STATUSES)
        }
        labelled = ((f'{{endpoint="{e}",status="{s}"}}', value) for (e, s), value in counts.items() if value)
        lines += series("assay_requests_total", "counter", "Responses by endpoint and status.", labelled)
        single = [
            ("prompt_tokens_total", "counter", "Prompt tokens of accepted requests.", self.total(PROMPT_TOKENS)),
            ("generated_tokens_total", "counter", "Sampled tokens of all answers.", self.total(SAMPLED_TOKENS)),
            ("preemptions_total", "counter", "Sequences that lost their KV blocks for a while.", load.preemptions),
            ("active_samples", "gauge", "Samples that are requested and not finished.", self.total(ACTIVE)),
            ("running_sequences", "gauge", "Sequences that are being decoded.", load.running),
            ("waiting_requests", "gauge", "Requests that wait for memory or a free row.", load.waiting),
            ("kv_blocks_used", "gauge", "Blocks of the KV cache that requests hold.", load.kv_blocks_used),
            ("kv_blocks", "gauge", "Blocks of the KV cache.", load.kv_blocks),
            ("weights_version", "gauge", "Version of the served weights.", version),
        ]
        for name, kind, text, value in single:
            lines += series(f"assay_{name}", kind, text, [("", value)])
        lines += self._histogram("assay_time_to_first_token_seconds", "Time to the first token.", FIRST_TOKEN)
        lines += self._histogram("assay_request_seconds", "Time to the end of the answer.", LATENCY)
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str, text: str, start: int) -> list[str]:
        *counts, total = [self.total(start + index) for index in range(HISTOGRAM)]
        bounds = [*map(str, BUCKETS), "+Inf"]
        below = list(accumulate(counts))
        rows = [(f'_bucket{{le="{bound}"}}', count) for bound, count in zip(bounds, below, strict=True)]
        return series(name, "histogram", text, [*rows, ("_sum", total), ("_count", below[-1])])


def series(name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> list[str]:
    rows = [f"{name}{suffix} {int(value) if value == int(value) else repr(float(value))}" for suffix, value in values]
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *rows]


def api_key_of(cfg: HttpConfig) -> str:
    """The key that requests need; empty: everyone who can connect may use the server."""
    key = key_of(cfg.api_key_env, "http")
    if not key and not is_loopback(cfg.host):
        raise UserError(
            f"everyone who reaches {cfg.host} could use the server: set an API key with --api-key-env NAME, "
            "or bind it to 127.0.0.1"
        )
    return key


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


@dataclass
class HttpService(ABC):
    """What the routes of every kind of model need."""

    model: str  # its name in requests
    cfg: HttpConfig
    capacity: int  # samples that run or wait
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.api_key = api_key_of(self.cfg)

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Maximum number of tokens that the model reads."""

    @abstractmethod
    async def state(self) -> tuple[EngineLoad, int]:
        """What the model is working on, and the version of its weights."""

    @contextmanager
    def admitted(self, samples: int) -> Iterator[None]:
        """Count samples while they are served; an overloaded server rejects them."""
        if self.metrics.active + samples > self.capacity:
            message = f"the server is overloaded: {self.metrics.active} answers are being computed or wait; try again"
            raise ApiError(429, message, code="overloaded", retry_after=1)
        self.metrics.add(ACTIVE, samples)
        try:
            yield
        finally:
            self.metrics.add(ACTIVE, -samples)

    async def read(self, request: HttpRequest) -> bytes:
        """The body of a request, within the limits on size and time."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != JSON:  # also keeps out forms that a foreign web page can send
            raise ApiError(415, f"the content type must be {JSON}")
        limit = int(self.cfg.max_body_mb * 2**20)
        too_large = ApiError(413, f"the body is larger than {limit} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.cfg.body_timeout_s):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(CLOSED, "the client has disconnected")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            seconds = f"{self.cfg.body_timeout_s:g} seconds"
            raise ApiError(408, f"the body was not received within {seconds}") from None

    async def parse(self, request: HttpRequest, parse: Callable[[Mapping[str, Any]], Any]) -> Any:
        body = await self.read(request)
        if len(body) > LONG_BODY:
            return await asyncio.to_thread(lambda: parse(parse_object(body)))
        return parse(parse_object(body))


def token_texts(renderer: Renderer) -> Callable[[int], str]:
    """The texts of single tokens, for log-probabilities."""
    return lru_cache(TOKEN_TEXTS)(lambda token: renderer.tokenizer.decode([token], skip_special=False))


@dataclass(kw_only=True)
class Service(HttpService):
    """What the routes of a language model need."""

    renderer: Renderer
    parser: RequestParser
    client: EngineClient
    call: Callable[..., Awaitable[Any]]  # of `EngineControl`

    def __post_init__(self) -> None:
        super().__post_init__()
        self.texts = token_texts(self.renderer)
        self.batches = RequestBatches()

    @property
    def max_length(self) -> int:
        return self.parser.info.max_length

    async def state(self) -> tuple[EngineLoad, int]:
        return await self.call("load"), await self.call("version")


def json_response(tree: Any) -> Response:
    return Response(json.dumps(tree), media_type=JSON)


def error_response(error: ApiError, given: Mapping[str, str] | None = None) -> Response:
    """`given`: more headers."""
    headers = {**(given or {}), **({"Retry-After": str(error.retry_after)} if error.retry_after else {})}
    if error.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return Response(error.body, error.status, headers, media_type=JSON)
