"""The routes of the server: the OpenAI API, health and metrics.

`answers` has the formats of answers, `trainer_api` those for our trainer,
and `classify` those of a classification model.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from assay.engine.base import TokenScores
from assay.server.answers import DONE, AnswerWriter, StreamWriter
from assay.server.protocol import ApiError, CompletionRequest, Fields, check_model, is_token_list, parse_messages
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
    failure,
    json_response,
    until_disconnect,
)
from assay.server.trainer_api import trainer_routes
from assay.system.http_server import is_same_origin
from assay.types import Completion, Finish, UserError

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


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


class GenerationResponse(Response):
    """Generates answers, whole or as a stream. The requests are aborted when the client disconnects."""

    def __init__(self, service: Service, generation: CompletionRequest) -> None:
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
        if self.generation.prompts_only:
            completions = [Completion([], [], [], Finish.LENGTH)] * self.generation.samples
        writer = AnswerWriter(self.generation, service.renderer, service.texts, service.model)
        scores = await self._scores(completions)
        if self.generation.scores_prompts:  # long prompts: other requests are served meanwhile
            body = await asyncio.to_thread(writer.body, completions, scores)
        else:
            body = writer.body(completions, scores)
        service.metrics.add(SAMPLED_TOKENS, writer.sampled_tokens)
        await Response(body, media_type=JSON)(scope, receive, send)

    async def _scores(self, completions: Sequence[Completion]) -> Sequence[TokenScores | None]:
        """The scores of prompts, and the alternatives to each token, from one more pass over prompts and answers."""
        generation = self.generation
        if not (generation.top_logprobs or generation.scores_prompts):
            return [None] * len(completions)
        prompts = [prompt for prompt in generation.prompts for _ in range(generation.params.n)]
        pairs = zip(prompts, completions, strict=True)
        sequences = [[*prompt, *completion.token_ids] for prompt, completion in pairs]
        starts = [1 if generation.scores_prompts else len(prompt) for prompt in prompts]
        count, temperature = generation.alternatives, generation.params.temperature or 1.0
        try:
            scores = await self.service.call("top_logprobs", sequences, starts, count, temperature)
        except UserError as error:  # the engine does not compute them
            raise ApiError(400, str(error)) from None
        except Exception as error:
            raise failure(error) from None
        if not all(math.isfinite(sum(score.logprobs)) for score in scores):  # JSON has no such numbers
            raise ApiError(500, "a token of the prompt or of the answer has a log-probability that is not finite")
        return scores

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
        *tokenizer_routes(service),
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
    app = Gate(Starlette(routes=[*routes, *common], exception_handlers=handlers), service)
    if not service.api_key:
        return app
    # A server with a key may be used by web pages of any origin: browsers add no keys by themselves.
    # Browsers ask first if a page of the internet may use a server in a private network.
    allowed: Any = {"allow_origins": ["*"], "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    return CORSMiddleware(app, **allowed, allow_private_network=True)


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


# The tokenizer, with the endpoints and formats of vLLM: encode, decode, special tokens and template

OF_TEXTS = {"prompt", "add_special_tokens"}
OF_CHATS = {"messages", "add_generation_prompt"}
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def tokenizer_routes(service: Service) -> list[Route]:
    renderer, parser = service.renderer, service.parser
    tokenizer = renderer.tokenizer

    def token_ids(tree: Mapping[str, Any]) -> tuple[list[int], bool]:
        """The token ids of a text or a chat, and whether to return their texts as well."""
        fields = Fields(tree)
        has_messages = tree.get("messages") is not None
        fields.check_known((OF_CHATS if has_messages else OF_TEXTS) | {"model", "return_token_strs"})
        check_model(fields, service.model)
        with_texts = fields.get("return_token_strs", bool, False)
        if has_messages:
            if not fields.get("add_generation_prompt", bool, True):
                raise ApiError(400, "'add_generation_prompt' must be true: remove it", "add_generation_prompt")
            return parser.chat_ids(parse_messages(tree["messages"])), with_texts
        text = fields.get("prompt", str)
        if text is None:
            raise ApiError(400, "give either 'prompt', a text, or 'messages'", "prompt")
        special = fields.get("add_special_tokens", bool, True)
        return renderer.text_ids(text) if special else tokenizer.encode(text), with_texts

    def given_ids(tree: Mapping[str, Any]) -> list[int]:
        fields = Fields(tree)
        fields.check_known({"model", "tokens"})
        check_model(fields, service.model)
        ids: Any = tree.get("tokens")
        limit = parser.info.vocab_size
        if ids != [] and not (is_token_list(ids) and min(ids) >= 0 and max(ids) < limit):
            raise ApiError(400, f"'tokens' must be a list of token ids below {limit}", "tokens")
        return ids

    async def tokenize(request: HttpRequest) -> Response:
        ids, with_texts = await service.parse(request, token_ids)
        texts = [service.texts(token) for token in ids] if with_texts else None
        return json_response(
            {"count": len(ids), "max_model_len": service.max_length, "tokens": ids, "token_strs": texts}
        )

    async def detokenize(request: HttpRequest) -> Response:
        ids = await service.parse(request, given_ids)
        return json_response({"prompt": tokenizer.decode(ids, skip_special=False)})

    async def tokenizer_info(request: HttpRequest) -> Response:
        special = {name: getattr(tokenizer.hf, name, None) for name in SPECIAL_TOKENS}
        template = {"chat_template": renderer.chat_template if parser.has_chat else None}
        sizes = {"model_max_length": service.max_length, "vocab_size": tokenizer.vocab_size}
        return json_response({"tokenizer_class": type(tokenizer.hf).__name__, **special, **template, **sizes})

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokenizer_info),
    ]
