"""What the routes of the server share: access rules, limits, reading of requests, and responses."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from assay.config import HttpConfig
from assay.engine.base import EngineLoad
from assay.engine.client import EngineClient
from assay.server import metrics as names
from assay.server.metrics import CLOSED, Metrics
from assay.server.protocol import ApiError, RequestParser, parse_object
from assay.server.responses import TokenTexts
from assay.server.running import RequestBatches
from assay.system.http_server import is_loopback
from assay.system.openai_client import key_of
from assay.text import Renderer
from assay.types import UserError

JSON = "application/json"
LONG_BODY = 1 << 16  # bytes from which a body is parsed and tokenized in a thread, so that other requests are served


def api_key_of(cfg: HttpConfig) -> str:
    """The key that requests need; empty: everyone who can connect may use the server."""
    key = key_of(cfg.api_key_env, "http")
    if not key and not is_loopback(cfg.host):
        raise UserError(
            f"everyone who reaches {cfg.host} could use the server: set an API key with --api-key-env NAME, "
            "or bind it to 127.0.0.1"
        )
    return key


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
        self.metrics.add(names.ACTIVE, samples)
        try:
            yield
        finally:
            self.metrics.add(names.ACTIVE, -samples)

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


@dataclass(kw_only=True)
class Service(HttpService):
    """What the routes of a language model need."""

    renderer: Renderer
    parser: RequestParser
    client: EngineClient
    call: Callable[..., Awaitable[Any]]  # of `EngineControl`

    def __post_init__(self) -> None:
        super().__post_init__()
        self.texts = TokenTexts(self.renderer)
        self.batches = RequestBatches()

    @property
    def max_length(self) -> int:
        return self.parser.info.max_length

    async def state(self) -> tuple[EngineLoad, int]:
        return await self.call("load"), await self.call("version")


def json_response(tree: Any) -> Response:
    return Response(json.dumps(tree), media_type=JSON)


def error_response(error: ApiError) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    if error.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    return Response(error.body, error.status, headers, media_type=JSON)
