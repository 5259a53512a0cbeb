"""The engine `openai`: answers of an OpenAI-compatible endpoint, for evaluations and chats.

The endpoint takes messages or text and returns text: the `prompt_ids` of a request are messages and texts (see
`assay.text.render`), and completions have a text instead of token ids. There are no weights and no
log-probabilities, so this engine cannot train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from assay.config import OpenAIConfig
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
from assay.system.openai_client import Endpoint, EndpointError, Usage
from assay.types import Completion, Finish, Message, UserError

NO_WEIGHTS = "engine openai has no weights and no log-probabilities: it is for assay eval and assay chat"


def refuse_weights(*args: object, **options: object) -> NoReturn:
    raise UserError(NO_WEIGHTS)


class OpenAIEngine(ServerEngine):
    """Every sample is a request of its own; a request whose retries are exhausted fails."""

    def __init__(self, model: str, settings: OpenAIConfig) -> None:
        self.model, self.settings = model, settings
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
        refuse_weights()

    def update_weights(self, source: WeightSource, version: int) -> None:
        refuse_weights()

    def close(self) -> None:
        self.end_requests()
        self.endpoint.close()

    # -- the event loop: these run in its thread

    def serve(self, requests: Sequence[SentRequest]) -> None:
        for sent in requests:
            if problem := self._problem(sent.request, sent.id):
                sent.fail(RequestError({sent.id: problem}))
                continue
            for sample in sent.unfinished:
                sent.start([sample], partial(self._serve, sent, sample))

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
        request = sent.request
        body = self._body(request, sample)
        if request.stream:
            completion = await self._streamed(sent, sample, body)
        else:
            completion = self._completion(await self.endpoint.post(self.path, body), request.params.stop)
        sent.finish(sample, completion, streamed=request.stream)

    def _body(self, request: Request, sample: int) -> dict[str, Any]:
        params, prompt = request.params, list[Any](request.prompt_ids)
        body: dict[str, Any] = {"model": self.model, "temperature": params.temperature}
        body |= {"messages": conversation(prompt)} if self.settings.api == "chat" else {"prompt": "".join(prompt)}
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
        return self._made(text, self.usage.add(answer) or 1, choice)

    async def _streamed(self, sent: SentRequest, sample: int, body: dict[str, Any]) -> Completion:
        """Request an answer, and pass on every part of it."""
        texts: list[Any] = []
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}

        def put(text: str) -> None:
            texts.append(text)
            sent.put(TokenChunk(sent.id, sample, texts[-1:], []))

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
        return self._made("".join(texts), tokens or max(len(texts), 1), last)

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

    def _made(self, text: str, tokens: int, choice: dict[str, Any]) -> Completion:
        if choice.get("finish_reason") == "content_filter":
            raise EndpointError(f"the content filter of {self.endpoint.url} withheld the answer")
        finish = Finish.LENGTH if choice.get("finish_reason") == "length" else Finish.STOP
        return Completion([], [], [], finish, text=text, text_tokens=tokens)


def conversation(sequence: Sequence[Message | str]) -> list[Message]:
    """The messages of a sequence; texts in it, which are completions, are messages of the assistant."""
    return [{"role": "assistant", "content": part} if isinstance(part, str) else part for part in sequence]


def stopped_by(choice: dict[str, Any], stops: Sequence[str]) -> str:
    """The stop string that ended an answer, which endpoints remove from it, if the endpoint reports it (vLLM)."""
    reason = choice.get("stop_reason")
    return reason if isinstance(reason, str) and reason in stops else ""


def sample_seed(seed: int, sample: int) -> int:
    """A non-negative 32-bit seed for one sample of a request, as all endpoints accept it."""
    digest = hashlib.blake2b(f"{seed}|{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
