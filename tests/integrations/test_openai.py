"""The engine `openai`, against a stub and against a server of `assay serve`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from serve_parts import NAME, renderer, serving, tiny_model
from stepped import Stepped
from stub_endpoint import Fault, StubEndpoint, message, stub_endpoint

from assay.config import OpenAIConfig
from assay.engine import Failed, Finished, Request, RequestError, SamplingParams, TokenChunk, make_engine
from assay.engine.client import connect, generate, run_sync
from assay.integrations.openai import OpenAIEngine, sample_seed
from assay.system import openai_client as client_module
from assay.text.render import MessageRenderer
from assay.types import Finish, Prompt, UserError

PARAMS = SamplingParams(max_new_tokens=20, temperature=0.5)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "FIRST_WAIT_S", 0.01)


def last_word(body: dict[str, Any]) -> str:
    text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return f"you said {text.split()[-1]}"


def ask(engine: OpenAIEngine, text: str, params: SamplingParams = PARAMS, **more: Any) -> Request:
    style = "chat" if engine.settings.api == "chat" else "raw"
    prompt = Prompt("p", ({"role": "user", "content": text},))
    ids = MessageRenderer(style=style, template=None if style == "chat" else "{question}").prompt_ids(prompt)
    return Request(ids, params, seed=7, name=text, **more)


@contextmanager
def connected(
    *faults: Fault, reply: Any = last_word, url: str = "", **settings: Any
) -> Iterator[tuple[StubEndpoint, OpenAIEngine]]:
    with stub_endpoint(reply, faults=faults) as server:
        config = OpenAIConfig(**{"url": url or server.url, "timeout_s": 20, "retries": 2} | settings)
        engine = OpenAIEngine("m", config)
        try:
            yield server, engine
            assert server.problems == []
        finally:
            engine.close()


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_answers_have_the_text_and_the_token_count_of_the_endpoint(api: str) -> None:
    with connected(api=api) as (server, engine):
        requests = [ask(engine, f"number {index}", SamplingParams(n=2, max_new_tokens=9)) for index in range(5)]
        completions = generate(engine, requests)
        texts = [[one.text for one in samples] for samples in completions]
        assert texts == [[f"you said {index}"] * 2 for index in range(5)]
        assert all(
            one.length == 4 and not one.token_ids and one.finish is Finish.STOP
            for samples in completions
            for one in samples
        )
        assert all(body["max_tokens"] == 9 and body["temperature"] == 1.0 for body in server.requests)
        assert (engine.usage.requests, engine.usage.prompt_tokens, engine.usage.completion_tokens) == (10, 100, 40)


def test_only_parameters_that_are_set_are_sent() -> None:
    with connected() as (server, engine):
        generate(engine, [ask(engine, "a")])
        assert server.requests[0].keys() == {"model", "messages", "temperature", "max_tokens"}
    params = SamplingParams(top_k=3, top_p=0.9, min_p=0.1, min_new_tokens=2, stop=("x",), max_new_tokens=4)
    with connected(seeds=True, length_field="max_completion_tokens") as (server, engine):
        generate(engine, [ask(engine, "a", params)])
        sent = server.requests[0]
        assert (sent["top_k"], sent["top_p"], sent["min_p"], sent["min_tokens"], sent["stop"]) == (
            3,
            0.9,
            0.1,
            2,
            ["x"],
        )
        assert sent["max_completion_tokens"] == 4 and "max_tokens" not in sent and sent["seed"] == sample_seed(7, 0)


def test_seeds_differ_between_samples_and_fit_32_bits() -> None:
    seeds = {sample_seed(seed, sample) for seed in (-(2**63), 0, 2**63 - 1) for sample in range(8)}
    assert len(seeds) == 24 and all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_streams_arrive_in_parts_that_make_up_the_completion(api: str) -> None:
    with connected(api=api) as (_, engine):
        running = Stepped(engine)
        request_id = running.add(ask(engine, "hello world", stream=True))
        events = []
        while not events or not isinstance(events[-1], Finished):
            events += running.step()
        chunks = [event for event in events if isinstance(event, TokenChunk)]
        assert [chunk.token_ids for chunk in chunks] == [["you"], [" said"], [" world"]]
        finished = events[-1]
        assert isinstance(finished, Finished) and finished.request_id == request_id
        assert finished.completion.text == "you said world"
        assert finished.completion.length == engine.usage.completion_tokens == 4


def test_a_length_limit_and_a_stop_string_are_reported() -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        cut = {"text": "to be", "finish_reason": "length"}
        return cut if "stop" not in body else {"text": "to", "stop_reason": " be"}

    with connected(reply=reply) as (_, engine):
        stop = SamplingParams(max_new_tokens=4, stop=(" be",))
        (cut,), (stopped,) = generate(engine, [ask(engine, "a"), ask(engine, "b", stop)])
        assert cut.finish is Finish.LENGTH
        assert stopped.finish is Finish.STOP and stopped.text == "to be"


def test_a_failed_request_leaves_the_others_alone() -> None:
    def reply(body: dict[str, Any]) -> Any:
        return Fault(400, message("too long")) if "bad" in last_word(body) else last_word(body)

    with connected(reply=reply) as (_, engine):
        requests = [ask(engine, text) for text in ("one", "bad", "three")]
        client = connect(engine)

        async def ask_all() -> list[Any]:
            futures = [future for request in requests for future in client.submit(request)]
            return await asyncio.gather(*futures, return_exceptions=True)

        first, failed, last = run_sync(ask_all(), client)
        assert isinstance(failed, RequestError) and "request 'bad'" in str(failed) and "too long" in str(failed)
        assert [one.text for one in (first, last)] == ["you said one", "you said three"]
        with pytest.raises(RequestError, match="too long"):
            generate(engine, requests)


def test_answers_of_another_form_and_withheld_answers_fail_the_request() -> None:
    expected = r"is openai.url an OpenAI-compatible endpoint\?"
    for choices in ([], [{"message": {"content": 3}}], "x", [1]):
        with connected(Fault(content={"choices": choices})) as (_, engine), pytest.raises(RequestError, match=expected):
            generate(engine, [ask(engine, "a")])
    withheld = {"text": "", "finish_reason": "content_filter"}
    with connected(reply=lambda body: withheld) as (_, engine), pytest.raises(RequestError, match="filter"):
        generate(engine, [ask(engine, "a")])


def test_invalid_requests_fail_without_being_sent() -> None:
    with connected() as (server, engine):
        running, valid = Stepped(engine), ask(engine, "a")
        for request, problem in (
            (replace(valid, params=SamplingParams(n=0)), "samples"),
            (replace(valid, params=SamplingParams(forbidden_token_ids=(1,))), "token ids"),
            (replace(valid, continues=3), "handle"),
            (replace(valid, prompt_ids=[]), "empty"),
        ):
            running.add(request)
            (event,) = running.step()
            assert isinstance(event, Failed) and problem in event.error
        assert not server.requests


def test_an_aborted_request_yields_no_event() -> None:
    ready = threading.Event()

    def reply(body: dict[str, Any]) -> str:
        if "slow" in last_word(body):
            ready.wait(10)
        return last_word(body)

    with connected(reply=reply) as (_, engine):
        running = Stepped(engine)
        slow, fast = running.add(ask(engine, "slow")), running.add(ask(engine, "fast"))
        assert [event.request_id for event in running.step()] == [fast]
        running.abort([slow])
        assert running.step() == [] and not engine.load.running
        ready.set()


def test_it_has_no_weights() -> None:
    with connected() as (_, engine):
        capabilities = engine.info.capabilities
        assert not any(getattr(capabilities, name) for name in capabilities.__dataclass_fields__)
        for call in (lambda: engine.update_weights(None, 0), lambda: engine.score([[1, 2]])):  # type: ignore[arg-type]
            with pytest.raises(UserError, match="no weights"):
                call()
    with pytest.raises(UserError, match="no weights"):
        make_engine("openai", None, device="cpu", dtype=None)  # type: ignore[arg-type]


def test_answers_of_assay_serve_are_those_of_its_engine() -> None:
    question, params = "What is 2 + 2?", SamplingParams(max_new_tokens=12, temperature=0.0)
    text = renderer()
    with serving() as server, connected(url=server.url) as (_, engine):
        engine.model = NAME
        ids = text.prompt_ids(Prompt("p", ({"role": "user", "content": question},)))
        local = make_engine("native", tiny_model(), device="cpu", dtype=server.engine.info.dtype)
        stops = SamplingParams(max_new_tokens=12, temperature=0.0, stop_token_ids=text.stop_token_ids)
        ((expected,),) = generate(local, [Request(ids, stops, seed=0)])
        ((whole,),) = generate(engine, [ask(engine, question, params)])
        ((streamed,),) = generate(engine, [ask(engine, question, params, stream=True)])
        for completion in (whole, streamed):
            assert completion.text == text.decode(expected.token_ids)
            assert completion.finish is expected.finish
        assert whole.length == len(expected.token_ids)
        assert engine.usage.prompt_tokens == 2 * len(ids)
        with pytest.raises(RequestError, match="check the name of the model"):
            engine.model = "another"
            generate(engine, [ask(engine, question, params)])
