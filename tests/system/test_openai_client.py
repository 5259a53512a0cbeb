"""The client of OpenAI-compatible endpoints: retries, rate limits, concurrency, keys and errors."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any

import pytest
from stub_endpoint import Fault, StubEndpoint, message, raw_server, stub_endpoint

from assay.config import EndpointConfig
from assay.system import openai_client as module
from assay.system.openai_client import Endpoint, EndpointError, base_url, key_of, retry_after
from assay.types import UserError

BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
CHAT = "/chat/completions"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)


@contextmanager
def connected(
    *faults: Fault, key: str = "", reply: Any = "hi", **settings: Any
) -> Iterator[tuple[StubEndpoint, Endpoint]]:
    with stub_endpoint(lambda body: reply, key, faults) as server:
        client = Endpoint(EndpointConfig(**{"url": server.url, "timeout_s": 5, "retries": 2} | settings), "openai")
        try:
            yield server, client
        finally:
            client.close()


def ask(client: Endpoint, body: dict[str, Any] = BODY) -> dict[str, Any]:
    return client.loop.call(client.post(CHAT, body))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(429, message("slow down")),
        Fault(503, b"<html>overloaded</html>"),
        Fault(408, message("late")),
        Fault(drop=True),
        Fault(drop=True, content={"choices": []}),
        Fault(content={}, delay_s=0.6),
    ],
    ids=["429", "503", "408", "lost connection", "broken answer", "timeout"],
)
def test_faults_that_may_pass_are_retried(fault: Fault) -> None:
    with connected(fault, fault, timeout_s=0.3) as (server, client):
        assert ask(client)["choices"][0]["message"]["content"] == "hi"
        assert len(server.requests) == 3 and client.usage.retries == 2


def test_a_timeout_is_told_apart_from_other_errors() -> None:
    with connected(Fault(content={}, delay_s=0.3), timeout_s=0.1, retries=0) as (_, client):
        with pytest.raises(EndpointError, match=r"no answer within 0.1 s: raise openai.timeout_s") as error:
            ask(client)
        assert error.value.timed_out


def test_retries_end_with_an_error_that_names_the_cause() -> None:
    with connected(*[Fault(429, message("slow down"))] * 3) as (server, client):
        with pytest.raises(
            EndpointError, match=r"answered 429: slow down; lower openai.max_concurrent .*3 attempts"
        ) as e:
            ask(client)
        assert len(server.requests) == 3 and e.value.status == 429 and not e.value.timed_out


NOT_JSON = r"no JSON object: is openai.url an OpenAI-compatible endpoint\?"
FINAL = (
    (Fault(400, message("no")), "rejects this request"),
    (Fault(401, message("no")), "openai.api_key_env"),
    (Fault(403, message("no")), "openai.api_key_env"),
    (Fault(404, message("no")), "name of the model"),
    (Fault(429, {"error": {"message": "exceeded", "code": "insufficient_quota"}}), "no credit left"),
    (Fault(429, message("daily limit"), {"retry-after": "86400"}), "wait for 86,400 s: try again later"),
    *((Fault(content=content), NOT_JSON) for content in (b"<html>hello</html>", b"[1]", b"")),
    (Fault(content={"error": {"message": "upstream died"}}), "upstream died"),
)


def test_requests_that_cannot_succeed_are_sent_once() -> None:
    for fault, advice in FINAL:
        with connected(fault) as (server, client):
            with pytest.raises(EndpointError, match=advice) as error:
                ask(client)
            assert len(server.requests) == 1 and "\n" not in str(error.value) and not error.value.timed_out


def test_after_a_refusal_no_other_request_is_sent() -> None:
    with connected(*[Fault(401, message("no"))] * 9, max_concurrent=1) as (server, client):

        async def ask_all() -> list[Any]:
            return await asyncio.gather(*(client.post(CHAT, BODY) for _ in range(9)), return_exceptions=True)

        assert all(isinstance(one, EndpointError) and one.refused for one in client.loop.call(ask_all()))
        assert len(server.requests) == 1


def test_retry_after_pauses_all_requests() -> None:
    with connected(Fault(429, message("wait"), {"retry-after": "1"}), max_concurrent=1) as (server, client):

        async def ask_both() -> None:
            await asyncio.gather(client.post(CHAT, BODY), client.post(CHAT, BODY))

        client.loop.call(ask_both())
        first, *later = server.times
        assert len(later) == 2 and min(later) - first >= 1.0


def test_retry_after_is_read_in_all_its_forms() -> None:
    assert retry_after({"retry-after": "2.5"}) == 2.5
    assert retry_after({"retry-after-ms": "1500", "retry-after": "9"}) == 1.5
    assert 50 < retry_after({"retry-after": formatdate(time.time() + 60, usegmt=True)}) <= 60
    assert retry_after({"retry-after": formatdate(time.time() - 60, usegmt=True)}) == 0
    assert retry_after({}) == retry_after({"retry-after": "soon"}) == 0
    there = time.time() + 7200  # the clock of the endpoint, or this one, is wrong
    dates = {"date": formatdate(there, usegmt=True), "retry-after": formatdate(there + 60, usegmt=True)}
    assert retry_after(dates) == 60


def test_concurrency_is_limited() -> None:
    with connected(reply=Fault(content={"choices": []}, delay_s=0.05), max_concurrent=3) as (server, client):

        async def ask_all() -> None:
            await asyncio.gather(*(client.post(CHAT, BODY) for _ in range(12)))

        client.loop.call(ask_all())
        assert len(server.requests) == 12 and server.most_running == 3


def test_an_endpoint_that_is_not_running() -> None:
    client = Endpoint(EndpointConfig(url="http://127.0.0.1:9", retries=1), "judge")
    with pytest.raises(EndpointError, match=r"not reachable .*is it running, and is judge.url right\? \(2 attempts\)"):
        ask(client)
    client.close()


def test_a_stream_that_breaks_off_is_not_repeated() -> None:
    begun = Fault(drop=True, content=b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
    parts: list[Any] = []
    with connected(begun) as (server, client):
        with pytest.raises(EndpointError, match="the answer broke off"):
            client.loop.call(client.stream(CHAT, BODY, parts.append))
        assert len(server.requests) == len(parts) == 1


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ("content-encoding: gzip\r\n", "content encoding 'gzip'"),
        ("", "the answer broke off: .* no answer within 0.3 s"),
    ],
    ids=["compressed", "a line that never ends"],
)
def test_streams_are_limited_in_size_and_time(headers: str, error: str) -> None:
    begin = f'HTTP/1.1 200 OK\r\n{headers}content-length: 9999\r\n\r\ndata: {{"a": 1}}\n\ndata: {{'.encode()
    with raw_server(begin, 0.05, b" ") as (url, _):
        client = Endpoint(EndpointConfig(url=url, timeout_s=0.3, retries=0), "openai")
        with pytest.raises(EndpointError, match=error):
            client.loop.call(client.stream(CHAT, BODY, lambda part: None))
        client.close()


def test_extra_fields_are_sent() -> None:
    with connected(extra={"note": "x", "temperature": 0.5}) as (server, client):
        ask(client, {**BODY, "temperature": 1.0})
        assert server.requests[0]["note"] == "x" and server.requests[0]["temperature"] == 0.5


def test_usage_is_counted() -> None:
    with connected(Fault(500, b"")) as (_, client):
        assert client.usage.add(ask(client)) == 2
        assert str(client.usage) == "1 request, 10 prompt tokens, 2 completion tokens, 1 repeated"
        assert client.usage.add({"choices": []}) is client.usage.add({"usage": [1]}) is None
        assert client.usage.uncounted == 2


SECRET = "sk-this-is-secret-0123456789"


def test_the_key_is_sent_and_appears_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    with caplog.at_level(0), connected(key=SECRET, api_key_env="MY_KEY") as (_, client):
        assert ask(client)["choices"]
        assert SECRET not in repr(client)
    # The stub repeats the wrong key in its message, as OpenAI does in part.
    with caplog.at_level(0), connected(key="another", api_key_env="MY_KEY") as (_, client):
        with pytest.raises(EndpointError, match=r"provided: Bearer \*\*\*") as error:
            ask(client)
        assert SECRET not in "".join(traceback.format_exception(error.value))
    faults = [Fault(500, SECRET.encode()), Fault(content=f'"{SECRET}"'.encode())]
    faults += [Fault(content={"error": {"message": SECRET}}), Fault(429, message(SECRET))]
    for fault in faults:
        with caplog.at_level(0), connected(fault, api_key_env="MY_KEY", retries=0) as (_, client):
            with pytest.raises(EndpointError, match=r"\*\*\*") as error:
                ask(client)
            assert SECRET not in "".join(traceback.format_exception(error.value))
    assert SECRET not in caplog.text


def test_settings_never_hold_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSET_KEY", raising=False)
    with pytest.raises(UserError, match="the environment variable UNSET_KEY is not set"):
        key_of("UNSET_KEY", "openai")
    with pytest.raises(UserError) as error:
        key_of(SECRET, "openai")  # the key itself, by mistake
    assert SECRET not in str(error.value) and "openai.api_key_env" in str(error.value)
    with pytest.raises(UserError, match=r"openai.api_key_env") as error:
        base_url("https://user:pa55@host/v1", "openai")
    assert "pa55" not in str(error.value)
    with pytest.raises(UserError, match=r"openai.api_key_env"):
        base_url(f"https://host/v1?key={SECRET}", "openai")


def test_urls_end_with_the_version_of_the_api() -> None:
    for given in ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1/"):
        assert base_url(given, "openai") == "http://127.0.0.1:8000/v1"
    assert base_url("https://host/api/v1beta/openai", "openai") == "https://host/api/v1beta/openai"
    with pytest.raises(UserError, match=r"no endpoint: set judge.url"):
        base_url("", "judge")
