"""Run the server: keys, signals, requests that finish before it ends, and processes that handle HTTP in front of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from serve_parts import byte_tokenizer, command, metric_of, renderer, save_folder, serving, tiny_model

from assay.config import HttpConfig
from assay.engine import NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.base import RequestError
from assay.engine.client import EngineClient, LocalClient, cancelled
from assay.server.server import PipeEngine, PipeServer, listeners_of, nothing
from assay.server.service import api_key_of
from assay.server.trainer_api import EngineControl
from assay.system import http_server
from assay.system.http_server import bind
from assay.system.spawn import LoopPipe
from assay.types import UserError


def test_only_loopback_may_be_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="set an API key with --api-key-env"):
        api_key_of(HttpConfig(host="0.0.0.0"))
    with pytest.raises(UserError, match="TEST_KEY is not set"):
        api_key_of(HttpConfig(api_key_env="TEST_KEY"))
    monkeypatch.setenv("TEST_KEY", "secret")
    assert api_key_of(HttpConfig(host="0.0.0.0", api_key_env="TEST_KEY")) == "secret"


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
