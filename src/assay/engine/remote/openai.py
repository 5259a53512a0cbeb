"""The engine `openai`: answers of an OpenAI-compatible endpoint, for evaluations and chats.

The endpoint takes messages or text and returns text. A table of texts (`assay.text.messages.TextTable`) stands between
the ids of requests and completions and the texts of the endpoint. There are no weights and no log-probabilities, so
this engine cannot train.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from assay.config import OpenAIConfig
from assay.endpoint import Endpoint, EndpointError, Usage
from assay.engine.base import (
    UNKNOWN_LENGTH,
    Capabilities,
    EngineInfo,
    Request,
    RequestError,
    TokenChunk,
    WeightSource,
)
from assay.engine.client import SentRequest, ServerEngine
from assay.engine.sequence import display_name, unknown_handle
from assay.types import Completion, Finish, Message, UserError

NO_WEIGHTS = "engine openai has no weights and no log-probabilities: it is for assay eval and assay chat"


class Texts(Protocol):
    """What ids stand for; see `assay.text.messages.TextTable`."""

    def completion_ids(self, text: str, tokens: int = 1) -> list[int]: ...

    def text(self, ids: Sequence[int]) -> str: ...

    def messages(self, ids: Sequence[int]) -> list[Message]: ...


class OpenAIEngine(ServerEngine):
    """Every sample is a request of its own; a request whose retries are exhausted fails."""

    def __init__(self, model: str, settings: OpenAIConfig, texts: Texts) -> None:
        self.model, self.settings, self.texts = model, settings, texts
        self.endpoint = Endpoint(settings, "openai")
        self.loop = self.endpoint.loop
        self.path = "/chat/completions" if settings.api == "chat" else "/completions"
        capabilities = Capabilities(truncated_logprobs=False)
        self.info = EngineInfo(0, UNKNOWN_LENGTH, settings.max_concurrent, torch.float32, capabilities)
        self.sent = set()

    @property
    def usage(self) -> Usage:
        """Requests and tokens so far."""
        return self.endpoint.usage

    # -- the interface

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        raise UserError(NO_WEIGHTS)

    def update_weights(self, source: WeightSource, version: int) -> None:
        raise UserError(NO_WEIGHTS)

    def close(self) -> None:
        for sent in list(self.sent):
            sent.fail(EndpointError("the engine was closed"))
            self.loop.post(sent.cancel)
        self.endpoint.close()

    # -- the event loop: these run in its thread

    def serve(self, requests: Sequence[SentRequest]) -> None:
        for sent in requests:
            if problem := self._problem(sent.request, sent.id):
                sent.fail(RequestError({sent.id: problem}))
                continue
            sent.tasks = {sample: asyncio.ensure_future(self._serve(sent, sample)) for sample in sent.unfinished}

    def _problem(self, request: Request, request_id: int) -> str:
        """Why a request cannot be served; empty if it can."""
        name = display_name(request, request_id)
        if request.continues is not None:
            return str(unknown_handle(request, request_id))
        if problem := request.params.problem():
            return f"{name}: {problem}"
        if request.params.forbidden_token_ids or request.params.stop_token_ids:
            return f"{name}: an endpoint has no token ids: leave out stop_token_ids and forbidden_token_ids"
        return "" if request.prompt_ids else f"{name}: the prompt is empty"

    async def _serve(self, sent: SentRequest, sample: int) -> None:
        try:
            request = sent.request
            body = self._body(request, sample)
            if request.stream:
                completion = await self._streamed(sent, sample, body)
            else:
                completion = self._completion(await self.endpoint.post(self.path, body), request.params.stop)
            sent.finish(sample, completion, streamed=request.stream)
        except UserError as error:
            sent.fail(RequestError({sent.id: f"{display_name(sent.request, sent.id)}: {error}"}))
        except Exception as error:  # a bug: the client raises it
            sent.fail(error)

    def _body(self, request: Request, sample: int) -> dict[str, Any]:
        params, ids = request.params, request.prompt_ids
        chat = self.settings.api == "chat"
        body: dict[str, Any] = {"model": self.model, "temperature": params.temperature}
        body |= {"messages": self.texts.messages(ids)} if chat else {"prompt": self.texts.text(ids)}
        body[self.settings.length_field] = params.max_new_tokens
        optional = {
            "top_p": params.top_p if params.top_p < 1 else None,
            "top_k": params.top_k or None,
            "min_p": params.min_p or None,
            "min_tokens": params.min_new_tokens or None,
            "stop": list(params.stop) or None,
            "seed": sample_seed(request.seed, sample) if self.settings.seeds else None,
        }
        return body | {name: value for name, value in optional.items() if value is not None}

    def _completion(self, answer: dict[str, Any], stops: Sequence[str]) -> Completion:
        choice = self._choice(answer)
        text = self._text(choice, "message") + stopped_by(choice, stops)
        return self._made(self.texts.completion_ids(text, self.usage.add(answer) or 1), choice)

    async def _streamed(self, sent: SentRequest, sample: int, body: dict[str, Any]) -> Completion:
        """Request an answer and put a `TokenChunk` for every part of it."""
        ids: list[int] = []
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}

        def put(text: str, tokens: int = 1) -> None:
            new = self.texts.completion_ids(text, tokens)
            ids.extend(new)
            sent.put(TokenChunk(sent.id, sample, new, [math.nan] * len(new)))

        def receive(part: dict[str, Any]) -> None:
            if part.get("usage"):
                usage.update(part)
            if not part.get("choices"):
                return  # the last part has the token counts only
            choice = self._choice(part)
            last.update({key: value for key, value in choice.items() if value is not None})
            if text := self._text(choice, "delta"):
                put(text)

        await self.endpoint.stream(self.path, body | {"stream_options": {"include_usage": True}}, receive)
        if not last:
            raise self.endpoint.garbage(self.path, usage, "valid 'choices'")
        tokens = self.usage.add(usage)
        if stop := stopped_by(last, sent.request.params.stop):
            put(stop)
        if (missing := max(tokens or 1, 1) - len(ids)) > 0:
            put("", missing)  # as many ids as the endpoint counted tokens
        return self._made(list(ids), last)

    def _choice(self, answer: dict[str, Any]) -> dict[str, Any]:
        choices = answer.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise self.endpoint.garbage(self.path, answer, "valid 'choices'")
        return choices[0]

    def _text(self, choice: dict[str, Any], field: str) -> str:
        """The text of a choice; `field` has it in answers of chat endpoints."""
        source = choice.get(field) or {} if self.settings.api == "chat" else choice
        text = source.get("content" if self.settings.api == "chat" else "text") if isinstance(source, dict) else 0
        if not isinstance(text, str | None):
            raise self.endpoint.garbage(self.path, choice, "text")
        return text or ""

    def _made(self, ids: list[int], choice: dict[str, Any]) -> Completion:
        if choice.get("finish_reason") == "content_filter":
            raise EndpointError(f"the content filter of {self.endpoint.url} withheld the answer")
        finish = Finish.LENGTH if choice.get("finish_reason") == "length" else Finish.STOP
        return Completion(ids, [math.nan] * len(ids), [math.nan] * len(ids), finish)


def stopped_by(choice: dict[str, Any], stops: Sequence[str]) -> str:
    """The stop string that ended an answer, which endpoints remove from it, if the endpoint reports it (vLLM)."""
    reason = choice.get("stop_reason")
    return reason if isinstance(reason, str) and reason in stops else ""


def sample_seed(seed: int, sample: int) -> int:
    """A non-negative 32-bit seed for one sample of a request, as all endpoints accept it."""
    digest = hashlib.blake2b(f"{seed}|{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
