"""Run the server: keys, signals, requests that finish before it ends, and processes that handle HTTP in front of it.

What routes share: counters, access, limits, bodies, running samples, requests that start together. See test_app.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve_parts import (
    NAME,
    RunningServer,
    byte_tokenizer,
    command,
    metric_of,
    renderer,
    save_folder,
    serving,
    tiny_model,
)
from waiting import until

from assay.config import HttpConfig
from assay.engine import NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.base import EngineLoad, RequestError
from assay.engine.client import EngineClient, LocalClient, cancelled
from assay.server import service
from assay.server.protocol import ApiError
from assay.server.server import PipeEngine, PipeServer, listeners_of, nothing
from assay.server.trainer_api import EngineControl
from assay.system import http_server
from assay.system.http_server import bind
from assay.system.spawn import LoopPipe
from assay.types import UserError


def test_only_loopback_may_be_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="set an API key with --api-key-env"):
        service.api_key_of(HttpConfig(host="0.0.0.0"))
    with pytest.raises(UserError, match="TEST_KEY is not set"):
        service.api_key_of(HttpConfig(api_key_env="TEST_KEY"))
    monkeypatch.setenv("TEST_KEY", "secret")
    assert service.api_key_of(HttpConfig(host="0.0.0.0", api_key_env="TEST_KEY")) == "secret"


def test_connections_without_headers_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.2)
    with serving() as server:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
            assert connection.recv(100) == b""
        assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.slow
def test_running_requests_finish_before_the_server_ends(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(0, 512), tmp_path)
    with command(str(folder), "--name", "tiny") as (process, url):
        body = {"prompt": "Hi", "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_second_signal_stops_immediately(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(0, 4096), tmp_path)
    with command(str(folder)) as (process, url):
        body = {"prompt": "Hi", "max_tokens": 4000, "n": 64, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = answer.iter_lines()  # the connection is closed when this is collected
            next(lines)
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None and "stopping" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


@contextmanager
def pipe_pair() -> Iterator[tuple[LoopPipe, LoopPipe]]:
    (one_in, other_out), (other_in, one_out) = os.pipe(), os.pipe()
    pipes = [
        LoopPipe(os.fdopen(a, "rb", 0), os.fdopen(b, "wb", 0)) for a, b in ((one_in, one_out), (other_in, other_out))
    ]
    yield pipes[0], pipes[1]
    for pipe in pipes:
        pipe.close()


async def through_pipes(engine: NativeEngine, work: Callable[[EngineClient, PipeEngine], Awaitable[None]]) -> None:
    """Run `work` with a client on the other side of a pipe."""
    inner = LocalClient(engine, strict=False)
    with inner.driven_in_thread(), pipe_pair() as (near, far):
        await near.open()
        await far.open()
        server, remote = PipeServer(inner, EngineControl(engine), near), PipeEngine(far, engine.info)
        outer = LocalClient(remote, strict=False)
        tasks = [asyncio.ensure_future(one) for one in (server.run(nothing), remote.run(outer, nothing))]
        await asyncio.wait_for(work(outer, remote), timeout=60)
        assert not server._futures
        await cancelled(tasks)


def test_a_client_behind_a_pipe_gets_the_same_and_its_cancellations_reach_the_engine() -> None:
    engine = make_engine("native", tiny_model(0, 2048), device="cpu", dtype=torch.float32)
    assert isinstance(engine, NativeEngine)
    params = SamplingParams(n=3, max_new_tokens=6)
    requests = [Request([1, 2, number], params, seed=number, stream=True) for number in range(4)]
    expected = generate(engine, requests)

    async def work(client: EngineClient, remote: PipeEngine) -> None:
        chunks: list[list[int]] = [[] for _ in range(3)]
        futures = [client.submit(requests[0], lambda chunk: chunks[chunk.sample].extend(chunk.token_ids))]
        futures += [client.submit(request) for request in requests[1:]]
        assert [list(await asyncio.gather(*own)) for own in futures] == expected
        assert chunks == [one.token_ids for one in expected[0]]
        with pytest.raises(RequestError, match="outside the vocabulary"):
            await client.submit(Request([10**6], params, seed=0))[1]
        assert await remote.call("fingerprint") == engine.fingerprint()
        with pytest.raises(UserError, match="cannot read the weights"):
            await remote.call("update_weights", {"transport": "folder", "path": "/nowhere"}, 1)
        first, *others = client.submit(Request([1], SamplingParams(n=3, max_new_tokens=2000), seed=0))
        first.cancel()  # one sample, then the whole request
        while engine.load.running != 2:
            await asyncio.sleep(0.001)
        for future in others:
            future.cancel()
        while engine.load.running or engine.load.kv_blocks_used:
            await asyncio.sleep(0.001)

    asyncio.run(through_pipes(engine, work))


def test_a_port_is_shared_only_by_the_frontends() -> None:
    listeners = listeners_of(bind("127.0.0.1", 0), 3)
    (port,) = {one.getsockname()[1] for one in listeners}
    for one in listeners:
        one.listen()
    with pytest.raises(UserError, match="cannot listen"):
        bind("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port)):
        pass
    for one in listeners:
        one.close()


@pytest.mark.slow
def test_answers_and_counters_of_two_frontends_and_the_end_if_one_is_killed(tmp_path: Path) -> None:
    folder = save_folder(tiny_model(), tmp_path)
    prompts = [f"prompt {number}" for number in range(24)]
    engine = make_engine("native", tiny_model(), device="cpu", dtype=torch.float32)
    params = SamplingParams(temperature=0, max_new_tokens=16, stop_token_ids=renderer().stop_token_ids)
    done = generate(engine, [Request(byte_tokenizer().encode(prompt), params, 0) for prompt in prompts])
    expected = [renderer().decode(one.token_ids) for (one,) in done]
    with command(str(folder), "--http.frontends", "2", "--http.allow_updates", "true") as (process, url):

        def ask(prompt: str) -> str:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": 16}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(ask, prompts)) == expected
        assert metric_of(url, 'assay_requests_total{endpoint="completions",status="200"}') == len(prompts)
        assert metric_of(url, "assay_generated_tokens_total") == sum(len(one.token_ids) for (one,) in done)
        assert httpx.get(f"{url}/engine/fingerprint", timeout=60).json()["fingerprint"] == engine.fingerprint()
        missing = httpx.post(f"{url}/engine/weights", json={"path": "/nowhere"}, timeout=60)
        assert missing.status_code == 400 and "has no weights" in missing.json()["error"]["message"]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert process.wait(30) == 2 and process.stderr is not None
        assert "a process that handles HTTP has ended (killed by SIGKILL)" in process.stderr.read()


# What routes share


HEAD = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def raw(server: RunningServer, data: bytes, wait_s: float = 30) -> bytes:
    """The response to these bytes, until the server closes the connection."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        connection.sendall(data)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
            if b"\r\n\r\n" in received and b"content-length" in received.lower() and received.endswith(b"}"):
                break
        return received


def post(server: RunningServer, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60, **options)


def is_well(server: RunningServer) -> bool:
    answer = post(server, {"prompt": "Hi", "max_tokens": 2})
    return answer.status_code == 200 and httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_hostile_bodies_do_not_harm_the_server(server: RunningServer) -> None:
    url = f"{server.url}/v1/completions"
    headers = {"Content-Type": "application/json"}
    for body, status in [
        (b"[" * 200_000, 400),
        (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413),
        (json.dumps({"prompt": "a" * 100_000}).encode(), 400),
    ]:
        answer = httpx.post(url, content=body, headers=headers, timeout=60)
        assert answer.status_code == status and answer.json()["error"]["message"], body[:40]
    assert is_well(server)


def test_a_body_in_chunks_is_limited_too(server: RunningServer) -> None:
    chunk = b"10000\r\n" + b"a" * 65536 + b"\r\n"
    answer = raw(server, f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 70)
    assert b" 413 " in answer.splitlines()[0]
    assert is_well(server)


def test_other_content_types_paths_and_methods_are_rejected(server: RunningServer) -> None:
    assert httpx.post(f"{server.url}/v1/completions", data={"prompt": "a"}).status_code == 415
    for method, path, status in [("GET", "/v1/completions", 405), ("POST", "/nope", 404), ("POST", "/health", 405)]:
        answer = httpx.request(method, f"{server.url}{path}")
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_slow_body_is_given_up() -> None:
    with serving(http={"body_timeout_s": 0.3}) as server:
        answer = raw(server, f"{HEAD}Content-Length: 100\r\n\r\n{{".encode())
        assert b" 408 " in answer.splitlines()[0] and b"0.3 seconds" in answer
        assert is_well(server)


def test_overload_is_answered_with_429_and_ends(server: RunningServer) -> None:
    with serving(tiny_model(0, 4096), max_length=4096, max_batch=2, http={"queue": 1}) as server:
        long = {"prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{server.url}/v1/completions", json=long):
            assert post(server, {"prompt": "Hi", "n": 2, "max_tokens": 1}).status_code == 200
            answer = post(server, {"prompt": "Hi", "n": 3, "max_tokens": 1})
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        until(lambda: post(server, {"prompt": "Hi", "n": 3, "max_tokens": 1}).status_code == 200, 30)


def test_foreign_host_names_are_rejected(server: RunningServer) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Host": "evil.example"})
    assert answer.status_code == 403 and "evil.example" in answer.json()["error"]["message"]
    for name in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
        assert httpx.get(f"{server.url}/v1/models", headers={"Host": name}).status_code == 200


def test_a_key_is_required_everywhere_but_for_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "secret")
    with serving(http={"api_key_env": "TEST_KEY"}) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/engine/info"):
            assert httpx.get(f"{server.url}{path}").status_code == 401
            assert httpx.get(f"{server.url}{path}", headers={"Authorization": "Bearer secre"}).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=right).json()["data"][0]["id"] == NAME
        assert post(server, {"prompt": "Hi", "max_tokens": 2}, headers=right).status_code == 200


def test_web_pages_may_use_a_server_only_with_its_key(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = {"Origin": "https://chat.example"}
    asks = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    url = "/v1/chat/completions"
    assert httpx.options(f"{server.url}{url}", headers=asks).status_code == 403
    monkeypatch.setenv("TEST_KEY", "secret")
    with serving(http={"api_key_env": "TEST_KEY"}) as protected:
        preflight = httpx.options(f"{protected.url}{url}", headers=asks)
        assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        local = httpx.options(
            f"{protected.url}{url}", headers=asks | {"Access-Control-Request-Private-Network": "true"}
        )
        assert local.status_code == 200 and local.headers["access-control-allow-private-network"] == "true"
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": stream}
            answer = post(protected, body, url, headers=origin | {"Authorization": "Bearer secret"})
            assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "*"
        answer = post(protected, body, url, headers=origin)
        assert answer.status_code == 401 and answer.headers["access-control-allow-origin"] == "*"


SHORT, LONG = SamplingParams(n=2, max_new_tokens=5), SamplingParams(n=2, max_new_tokens=2000)


@pytest.fixture
def engine() -> NativeEngine:
    engine = make_engine("native", tiny_model(0, 2048), device="cpu", dtype=torch.float32)
    assert isinstance(engine, NativeEngine)
    return engine


def run_with(engine: NativeEngine, work: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def run() -> None:
        client = LocalClient(engine, strict=False)
        with client.driven_in_thread():
            await asyncio.wait_for(work(client), timeout=60)

    asyncio.run(run())


async def until_idle(engine: NativeEngine) -> None:
    while engine.load.running or engine.load.waiting or engine.load.kv_blocks_used:
        await asyncio.sleep(0.001)


def test_a_cancelled_handler_of_a_connected_client_is_not_taken_for_a_disconnect(engine: NativeEngine) -> None:
    async def handler(client: EngineClient) -> None:
        async with service.until_disconnect({}, asyncio.Event().wait):
            with service.RunningSamples(client, [Request([1], LONG, seed=0)]) as samples:
                await samples.events()

    async def stop(client: EngineClient) -> None:
        task = asyncio.ensure_future(handler(client))
        while not engine.load.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(engine)

    run_with(engine, stop)


def test_a_batch_reaches_an_idle_engine_together_and_in_order(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, step = list[list[int]](), engine.step

    def recorded(wait: bool = True) -> list[Any]:
        batches.append([request.seed for _, request in engine.incoming])
        return step(wait)

    monkeypatch.setattr(engine, "step", recorded)

    async def submit(client: EngineClient) -> None:
        joined = service.RequestBatches()

        async def handler(index: int) -> None:
            await joined.join("a", index, 3)
            with service.RunningSamples(client, [Request([1, index], SHORT, seed=index)]) as samples:
                await samples.completions()

        await asyncio.gather(*map(handler, (2, 0, 1)))

    run_with(engine, submit)
    assert batches[0] == [0, 1, 2]


def test_a_duplicate_in_a_batch_is_rejected_and_an_incomplete_batch_starts_after_a_while() -> None:
    async def run() -> None:
        batches, started = service.RequestBatches(timeout_s=0.05), list[int]()

        async def handler(index: int) -> None:
            await batches.join("a", index, 3)
            started.append(index)

        waiting = [asyncio.ensure_future(handler(index)) for index in (1, 0)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="already waiting") as raised:
            await batches.join("a", 0, 3)
        assert raised.value.status == 409 and not started
        await asyncio.gather(*waiting)
        assert started == [0, 1]
        await handler(2)  # too late: it starts alone

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def values(text: str) -> dict[str, float]:
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def test_any_process_reports_the_sums() -> None:
    shared = [0.0] * 2 * service.SIZE
    first, second = service.Metrics(shared, 0), service.Metrics(shared, 1)
    for metrics, seconds in ((first, 0.02), (second, 0.02), (second, 7.0), (second, 1e6)):
        metrics.observe(service.FIRST_TOKEN, seconds)
        metrics.count_request("completions", 200)
    second.count_request("chat", 429)
    second.count_request("chat", 599)
    first.add(service.ACTIVE, 3)
    text = first.render(EngineLoad(running=2, waiting=1, kv_blocks_used=5, kv_blocks=9), version=4)
    assert text == second.render(EngineLoad(running=2, waiting=1, kv_blocks_used=5, kv_blocks=9), version=4)
    reported = values(text)
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all({name.partition("{")[0], name.partition("{")[0].rpartition("_")[0]} & typed for name in reported)
    assert reported['assay_requests_total{endpoint="completions",status="200"}'] == 4
    assert reported['assay_requests_total{endpoint="chat",status="429"}'] == 1
    assert reported['assay_requests_total{endpoint="chat",status="500"}'] == 1
    name = "assay_time_to_first_token_seconds"
    buckets = {"0.01": 0, "0.025": 2, "5.0": 2, "10.0": 3, "+Inf": 4}
    assert {le: reported[f'{name}_bucket{{le="{le}"}}'] for le in buckets} == buckets
    assert reported[f"{name}_count"] == 4 and reported[f"{name}_sum"] == 1e6 + 7.04
    assert first.active == second.active == reported["assay_active_samples"] == 3
    assert reported["assay_kv_blocks_used"] == 5 and reported["assay_weights_version"] == 4
