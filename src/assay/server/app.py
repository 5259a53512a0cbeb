"""The routes of the server: the OpenAI API with the formats of its answers, health and metrics.

`trainer_api` has the routes for our trainer, and `classify` the routes of a classification model.

A server may send 10,000s of chunks per second, so the parts of a chunk that do not change are formatted once.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from assay.engine.base import TokenChunk
from assay.server.protocol import ApiError, Generation
from assay.server.service import (
    CLOSED,
    FIRST_TOKEN,
    JSON,
    LATENCY,
    PROMPT_TOKENS,
    SAMPLED_TOKENS,
    HttpService,
    RunningSamples,
    Service,
    error_response,
    json_response,
    until_disconnect,
)
from assay.server.trainer_api import trainer_routes
from assay.system.http_server import is_same_origin
from assay.text import Renderer
from assay.text.stream import REPLACEMENT, TextStream, text_before_stop
from assay.types import Completion

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
DONE = b"data: [DONE]\n\n"


class Gate:
    """Checks keys, host names and origins, and counts responses; wraps the application."""

    def __init__(self, app: Any, service: HttpService) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = 0

        async def counted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if error := self._refusal(scope):
                await error_response(error)(scope, receive, counted)
            else:
                await self.app(scope, receive, counted)
        finally:
            closed = scope.get("assay.closed", False) or not status
            self.service.metrics.count_request(endpoint_of(scope["path"]), CLOSED if closed else status)

    def _refusal(self, scope: Any) -> ApiError | None:
        headers = Headers(scope=scope)
        if api_key := self.service.api_key:
            if scope["path"] == "/health":
                return None
            given = headers.get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), b"Bearer " + api_key.encode()):
                return ApiError(
                    401, "wrong or missing API key: send it as 'Authorization: Bearer KEY'", code="invalid_api_key"
                )
        else:  # bound to the loopback interface
            # A web page can make a browser send requests here, also under a host name of its own.
            host = headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() not in LOCAL_NAMES:
                return ApiError(403, f"the host '{host[:100]}' is not this server: use http://127.0.0.1")
            if not is_same_origin(headers):
                return ApiError(403, "requests of web pages need an API key: start the server with --api-key-env NAME")
        return None


def endpoint_of(path: str) -> str:
    known = {"/v1/completions": "completions", "/v1/chat/completions": "chat", "/classify": "classify"}
    if path in known:
        return known[path]
    return next((name for name in ("models", "engine") if path.startswith((f"/v1/{name}", f"/{name}/"))), "other")


async def on_api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return error_response(ApiError(error.status_code, message), error.headers)


async def on_other_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(ApiError(500, "internal error: see the server's log"))


Likely = Sequence[Sequence[tuple[int, float]]]  # per token: likely tokens and their log-probabilities
Alternatives = Sequence[Sequence[tuple[str, float]]]  # the same with the texts of the tokens


def completion_logprobs(
    texts: Sequence[str], logprobs: Sequence[float], offset: int = 0, alternatives: Alternatives | None = None
) -> dict[str, Any]:
    """In the format of /v1/completions. `offset`: length of the text before these tokens."""
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = None
    if alternatives is not None:  # the first of several tokens with the same text is the most likely one
        tops = [dict(reversed(likely)) for likely in alternatives]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    texts: Sequence[str], logprobs: Sequence[float], alternatives: Alternatives | None = None
) -> dict[str, Any]:
    """In the format of /v1/chat/completions."""
    tops = alternatives if alternatives is not None else [()] * len(texts)
    content = [
        token_entry(text, logprob) | {"top_logprobs": [token_entry(*other) for other in likely]}
        for text, logprob, likely in zip(texts, logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def token_entry(text: str, logprob: float) -> dict[str, Any]:
    """Tokens with a part of a character have no bytes."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class AnswerWriter:
    """Formats the answers to one request."""

    def __init__(self, generation: Generation, renderer: Renderer, texts: Callable[[int], str], model: str) -> None:
        self.generation, self.renderer, self.texts = generation, renderer, texts
        self.sampled_tokens = 0
        self.head = {
            "id": f"{'chatcmpl' if generation.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if generation.chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    @property
    def usage(self) -> dict[str, int]:
        prompt, sampled = self.generation.prompt_tokens, self.sampled_tokens
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def body(self, completions: Sequence[Completion], likely: Sequence[Likely | None]) -> bytes:
        """The whole response. `completions` and `likely`: of the choices."""
        self.sampled_tokens = sum(len(completion.token_ids) for completion in completions)
        choices = [self._choice(index, *choice) for index, choice in enumerate(zip(completions, likely, strict=True))]
        return json.dumps({**self.head, "choices": choices, "usage": self.usage}).encode()

    def _choice(self, index: int, completion: Completion, likely: Likely | None) -> dict[str, Any]:
        generation = self.generation
        text = text_before_stop(self.renderer.decode(completion.token_ids), generation.params.stop)
        choice: dict[str, Any] = {"index": index}
        if generation.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self.logprobs(completion.token_ids, completion.engine_logprobs, likely=likely)
        choice["finish_reason"] = completion.finish.value
        if generation.token_ids:
            choice["prompt_token_ids"] = generation.prompts[index // generation.params.n]
            choice["token_ids"] = completion.token_ids
        return choice

    def logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[float], offset: int = 0, likely: Likely | None = None
    ) -> dict[str, Any] | None:
        if not self.generation.logprobs:
            return None
        texts, alternatives = [self.texts(token) for token in token_ids], None
        if likely is not None:
            # The sampled token has its reported log-probability: another pass rounds it differently.
            alternatives = [
                [(self.texts(other), logprob if other == token else value) for other, value in others]
                for token, logprob, others in zip(token_ids, logprobs, likely, strict=True)
            ]
        if self.generation.chat:
            return chat_logprobs(texts, logprobs, alternatives)
        return completion_logprobs(texts, logprobs, offset, alternatives)


class StreamWriter(AnswerWriter):
    """Formats the answers to one request as server-sent events."""

    def __init__(self, generation: Generation, renderer: Renderer, texts: Callable[[int], str], model: str) -> None:
        super().__init__(generation, renderer, texts, model)
        if generation.chat:
            self.head["object"] = "chat.completion.chunk"
        start = json.dumps(self.head)[:-1]
        end = ',"usage":null}\n\n' if generation.include_usage else "}\n\n"
        fields = '"delta":{"content":' if generation.chat else '"text":'
        self._starts = [f'data: {start},"choices":[{{"index":{index},{fields}' for index in range(generation.samples)]
        self._start, self._end = start, end
        # Log-probabilities and token ids differ between chunks; without them all but the text is constant.
        self._plain = not (generation.logprobs or generation.token_ids)
        close = "}" if generation.chat else ""
        self._continues = f'{close},"logprobs":null,"finish_reason":null}}]{end}'
        self._close = close
        self._streams = [TextStream(renderer.decode, generation.params.stop) for _ in range(generation.samples)]
        self._offsets = [0] * generation.samples

    def opening(self) -> str:
        """The chunks that name the role, in a chat."""
        if not self.generation.chat:
            return ""
        delta = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return "".join(
            f'data: {self._start},"choices":[{{"index":{index},{delta}}}]{self._end}'
            for index in range(self.generation.samples)
        )

    def chunk(self, index: int, event: TokenChunk | Completion) -> str:
        """The chunk of new tokens, or of the end, of one choice; empty if there is nothing to send yet."""
        if isinstance(event, TokenChunk):
            self.sampled_tokens += len(event.token_ids)
            text = self._streams[index].add(event.token_ids)
            if self._plain:
                return f"{self._starts[index]}{quoted(text)}{self._continues}" if text else ""
            return self._detailed(index, text, event.token_ids, event.logprobs)
        text = self._streams[index].finish()
        finish = f'{self._close},"logprobs":null,"finish_reason":"{event.finish.value}"}}]{self._end}'
        return f"{self._starts[index]}{quoted(text)}{finish}"

    def closing(self) -> bytes:
        if not self.generation.include_usage:
            return DONE
        return f'data: {self._start},"choices":[],"usage":{json.dumps(self.usage)}}}\n\n'.encode() + DONE

    def _detailed(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
        values = self.logprobs(token_ids, logprobs, self._offsets[index])
        self._offsets[index] += len(text)
        ids = f',"token_ids":{json.dumps(list(token_ids))}' if self.generation.token_ids else ""
        rest = f'{self._close},"logprobs":{json.dumps(values)},"finish_reason":null{ids}}}]{self._end}'
        return f"{self._starts[index]}{quoted(text)}{rest}"


class GenerationResponse(Response):
    """Generates answers, whole or as a stream. The requests are aborted when the client disconnects."""

    def __init__(self, service: Service, generation: Generation) -> None:
        self.service, self.generation, self.started = service, generation, time.perf_counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        service, generation = self.service, self.generation
        with service.admitted(generation.samples):
            service.metrics.add(PROMPT_TOKENS, generation.prompt_tokens)
            async with until_disconnect(scope, receive):
                with RunningSamples(service.client, generation.requests()) as samples:
                    await (self._stream if generation.stream else self._whole)(samples, scope, receive, send)
                service.metrics.observe(LATENCY, time.perf_counter() - self.started)

    async def _whole(self, samples: RunningSamples, scope: Any, receive: Any, send: Any) -> None:
        service, completions = self.service, await samples.completions()
        writer = AnswerWriter(self.generation, service.renderer, service.texts, service.model)
        body = writer.body(completions, await self._likely_tokens(completions))
        service.metrics.add(SAMPLED_TOKENS, writer.sampled_tokens)
        await Response(body, media_type=JSON)(scope, receive, send)

    async def _likely_tokens(self, completions: Sequence[Completion]) -> Sequence[Any]:
        """The alternatives to each token of the answers, from one more pass over prompts and answers."""
        generation = self.generation
        if not generation.top_logprobs:
            return [None] * len(completions)
        prompts = [prompt for prompt in generation.prompts for _ in range(generation.params.n)]
        pairs = zip(prompts, completions, strict=True)
        sequences, starts = [[*prompt, *completion.token_ids] for prompt, completion in pairs], [*map(len, prompts)]
        temperature = generation.params.temperature or 1.0
        return await self.service.call("top_logprobs", sequences, starts, generation.top_logprobs, temperature)

    async def _stream(self, samples: RunningSamples, scope: Any, receive: Any, send: Any) -> None:
        service = self.service
        writer = StreamWriter(self.generation, service.renderer, service.texts, service.model)
        started = False
        left, counted = self.generation.samples, 0
        while left:
            parts: list[str] = []
            try:
                events = await samples.events()
            except ApiError as error:
                if not started:
                    raise
                last = b"data: " + error.body + b"\n\n" + DONE
                await send({"type": "http.response.body", "body": last, "more_body": False})
                return
            for index, event in events:
                left -= isinstance(event, Completion)
                parts.append(writer.chunk(index, event))
            if not started:
                started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                parts.insert(0, writer.opening())
                service.metrics.observe(FIRST_TOKEN, time.perf_counter() - self.started)
            service.metrics.add(SAMPLED_TOKENS, writer.sampled_tokens - counted)
            counted = writer.sampled_tokens
            body = "".join(parts).encode()
            if left and body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": body + writer.closing(), "more_body": False})


def make_app(service: Service) -> Any:
    """The ASGI application of a language model."""
    parser = service.parser

    async def completions(request: HttpRequest) -> Response:
        return GenerationResponse(service, await service.parse(request, parser.completion))

    async def chat_completions(request: HttpRequest) -> Response:
        return GenerationResponse(service, await service.parse(request, parser.chat_completion))

    no_classifier = f"'{service.model}' is a language model: /classify needs a classification model"
    routes = [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        unsupported("/classify", no_classifier),
        *trainer_routes(service),
    ]
    return with_common_routes(routes, service)


def with_common_routes(routes: Sequence[BaseRoute], service: HttpService) -> Any:
    """The ASGI application with these routes, and those that do not depend on the kind of model."""

    async def models(request: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [model_entry(service)]})

    async def one_model(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name != service.model:
            raise ApiError(404, f"the model '{name[:100]}' does not exist", "model", "model_not_found")
        return json_response(model_entry(service))

    async def health(request: HttpRequest) -> Response:
        return json_response({"status": "ok"})

    async def prometheus(request: HttpRequest) -> Response:
        text = service.metrics.render(*await service.state())
        return Response(text, media_type="text/plain; version=0.0.4")

    common = [
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/health", health),
        Route("/metrics", prometheus),
    ]
    handlers: Any = {ApiError: on_api_error, HTTPException: on_http_error, Exception: on_other_error}
    return Gate(Starlette(routes=[*routes, *common], exception_handlers=handlers), service)


def unsupported(path: str, message: str) -> Route:
    """A route of another kind of model: its requests are answered with 404 and this message."""

    async def refuse(request: HttpRequest) -> Response:
        raise ApiError(404, message)

    return Route(path, refuse, methods=["POST"])


def model_entry(service: HttpService) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "assay",
        "max_model_len": service.max_length,
    }
