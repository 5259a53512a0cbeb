"""Engines behind HTTP servers: requests, events, aborts, failures, retries, weight updates and ranks."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from echo_parts import (
    PARAMS,
    POLICY,
    EchoEngine,
    WholeRequests,
    echo,
    engine_on,
    expected,
    options,
    requests,
    tokens,
    until,
)
from http_parts import Answer, small_server
from processes import start

from assay.config import RemoteEngineConfig
from assay.engine.base import Request, RequestError
from assay.engine.client import EngineClient, connect, generate, run_sync
from assay.engine.remote import http
from assay.engine.remote.base import Ranks
from assay.engine.sequence import Job
from assay.mesh import Mesh, init_mesh
from assay.types import Completion, UserError


def outcomes(engine: EchoEngine, wanted: Sequence[Request]) -> list[list[Any]]:
    """For each request, the completions or errors of its samples."""
    client = connect(engine)

    async def ask() -> list[list[Any]]:
        submitted = [client.submit(one) for one in wanted]
        return [await asyncio.gather(*futures, return_exceptions=True) for futures in submitted]

    return run_sync(ask(), client)


@contextmanager
def sampling(engine: EchoEngine, wanted: Sequence[Request]) -> Iterator[list[list[Completion]]]:
    """Generate in another thread; the results are there when the block has ended."""
    results: list[list[Completion]] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, wanted)
        until(lambda: engine.load.running > 0 or running.done())
        yield results
        results += running.result(30)


@pytest.mark.parametrize("kind", [EchoEngine, WholeRequests])
def test_every_sample_of_every_request_gets_its_own_tokens(kind: type[EchoEngine]) -> None:
    with engine_on(echo, echo, kind=kind) as (engine, servers):
        wanted = requests(40)
        groups = generate(engine, wanted)
        assert tokens(groups) == [[expected(one.prompt_ids, one.seed, n) for n in range(3)] for one in wanted]
        assert groups[0][0].engine_logprobs == [-0.5, -0.5]
        assert engine.load.running == 0
        sent = [server.paths().count("/generate") for server in servers]
        assert sum(sent) == (120 if kind is EchoEngine else 40) and min(sent) > 0


def held() -> tuple[Callable[[str, Any], Answer], threading.Event]:
    """Answers of a server that samples when the event is set."""
    release = threading.Event()

    def slow(path: str, body: Any) -> Answer:
        if path == "/generate":
            release.wait(30)
        return echo(path, body)

    return slow, release


def test_requests_are_spread_over_servers_by_unfinished_samples() -> None:
    slow, release = held()
    with engine_on(slow, slow) as (engine, servers):
        with sampling(engine, requests(6)) as results:
            until(lambda: sum(server.paths().count("/generate") for server in servers) == 18)
            assert [server.paths().count("/generate") for server in servers] == [9, 9] and engine.load.running == 18
            release.set()
        assert [len(group) for group in results] == [3] * 6


def test_at_most_max_batch_requests_per_server_are_sent_at_once() -> None:
    slow, release = held()
    with engine_on(slow, options=options(max_batch=4)) as (engine, servers):
        with sampling(engine, requests(10)) as results:
            until(lambda: servers[0].paths().count("/generate") == 4)
            time.sleep(0.05)
            assert servers[0].paths().count("/generate") == 4
            release.set()
        assert [len(group) for group in results] == [3] * 10


def test_an_invalid_request_fails_alone() -> None:
    with engine_on() as (engine, servers):
        bad = [Request([], PARAMS, 0), Request([1] * 32, PARAMS, 0), replace(requests(1)[0], continues=3)]
        *failed, served = outcomes(engine, [*bad, requests(1)[0]])
        assert all(isinstance(one, RequestError) for group in failed for one in group)
        assert "the prompt is empty" in str(failed[0][0])
        assert tokens([served]) == [[expected([1], 0, sample) for sample in range(3)]]
        assert servers[0].paths().count("/generate") == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": {"message": "prompt too long"}}), "answered 400: prompt too long"),
        ((200, b"<html>hello</html>"), "something that is not JSON ('<html>hello</html>')"),
        ((200, {"other": 1}), "returned no completions"),
        ((200, {"completions": [{"ids": [61], "logprobs": [-1.0]}]}), "1 tokens, where 1 to 4 of the vocabulary"),
        ((200, {"completions": [{"ids": [1, 2, 3, 4, 5], "logprobs": [-1.0] * 5}]}), "5 tokens, where 1 to 4"),
        ((200, {"completions": [{"ids": [1, 2], "logprobs": [-1.0]}]}), "not one log-probability for each of 2 tokens"),
        ((200, {"completions": [{"ids": [1], "logprobs": [float("nan")]}]}), "the log-probability nan"),
        ((200, {"completions": [{"ids": [1], "logprobs": [-(10**400)]}]}), "the log-probability -10000"),
    ],
)
def test_a_refused_request_or_garbage_becomes_one_line_and_other_requests_are_served(
    answer: Answer, message: str
) -> None:
    def sometimes(path: str, body: Any) -> Answer:
        return answer if path == "/generate" and body["seed"] == 7 else echo(path, body)

    with engine_on(sometimes) as (engine, _):
        first, (error, *_), last = outcomes(engine, requests(3))
        assert isinstance(error, RequestError) and message in str(error) and "\n" not in str(error)
        assert [len(tokens([group])[0]) for group in (first, last)] == [3, 3]


def test_a_busy_server_is_asked_again() -> None:
    refused = [3]

    def busy(path: str, body: Any) -> Answer:
        if path == "/generate" and refused[0]:
            refused[0] -= 1
            return 429, {"error": "full"}
        return echo(path, body)

    with engine_on(busy) as (engine, _):
        assert len(generate(engine, requests(1))[0]) == 3 and refused == [0]


def test_a_server_that_is_not_reachable_is_reported_when_the_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSES_S", (0.05, 0.1))
    with small_server(echo) as server:
        url = server.url
    with pytest.raises(UserError, match=f"the echo server {url} is not reachable"):
        EchoEngine(POLICY, RemoteEngineConfig(urls=[url]), **options())


def test_cancelled_futures_close_the_connection() -> None:
    release = threading.Event()

    def slow(path: str, body: Any) -> Answer:
        if path == "/generate" and body["seed"] == 0:
            release.wait(30)
        return echo(path, body)

    async def cancel(client: EngineClient) -> list[Completion]:
        stuck, other = (client.submit(one) for one in requests(2))
        while servers[0].paths().count("/generate") < 6:
            await asyncio.sleep(0.01)
        for future in (*stuck, other[1]):
            future.cancel()
        return [await other[0], await other[2]]

    with engine_on(slow) as (engine, servers):
        client = connect(engine)
        assert tokens([run_sync(cancel(client), client)]) == [[expected([2], 7, sample) for sample in (0, 2)]]
        assert engine.load.running == 0
        until(lambda: engine.servers[0].running == 0)  # although the server has not answered
        release.set()


def test_ctrl_c_ends_the_work_and_closes_the_connections() -> None:
    release, released = threading.Event(), list[bool]()

    def never(path: str, body: Any) -> Answer:
        if path == "/generate":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # as the kernel does for Ctrl-C
            released.append(release.wait(30))
        return echo(path, body)

    with engine_on(never) as (engine, _):
        with pytest.raises(KeyboardInterrupt):
            generate(engine, requests(1, n=1))
        assert engine.load.running == 0
        until(lambda: engine.servers[0].running == 0)
        release.set()
        until(lambda: released == [True])


def test_a_blocking_call_in_the_thread_of_the_servers_is_refused() -> None:
    async def blocking() -> None:
        engine.update_weights(POLICY, 1)

    with engine_on() as (engine, _):
        with pytest.raises(RuntimeError, match="would wait for itself"):
            engine.loop.call(blocking())
        engine.update_weights(POLICY, 1)


def test_closing_the_engine_fails_requests_that_run() -> None:
    def slow(path: str, body: Any) -> Answer:
        if path == "/generate":
            time.sleep(1)
        return echo(path, body)

    with engine_on(slow) as (engine, servers), ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, requests(1))
        until(lambda: "/generate" in servers[0].paths())
        engine.close()
        with pytest.raises(UserError, match="the engine was closed"):
            running.result(10)
        with pytest.raises(UserError, match="the engine was closed"):
            generate(engine, requests(1))


def test_weights_are_published_to_all_servers_and_the_version_follows() -> None:
    with engine_on(echo, echo) as (engine, servers):
        assert engine.info.version == -1
        engine.update_weights(POLICY, 4)
        names = [name for name, _ in POLICY.weights()]
        for server in servers:
            assert server.requests[-1] == ("/weights", {"names": names, "version": 4})
        assert engine.info.version == 4
        assert generate(engine, requests(1))[0][0].version == 4


def test_an_update_while_requests_run_or_on_a_failing_server_is_refused() -> None:
    def failing(path: str, body: Any) -> Answer:
        if path == "/generate":
            time.sleep(0.5)
        return (500, {"detail": "no space"}) if path == "/weights" else echo(path, body)

    with engine_on(failing) as (engine, _):
        with pytest.raises(UserError, match="answered 500: no space"):
            engine.update_weights(POLICY, 1)
        assert engine.info.version == -1
        with sampling(engine, requests(1)):
            with pytest.raises(UserError, match="while requests are running"):
                engine.update_weights(POLICY, 1)
            with pytest.raises(UserError, match="while requests are running"):
                engine.sleep()


def test_requests_wake_the_servers() -> None:
    with engine_on(options=options(sleep_while_training=True)) as (engine, servers):
        engine.sleep()
        engine.reset_prefix_cache()
        assert len(generate(engine, requests(1))[0]) == 3
        paths = [path for path in servers[0].paths() if path in ("/sleep", "/wake")]
        assert paths == ["/sleep", "/wake"]
    with engine_on() as (engine, servers):
        engine.sleep()  # only with sleep_while_training
        assert "/sleep" not in servers[0].paths()


def test_the_api_key_is_sent_and_streaming_requests_yield_their_tokens_as_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_OF_ECHO", "secret")
    with engine_on(api_key_env="KEY_OF_ECHO") as (engine, servers):
        client, chunks = connect(engine), dict[int, list[int]]()

        async def stream() -> None:
            request = replace(requests(1)[0], stream=True)
            await asyncio.gather(*client.submit(request, lambda chunk: chunks.update({chunk.sample: chunk.token_ids})))

        run_sync(stream(), client)
        assert chunks == {sample: expected([1], 0, sample) for sample in range(3)}
        assert all(one["authorization"] == "Bearer secret" for one in servers[0].headers)


def test_a_bug_in_a_backend_is_raised() -> None:
    class Broken(EchoEngine):
        def _parse(self, response: Any, job: Job, version: int) -> list[Completion]:
            raise ZeroDivisionError("bug")

    with engine_on(kind=Broken) as (engine, _), pytest.raises(ZeroDivisionError, match="bug"):
        generate(engine, requests(1))


def test_errors_of_a_caller_are_raised() -> None:
    def report(finished: int, tokens: int) -> None:
        raise ZeroDivisionError("of the progress bar")

    with engine_on() as (engine, _):
        with pytest.raises(TypeError):
            generate(engine, [Request(["text"], PARAMS, 0)])  # type: ignore[list-item]
        with pytest.raises(ZeroDivisionError, match="of the progress bar"):
            generate(engine, requests(1), report)
        assert engine.load.running == 0


def refuse() -> None:
    raise UserError("no server")


def share(mesh: Mesh, folder: Path) -> None:
    mesh = init_mesh(2)
    ranks = Ranks(mesh.tp_group)
    rank = dist.get_rank()
    assert (ranks.leads, ranks.is_main) == (rank % 2 == 0, rank == 0)
    assert ranks.from_leader(lambda: f"from {rank}") == f"from {rank // 2 * 2}"
    waited: list[int] = []
    assert ranks.on_main(lambda: f"from {rank}", meanwhile=lambda: waited.append(rank)) == "from 0"
    assert waited == [rank] * (rank > 0)
    for call in (ranks.on_main, ranks.from_leader, ranks.on_leaders):
        with pytest.raises(UserError, match="no server"):
            call(refuse)
    with pytest.raises(UserError, match="rank 2 alone"):  # of one leader, on all ranks
        ranks.on_leaders(lambda: refuse_alone(rank))
    ranks.barrier()
    (folder / str(rank)).touch()


def refuse_alone(rank: int) -> None:
    if rank == 2:
        raise UserError("rank 2 alone")


def test_results_and_errors_reach_all_ranks(tmp_path: Path) -> None:
    start(4, share, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3"}
