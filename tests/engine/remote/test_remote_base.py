"""Engines behind HTTP servers: requests, events, aborts, failures, retries and weight updates."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
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
    steps,
    tokens,
    until,
)
from http_parts import Answer, small_server

from assay.engine.base import Capabilities, Failed, Finished, Request
from assay.engine.client import generate
from assay.engine.sequence import Job
from assay.types import Completion, UserError


@pytest.mark.parametrize("kind", [EchoEngine, WholeRequests])
def test_every_sample_of_every_request_gets_its_own_tokens(kind: type[EchoEngine]) -> None:
    with engine_on(echo, echo, kind=kind) as (engine, servers):
        wanted = requests(40)
        groups = generate(engine, wanted)
        assert tokens(groups) == [[expected(one.prompt_ids, one.seed, n) for n in range(3)] for one in wanted]
        assert groups[0][0].engine_logprobs == [-0.5, -0.5]
        assert engine.step() == [] and engine.step(wait=False) == []
        sent = [server.paths().count("/generate") for server in servers]
        assert sum(sent) == (120 if kind is EchoEngine else 40) and min(sent) > 0


def test_requests_are_spread_over_servers_by_unfinished_samples() -> None:
    release = threading.Event()

    def slow(path: str, body: Any) -> Answer:
        if path == "/generate":
            release.wait(30)
        return echo(path, body)

    with engine_on(slow, slow) as (engine, servers):
        ids = [engine.add(one) for one in requests(6)]
        until(lambda: sum(server.paths().count("/generate") for server in servers) == 18)
        assert [server.paths().count("/generate") for server in servers] == [9, 9]
        release.set()
        finished = [event for event in steps(engine) if isinstance(event, Finished)]
        assert {event.request_id for event in finished} == set(ids) and len(finished) == 18


def test_at_most_max_batch_requests_per_server_are_sent_at_once() -> None:
    release = threading.Event()

    def slow(path: str, body: Any) -> Answer:
        if path == "/generate":
            release.wait(30)
        return echo(path, body)

    with engine_on(slow, options=options(max_batch=4)) as (engine, servers):
        for one in requests(10):
            engine.add(one)
        until(lambda: servers[0].paths().count("/generate") == 4)
        time.sleep(0.05)
        assert servers[0].paths().count("/generate") == 4
        release.set()
        assert sum(isinstance(event, Finished) for event in steps(engine)) == 30


def test_an_invalid_request_fails_alone() -> None:
    with engine_on() as (engine, servers):
        bad = [Request([], PARAMS, 0), Request([1] * 32, PARAMS, 0), replace(requests(1)[0], continues=3)]
        ids = [engine.add(one) for one in (*bad, requests(1)[0])]
        events = list(steps(engine))
        failed = {event.request_id: event.error for event in events if isinstance(event, Failed)}
        assert set(failed) == set(ids[:3]) and "the prompt is empty" in failed[ids[0]]
        assert [event.request_id for event in events if isinstance(event, Finished)] == [ids[3]] * 3
        assert servers[0].paths().count("/generate") == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": {"message": "prompt too long"}}), "answered 400: prompt too long"),
        ((500, {"detail": "out of memory"}), "answered 500: out of memory"),
        ((403, b""), "refused access (403): set vllm.api_key_env"),
        ((200, b"<html>hello</html>"), "something that is not JSON ('<html>hello</html>')"),
        ((200, {"other": 1}), "returned no completions"),
        ((200, {"completions": [{"ids": [61], "logprobs": [-1.0]}]}), "1 tokens, where 1 to 4 of the vocabulary"),
        ((200, {"completions": [{"ids": [1, 2, 3, 4, 5], "logprobs": [-1.0] * 5}]}), "5 tokens, where 1 to 4"),
        ((200, {"completions": [{"ids": [True], "logprobs": [-1.0]}]}), "1 tokens, where 1 to 4 of the vocabulary"),
        ((200, {"completions": [{"ids": [1, 2], "logprobs": [-1.0]}]}), "not one log-probability for each of 2 tokens"),
        ((200, {"completions": [{"ids": [1], "logprobs": [float("nan")]}]}), "the log-probability nan"),
        ((200, {"completions": [{"ids": [1], "logprobs": [0.5]}]}), "the log-probability 0.5"),
        ((200, {"completions": [{"ids": [1], "logprobs": [-(10**400)]}]}), "the log-probability -10000"),
    ],
)
def test_a_refused_request_or_garbage_becomes_one_line_and_other_requests_are_served(
    answer: Answer, message: str
) -> None:
    def sometimes(path: str, body: Any) -> Answer:
        return answer if path == "/generate" and body["seed"] == 7 else echo(path, body)

    with engine_on(sometimes) as (engine, _):
        ids = [engine.add(one) for one in requests(3)]
        events = list(steps(engine))
        failed = [event for event in events if isinstance(event, Failed)]
        assert [event.request_id for event in failed] == [ids[1]]
        assert message in failed[0].error and "\n" not in failed[0].error
        assert sum(isinstance(event, Finished) for event in events) == 6


def test_a_lost_connection_is_retried_on_another_server_with_the_same_seed() -> None:
    with engine_on(echo, echo) as (engine, servers):
        servers[0].drop = True
        wanted = requests(6)
        assert tokens(generate(engine, wanted)) == [
            [expected(one.prompt_ids, one.seed, n) for n in range(3)] for one in wanted
        ]
        assert servers[0].paths().count("/generate") > 0
        until(lambda: all(server.running == 0 for server in engine.servers))


def test_a_dead_server_fails_the_request_with_advice() -> None:
    with engine_on() as (engine, servers):
        servers[0].drop = True
        with pytest.raises(UserError, match=r"echo server http://127\S+ is not reachable \(.*\): start a server there"):
            generate(engine, requests(1))


def test_a_busy_server_is_asked_again() -> None:
    refused = [3]

    def busy(path: str, body: Any) -> Answer:
        if path == "/generate" and refused[0]:
            refused[0] -= 1
            return 429, {"error": "full"}
        return echo(path, body)

    with engine_on(busy) as (engine, _):
        assert len(generate(engine, requests(1))[0]) == 3 and refused == [0]


def test_a_server_that_stays_silent_fails_after_the_timeout() -> None:
    def silent(path: str, body: Any) -> Answer:
        if path == "/generate":
            time.sleep(2)
        return echo(path, body)

    with (
        engine_on(silent, timeout_s=0.2) as (engine, _),
        pytest.raises(UserError, match=r"did not answer within 0.2 s: .* raise vllm.timeout_s"),
    ):
        generate(engine, requests(1, n=1))


def test_a_server_that_is_not_reachable_is_reported_when_the_engine_is_built() -> None:
    with small_server(echo) as server:
        url = server.url
    with pytest.raises(UserError, match=f"the echo server {url} is not reachable"):
        EchoEngine(POLICY, [url], options(), Capabilities())


def test_aborts_close_the_connection_and_drop_the_events() -> None:
    release = threading.Event()

    def slow(path: str, body: Any) -> Answer:
        if path == "/generate" and body["seed"] == 0:
            release.wait(30)
        return echo(path, body)

    with engine_on(slow) as (engine, servers):
        stuck, other = (engine.add(one) for one in requests(2))
        until(lambda: servers[0].paths().count("/generate") == 6)
        engine.abort([stuck, (other, 1), 99, (99, 0)])
        finished = {(event.request_id, event.sample) for event in steps(engine)}
        assert finished == {(other, 0), (other, 2)}
        until(lambda: engine.servers[0].running == 0)  # although the server has not answered
        release.set()


def test_an_abort_from_another_thread_ends_a_waiting_step() -> None:
    def never(path: str, body: Any) -> Answer:
        if path == "/generate":
            time.sleep(3)
        return echo(path, body)

    with engine_on(never) as (engine, _):
        request_id = engine.add(requests(1)[0])
        threading.Timer(0.1, lambda: engine.abort([request_id])).start()
        assert engine.step() == []


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
        engine.add(requests(1)[0])
        with pytest.raises(UserError, match="while requests are running"):
            engine.update_weights(POLICY, 1)
        with pytest.raises(UserError, match="while requests are running"):
            engine.sleep()


def test_a_step_with_requests_wakes_the_servers() -> None:
    with engine_on(options=options(sleep_while_training=True)) as (engine, servers):
        engine.sleep()
        engine.reset_prefix_cache()
        assert len(generate(engine, requests(1))[0]) == 3
        paths = [path for path in servers[0].paths() if path in ("/sleep", "/wake")]
        assert paths == ["/sleep", "/wake"]
    with engine_on() as (engine, servers):
        engine.sleep()  # only with sleep_while_training
        assert "/sleep" not in servers[0].paths()


def test_the_api_key_is_sent_and_streaming_requests_yield_their_tokens_as_chunks() -> None:
    with engine_on(api_key="secret") as (engine, servers):
        engine.add(replace(requests(1)[0], stream=True))
        events = list(steps(engine))
        chunks = {event.sample: event.token_ids for event in events if not isinstance(event, Finished)}
        assert chunks == {sample: expected([1], 0, sample) for sample in range(3)}
        assert all(one["authorization"] == "Bearer secret" for one in servers[0].headers)


def test_a_bug_in_a_backend_is_raised_by_step() -> None:
    class Broken(EchoEngine):
        def _parse(self, response: Any, job: Job, samples: Sequence[int], version: int) -> list[Completion]:
            raise ZeroDivisionError("bug")

    with engine_on(kind=Broken) as (engine, _), pytest.raises(ZeroDivisionError, match="bug"):
        generate(engine, requests(1))
