"""Endpoints for our trainer: generation with exact numbers, scores, weight updates and fingerprints.

All but scores are enabled by `http.allow_updates`, because they change what is served.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from assay.engine.base import Event, Failed, Finished, Request, TokenChunk
from assay.engine.remote.wire import FLOATS, IDS, WireError, event_to_json, pack, request_from_json, unpack
from assay.server import metrics as names
from assay.server.protocol import ApiError, Fields
from assay.server.service import RunningSamples, Service, json_response, until_disconnect
from assay.types import Completion, UserError

Endpoint = Callable[[HttpRequest], Awaitable[Response]]
Batch = list[Any]  # its name, the index of the request, the number of requests
NDJSON = b"application/x-ndjson"
MAX_VERSION = 1 << 53
ACTIONS = ("sleep", "wake", "reset_prefix_cache")


def parse_request(tree: Mapping[str, Any]) -> tuple[Request, Batch | None]:
    """A request, and the batch of requests that it belongs to."""
    batch = Fields(tree).get("batch", list)
    if batch is not None and ([type(one) for one in batch] != [str, int, int] or not 0 <= batch[1] < batch[2]):
        raise ApiError(400, "'batch' must be a name, an index and a larger number of requests", "batch")
    try:
        return request_from_json(tree), batch
    except WireError as error:
        raise ApiError(400, str(error)) from None


def parse_scored(tree: Mapping[str, Any]) -> tuple[list[list[int]], float]:
    sequences = Fields(tree).get("sequences", list, [])
    try:
        return [unpack(one, IDS) for one in sequences], Fields(tree).number("temperature", 1.0, 0.0, 100.0)
    except WireError as error:
        raise ApiError(400, str(error)) from None


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
            service.metrics.add(names.PROMPT_TOKENS, len(self.request.prompt_ids))
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
                new = await running.events()
                events = [one if isinstance(one, TokenChunk) else Finished(0, sample, one) for sample, one in new]
                finished = [one for _, one in new if isinstance(one, Completion)]
                left -= len(finished)
                self.service.metrics.add(names.SAMPLED_TOKENS, sum(len(one.token_ids) for one in finished))
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

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def checked(request: HttpRequest) -> Response:
            if not service.cfg.allow_updates:
                raise ApiError(403, "weight updates are disabled: start the server with --allow-updates")
            return await endpoint(request)

        return checked

    async def info(request: HttpRequest) -> Response:
        return json_response({**await call("info"), "model": service.model})

    async def generate(request: HttpRequest) -> Response:
        return EventStream(service, *await service.parse(request, parse_request))

    async def score(request: HttpRequest) -> Response:
        sequences, temperature = await service.parse(request, parse_scored)
        return json_response({"scores": [pack(one, FLOATS) for one in await call("score", sequences, temperature)]})

    async def weights(request: HttpRequest) -> Response:
        source, version = await service.parse(request, parse_weights)
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
        Route("/engine/info", guarded(info)),
        Route("/engine/generate", guarded(generate), methods=["POST"]),
        Route("/engine/score", score, methods=["POST"]),
        Route("/engine/weights", guarded(weights), methods=["POST"]),
        Route("/engine/fingerprint", guarded(fingerprint)),
        Route("/engine/digests", guarded(digests)),
        *(Route(f"/engine/{name}", guarded(action(name)), methods=["POST"]) for name in ACTIONS),
    ]
