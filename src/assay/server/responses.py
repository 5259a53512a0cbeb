"""Answers in the formats of the OpenAI API: whole bodies, and chunks of server-sent events.

A server may send 10,000s of chunks per second, so the parts of a chunk that do not change are formatted once.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from assay.engine.base import TokenChunk
from assay.server.protocol import Generation
from assay.text import Renderer
from assay.text.stream import REPLACEMENT, TextStream, text_before_stop
from assay.types import Completion

DONE = b"data: [DONE]\n\n"
TOKEN_TEXTS = 1 << 16  # cached texts of tokens


class TokenTexts:
    """The texts of single tokens, for log-probabilities."""

    def __init__(self, renderer: Renderer) -> None:
        tokenizer = renderer.tokenizer
        self.of = lru_cache(TOKEN_TEXTS)(lambda token: tokenizer.decode([token], skip_special=False))


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
        tops = [dict(reversed(own)) for own in alternatives]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def chat_logprobs(
    texts: Sequence[str], logprobs: Sequence[float], alternatives: Alternatives | None = None
) -> dict[str, Any]:
    """In the format of /v1/chat/completions."""
    tops = alternatives if alternatives is not None else [()] * len(texts)
    content = [
        token_entry(text, logprob) | {"top_logprobs": [token_entry(*one) for one in own]}
        for text, logprob, own in zip(texts, logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def token_entry(text: str, logprob: float) -> dict[str, Any]:
    """Tokens with a part of a character have no bytes."""
    return {"token": text, "logprob": logprob, "bytes": None if REPLACEMENT in text else list(text.encode())}


class AnswerWriter:
    """Formats the answers to one request."""

    def __init__(self, generation: Generation, renderer: Renderer, texts: TokenTexts, model: str) -> None:
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

    def body(self, completions: Mapping[int, Completion], likely: Mapping[int, Likely]) -> bytes:
        """The whole response. `completions` and `likely`: by index of the choice."""
        self.sampled_tokens = sum(len(completion.token_ids) for completion in completions.values())
        choices = [self._choice(index, completions[index], likely.get(index)) for index in sorted(completions)]
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
        texts, alternatives = [self.texts.of(token) for token in token_ids], None
        if likely is not None:
            # The sampled token has its reported log-probability: another pass rounds it differently.
            alternatives = [
                [(self.texts.of(one), logprob if one == token else value) for one, value in own]
                for token, logprob, own in zip(token_ids, logprobs, likely, strict=True)
            ]
        if self.generation.chat:
            return chat_logprobs(texts, logprobs, alternatives)
        return completion_logprobs(texts, logprobs, offset, alternatives)


class StreamWriter(AnswerWriter):
    """Formats the answers to one request as server-sent events."""

    def __init__(self, generation: Generation, renderer: Renderer, texts: TokenTexts, model: str) -> None:
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


def error_event(body: bytes) -> bytes:
    """An error after the first chunk of a stream."""
    return b"data: " + body + b"\n\n" + DONE
