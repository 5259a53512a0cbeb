"""Formats of answers: log-probabilities, chunks, and the end of a stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve_parts import NAME, byte_tokenizer, renderer

from assay.engine.base import SamplingParams, TokenChunk
from assay.server.app import DONE, AnswerWriter, StreamWriter
from assay.server.protocol import Generation
from assay.server.service import TokenTexts
from assay.types import Completion, Finish

TEXT = 'né "木"\n'
IDS = byte_tokenizer().encode(TEXT)
LOGPROBS = [-0.5 * number for number in range(len(IDS))]
COMPLETION = Completion([*IDS, byte_tokenizer().eos_ids[0]], [*LOGPROBS, -9.0], [*LOGPROBS, -9.0], Finish.STOP)


def generation(**values: Any) -> Generation:
    return Generation([[1, 2, 3]], SamplingParams(), seed=0, **values)


def parsed(text: str) -> list[Any]:
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


def test_log_probabilities_of_completions_have_offsets_and_those_of_chats_bytes() -> None:
    writers = [
        AnswerWriter(generation(logprobs=True, chat=chat), renderer(), TokenTexts(renderer()), NAME)
        for chat in (False, True)
    ]
    completion, chat = (json.loads(writer.body([COMPLETION], [None]))["choices"][0]["logprobs"] for writer in writers)
    assert completion["tokens"][0] == "n" and completion["text_offset"][:2] == [0, 1]
    assert completion["token_logprobs"] == COMPLETION.engine_logprobs
    first, second = chat["content"][:2]
    assert first["token"] == "n" and first["bytes"] == [ord("n")] and second["bytes"] is None  # a part of a character


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("detailed", [False, True])
def test_chunks_join_to_the_text(chat: bool, detailed: bool) -> None:
    request = generation(chat=chat, logprobs=detailed, token_ids=detailed, include_usage=True, stream=True)
    writer = StreamWriter(request, renderer(), TokenTexts(renderer()), NAME)
    chunks = parsed(writer.opening())
    for token, logprob in zip(COMPLETION.token_ids, COMPLETION.engine_logprobs, strict=True):
        chunks += parsed(writer.chunk(0, TokenChunk(0, 0, [token], [logprob])))
    chunks += parsed(writer.chunk(0, COMPLETION))
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert "".join(texts) == TEXT and "\ufffd" not in "".join(texts)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk" if chat else "text_completion"}
    assert all(chunk["usage"] is None for chunk in chunks) and len({chunk["id"] for chunk in chunks}) == 1
    if detailed:
        assert [one for choice in choices for one in choice.get("token_ids", [])] == COMPLETION.token_ids
    closing = writer.closing()
    assert closing.endswith(DONE)
    (last,) = parsed(closing.removesuffix(DONE).decode())
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == len(COMPLETION.token_ids)
