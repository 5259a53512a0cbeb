"""The OpenAI API: formats of answers; used with its official client, and by many concurrent clients."""

from __future__ import annotations

import asyncio
import functools
import json
import resource
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import torch
from serve_parts import NAME, RunningServer, byte_tokenizer, metric_of, renderer, serving, tiny_model, until

from assay.engine import Request, SamplingParams, generate, make_engine
from assay.engine.base import TokenChunk
from assay.server.answers import DONE, AnswerWriter, StreamWriter
from assay.server.protocol import CompletionRequest
from assay.server.service import token_texts
from assay.types import Completion, Finish

PROMPT = "Ann has 7 coins."
MESSAGES: Any = [{"role": "user", "content": "How many coins?"}]


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.api, api_key="none", max_retries=0)


def greedy(reference: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities by transformers, without a cache."""
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            last = reference(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(last.argmax()))
            logprobs.append(float(last.max()))
            if ids[-1] in renderer().stop_token_ids:
                break
    return ids[len(prompt) :], logprobs


def text_of(ids: Sequence[int]) -> str:
    return renderer().decode(ids)


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == NAME and client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")


def test_greedy_completions_are_those_of_transformers(client: openai.OpenAI, reference: Any) -> None:
    ids = byte_tokenizer().encode(PROMPT)
    expected, logprobs = greedy(reference, ids, 24)
    answer = client.completions.create(model=NAME, prompt=[PROMPT], max_tokens=24, temperature=0, logprobs=0)
    (choice,) = answer.choices
    assert choice.text == text_of(expected) and choice.finish_reason in ("length", "stop")
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), len(expected))
    same = client.completions.create(model=NAME, prompt=ids, max_tokens=24, temperature=0)
    assert same.choices[0].text == choice.text


def test_greedy_chat_is_that_of_transformers(client: openai.OpenAI, reference: Any) -> None:
    prompt = byte_tokenizer().hf.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    expected, logprobs = greedy(reference, prompt, 16)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_completion_tokens=16, temperature=0, logprobs=True
    )
    (choice,) = answer.choices
    assert choice.message.content == text_of(expected) and choice.message.role == "assistant"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(logprobs, abs=1e-4)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)


def top_five(reference: Any, ids: Sequence[int], start: int, temperature: float) -> list[list[tuple[str, float]]]:
    """The five most likely tokens by transformers at each position from `start` on."""
    texts = token_texts(renderer())
    with torch.no_grad():
        rows = (reference(torch.tensor([list(ids)])).logits[0, start - 1 : -1] / temperature).log_softmax(-1)
    best = [row.topk(5) for row in rows]
    return [[(texts(int(t)), float(v)) for t, v in zip(one.indices, one.values, strict=True)] for one in best]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_top_logprobs_of_a_chat_are_those_of_transformers(
    client: openai.OpenAI, reference: Any, temperature: float
) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_completion_tokens=9, temperature=temperature, seed=1, n=2, logprobs=True,
        top_logprobs=5, extra_body={"return_token_ids": True},
    )  # fmt: skip
    for choice in answer.choices:
        ids, prompt = choice.token_ids, choice.prompt_token_ids  # type: ignore[attr-defined]
        expected = top_five(reference, [*prompt, *ids], len(prompt), temperature or 1.0)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(ids) == len(expected)
        for own, likely in zip(choice.logprobs.content, expected, strict=True):
            given = [(one.token, one.logprob) for one in own.top_logprobs]
            assert [text for text, _ in given] == [text for text, _ in likely]
            assert [value for _, value in given] == pytest.approx([value for _, value in likely], abs=1e-4)
            if not temperature:
                assert given[0] == (own.token, own.logprob)


def test_top_logprobs_of_completions_are_a_map_per_token(client: openai.OpenAI, reference: Any) -> None:
    ids = byte_tokenizer().encode(PROMPT)
    expected, _ = greedy(reference, ids, 6)
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=5)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    # Bytes that are no characters have the same text; the most likely of them counts.
    likely = [dict(reversed(own)) for own in top_five(reference, [*ids, *expected], len(ids), 1.0)]
    assert [own.keys() for own in logprobs.top_logprobs] == [own.keys() for own in likely]
    for own, wanted in zip(logprobs.top_logprobs, likely, strict=True):
        assert own == pytest.approx(wanted, abs=1e-4)


def test_lists_of_prompts_have_one_choice_per_prompt_and_sample(client: openai.OpenAI) -> None:
    prompts = ["one", "two", "three"]
    together = client.completions.create(model=NAME, prompt=prompts, n=2, max_tokens=8, seed=3)
    assert [choice.index for choice in together.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone = client.completions.create(model=NAME, prompt=prompt, n=2, max_tokens=8, seed=3)
        assert [c.text for c in alone.choices] == [c.text for c in together.choices[2 * number : 2 * number + 2]]


def test_samples_are_those_of_the_engine(client: openai.OpenAI, server: RunningServer) -> None:
    params = SamplingParams(
        n=3, max_new_tokens=20, temperature=0.7, top_p=0.8, stop_token_ids=renderer().stop_token_ids
    )

    engine = make_engine("native", tiny_model(), device="cpu", dtype=torch.float32)
    ((*expected,),) = generate(engine, [Request(byte_tokenizer().encode(PROMPT), params, seed=5)])
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, n=3, max_tokens=20, temperature=0.7, top_p=0.8, seed=5, logprobs=0,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert choice.token_ids == completion.token_ids and choice.text == text_of(completion.token_ids)  # type: ignore[attr-defined]
        assert choice.logprobs is not None and choice.logprobs.token_logprobs == completion.engine_logprobs


def test_streams_have_the_text_of_whole_answers(client: openai.OpenAI) -> None:
    count = 3
    ask = functools.partial(client.completions.create, model=NAME, prompt=PROMPT, n=count, max_tokens=60, seed=7)
    whole = ask()
    texts, finishes = [""] * count, [""] * count
    usage = None
    for chunk in ask(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not finishes[choice.index], "a chunk after the end"
            texts[choice.index] += choice.text
            finishes[choice.index] = choice.finish_reason or ""
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert any(ord(letter) > 127 for text in texts for letter in text)  # characters of several tokens


def test_chat_streams_have_the_text_of_whole_answers(client: openai.OpenAI) -> None:
    ask = functools.partial(client.chat.completions.create, model=NAME, messages=MESSAGES, max_tokens=40, seed=2)
    whole = ask(logprobs=True).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(stream=True, logprobs=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason and {c.finish_reason for c in chunks[:-1]} == {None}
    logprobs = [one.logprob for chunk in chunks if chunk.logprobs for one in chunk.logprobs.content or []]
    assert whole.logprobs is not None and logprobs == [one.logprob for one in whole.logprobs.content or []]


@pytest.mark.parametrize("stream", [False, True])
def test_answers_end_before_the_stop_string(client: openai.OpenAI, stream: bool) -> None:
    ask = functools.partial(client.completions.create, model=NAME, prompt=PROMPT, max_tokens=60, seed=7)
    full = ask().choices[0].text
    stop = full[20:23]
    assert "\ufffd" not in stop
    if stream:
        chunks = [chunk.choices[0] for chunk in ask(stop=[stop, "never"], stream=True)]
        text, finish = "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason
    else:
        (choice,) = ask(stop=[stop, "never"]).choices
        text, finish = choice.text, choice.finish_reason
    assert text == full[: full.index(stop)] and finish == "stop"


def test_the_end_token_ends_an_answer_and_can_be_ignored(client: openai.OpenAI) -> None:
    ask = functools.partial(client.completions.create, model=NAME, prompt=PROMPT, max_tokens=200, n=8, seed=1)
    reasons = [choice.finish_reason for choice in ask().choices]
    assert "stop" in reasons
    ignoring = ask(extra_body={"ignore_eos": True})
    assert {choice.finish_reason for choice in ignoring.choices} == {"length"}
    assert ignoring.usage is not None and ignoring.usage.completion_tokens == 8 * 200


@contextmanager
def connected(server: RunningServer, body: Any) -> Iterator[socket.socket]:
    """A connection with a request whose response is not read."""
    data = json.dumps(body).encode()
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


def test_a_disconnected_client_frees_its_blocks() -> None:
    with serving(tiny_model(0, 4096), max_length=4096) as server:
        for stream in (False, True):
            body = {"prompt": PROMPT, "max_tokens": 4000, "n": 100, "ignore_eos": True, "stream": stream}
            with connected(server, body):
                until(lambda: metric_of(server.url, "assay_running_sequences") == 100)
                assert metric_of(server.url, "assay_kv_blocks_used") > 0
                assert metric_of(server.url, "assay_active_samples") == 100
            until(lambda: metric_of(server.url, "assay_kv_blocks_used") == 0)
            for name in ("assay_running_sequences", "assay_active_samples"):
                assert metric_of(server.url, name) == 0
        assert 'assay_requests_total{endpoint="completions",status="499"} 2' in httpx.get(f"{server.url}/metrics").text


def test_an_error_of_the_engine_fails_the_requests_in_flight_and_later_ones_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        for stream in (False, True):
            body = {"prompt": PROMPT, "max_tokens": 4, "n": 2, "stream": stream}
            with monkeypatch.context() as patch:
                patch.setattr(server.engine, "_iterate", lambda: 1 / 0)
                answer = httpx.post(f"{server.api}/completions", json=body, timeout=60)
                assert answer.status_code == 500 and "ZeroDivisionError" in answer.json()["error"]["message"]
            assert httpx.post(f"{server.api}/completions", json=body, timeout=60).status_code == 200
        assert metric_of(server.url, "assay_active_samples") == 0


PARAMS = SamplingParams(max_new_tokens=12, stop_token_ids=renderer().stop_token_ids)


async def ask(client: httpx.AsyncClient, prompt: str, seed: int) -> list[int]:
    """The token ids of the answer; every other client asks for a stream."""
    stream = seed % 2 == 0
    fields = {"prompt": prompt, "seed": seed, "max_tokens": 12, "stream": stream, "return_token_ids": True}
    answer = (await client.post("/v1/completions", json=fields)).raise_for_status()
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["token_ids"]
    *lines, last = [line for line in answer.text.splitlines() if line]
    assert last == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert [bool(choice["finish_reason"]) for choice in choices] == [False] * (len(choices) - 1) + [True]
    return [token for choice in choices for token in choice.get("token_ids", [])]


@pytest.mark.parametrize("clients", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_concurrent_requests_get_their_own_answers(clients: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))  # both ends are in this process
    prompts = [f"{number:04d}: {number * number}" for number in range(clients)]
    engine = make_engine("native", tiny_model(), device="cpu", dtype=torch.float32)
    requests = [Request(byte_tokenizer().encode(prompt), PARAMS, seed) for seed, prompt in enumerate(prompts)]
    expected = [one.token_ids for (one,) in generate(engine, requests)]
    assert len(set(map(tuple, expected))) > 0.95 * clients  # so that mixed up answers would be noticed

    async def all_at_once(url: str) -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(ask(client, prompt, seed) for seed, prompt in enumerate(prompts)))

    with serving() as server:
        answers = asyncio.run(all_at_once(server.url))
        wrong = [prompt for prompt, ours, theirs in zip(prompts, answers, expected, strict=True) if ours != theirs]
        assert not wrong, f"{len(wrong)} answers differ, e.g. that to {wrong[0]}"
        until(lambda: metric_of(server.url, "assay_kv_blocks_used") == 0)
        for name in ("assay_active_samples", "assay_running_sequences", "assay_waiting_requests"):
            assert metric_of(server.url, name) == 0
        assert metric_of(server.url, 'assay_requests_total{endpoint="completions",status="200"}') == clients


TEXT = 'né "木"\n'
IDS = byte_tokenizer().encode(TEXT)
LOGPROBS = [-0.5 * number for number in range(len(IDS))]
COMPLETION = Completion([*IDS, byte_tokenizer().eos_ids[0]], [*LOGPROBS, -9.0], [*LOGPROBS, -9.0], Finish.STOP)


def generation(**values: Any) -> CompletionRequest:
    return CompletionRequest([[1, 2, 3]], SamplingParams(), seed=0, **values)


def parsed(text: str) -> list[Any]:
    return [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]


def test_log_probabilities_of_completions_have_offsets_and_those_of_chats_bytes() -> None:
    writers = [
        AnswerWriter(generation(logprobs=True, chat=chat), renderer(), token_texts(renderer()), NAME)
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
    writer = StreamWriter(request, renderer(), token_texts(renderer()), NAME)
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
