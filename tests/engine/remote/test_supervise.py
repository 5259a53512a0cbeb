"""Servers that fail: they are retired, their requests are served by others, and they come back with proved weights."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from echo_parts import POLICY, EchoEngine, echo, engine_on, expected, options, requests, tokens, until
from http_parts import Answer, SmallServer

from assay.engine.client import connect, generate, run_sync
from assay.engine.remote import http
from assay.engine.remote.http import Server, ServerStale, ServerState
from assay.engine.remote.transport import NcclTransport
from assay.engine.sequence import Job
from assay.types import Completion, UserError


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSES_S", (0.05, 0.1, 0.2))


class VersionedEngine(EchoEngine):
    """Its servers report the version of the weights that they have."""

    def _parse(self, response: Any, job: Job, version: int) -> list[Completion]:
        completions = super()._parse(response, job, version)
        if response["version"] < version:
            raise ServerStale(f"a server has sampled with version {response['version']}, not {version}")
        return completions

    async def _score(self, server: Server, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        answer = await self.post(server, "/score")
        return [[-1.0 - answer["version"]] * (len(one) - 1) for one in sequences]


@dataclass
class FakeServer:
    """Answers as a server does, or fails in some way until `fault` is empty again."""

    fault: str = ""
    version: int = -1
    keeps_weights: bool = False  # ignores updates
    released: threading.Event = field(default_factory=threading.Event)
    http: SmallServer | None = None

    def __call__(self, path: str, body: Any) -> Answer:
        if self.fault == "hangs":
            self.released.wait(30)
        if self.fault == "restarted":
            self.version, self.fault = -1, ""
        if self.fault == "garbage" and path != "/health":
            return 200, b"<html>who are you?</html>"
        if self.fault == "fails" and path == "/generate":
            return 500, {"detail": "out of memory"}
        if self.fault == "not found" and path == "/health":
            return 404, {"detail": "no such path"}
        if self.fault == "unhealthy":
            return 503, {"detail": "the engine has died"}
        if path == "/weights" and not self.keeps_weights:
            self.version = body["version"]
        if path == "/score" and self.fault == "cannot score":
            return 500, {"detail": "out of memory"}
        if path == "/score":
            return 200, {"version": self.version}
        status, answer = echo(path, body)
        return status, {**answer, "version": self.version}

    def set(self, fault: str) -> None:
        self.fault = fault
        self.http.drop = fault == "drops connections"
        if not fault:
            self.released.set()


@contextmanager
def fleet(count: int = 3, first: int | None = 0, **settings: Any) -> Iterator[tuple[Any, list[FakeServer], list[str]]]:
    """An engine, its servers, and the lines that it has written. `first`: version of the first update; None: none."""
    fakes, lines = [FakeServer() for _ in range(count)], list[str]()
    values = {"kind": VersionedEngine, "options": options(notify=lines.append), "health_timeout_s": 0.8} | settings
    with engine_on(*fakes, **values) as (engine, servers):
        for fake, server in zip(fakes, servers, strict=True):
            fake.http = server
        try:
            if first is not None:
                engine.update_weights(POLICY, first)
            yield engine, fakes, lines
        finally:
            for fake in fakes:
                fake.released.set()


def states(engine: Any) -> list[str]:
    return [server.state.value for server in engine.all_servers]


def check_tokens(engine: Any, count: int = 12) -> None:
    """All requests are answered with their tokens, which follow from prompts and seeds."""
    wanted = requests(count)
    right = [[expected(one.prompt_ids, one.seed, sample) for sample in range(3)] for one in wanted]
    assert tokens(generate(engine, wanted)) == right


@pytest.mark.parametrize("fault", ["drops connections", "hangs", "garbage", "restarted"])
def test_a_server_that_fails_is_retired_until_it_has_proved_the_weights_of_a_later_update(fault: str) -> None:
    with fleet() as (engine, fakes, lines):
        fakes[1].set(fault)
        check_tokens(engine)
        until(lambda: states(engine) == ["serving", "retired", "serving"])
        assert len(lines) == 1 and "gets no more requests (2 others left)" in lines[0]
        assert engine.server_metrics()["servers/serving"] == 2 and engine.server_metrics()["servers/failures"] == 1
        assert engine.server_metrics()["servers/retries"] > 0
        until(lambda: all(server.running == 0 for server in engine.all_servers))
        before = len(fakes[1].http.paths())  # type: ignore[union-attr]
        check_tokens(engine)
        assert len(fakes[1].http.paths()) == before  # type: ignore[union-attr]
        if fault != "restarted":
            engine.update_weights(POLICY, 1)  # without it
            assert states(engine)[1] == "retired" and [fakes[0].version, fakes[2].version] == [1, 1]
        fakes[1].set("")
        engine.update_weights(POLICY, 2)
        assert states(engine) == ["serving"] * 3 and [fake.version for fake in fakes] == [2, 2, 2]
        assert "serves again, with the weights of version 2" in lines[-1]
        check_tokens(engine)
        assert fakes[1].http.requests[-1][0] in ("/generate", "/health")  # type: ignore[union-attr]


def test_a_server_that_cannot_prove_its_weights_stays_retired() -> None:
    with fleet() as (engine, fakes, lines):
        fakes[0].set("restarted")
        generate(engine, requests(12))
        fakes[0].keeps_weights = True
        engine.update_weights(POLICY, 1)
        assert states(engine) == ["retired", "serving", "serving"]
        assert "has other weights than" in lines[-1]
        fakes[0].keeps_weights = False
        engine.update_weights(POLICY, 2)
        assert states(engine) == ["serving"] * 3


def test_a_server_that_fails_while_another_joins_is_retired_itself() -> None:
    with fleet() as (engine, fakes, lines):
        fakes[2].set("restarted")
        generate(engine, requests(12))
        fakes[0].set("cannot score")  # its log-probabilities are needed to check those of the joining server
        engine.update_weights(POLICY, 1)
        assert states(engine) == ["retired", "serving", "serving"]
        assert f"{engine.all_servers[0].url}/score answered 500" in lines[-2] and "serves again" in lines[-1]


def test_a_server_that_hangs_does_not_hold_up_an_update_or_an_idle_engine() -> None:
    with fleet() as (engine, fakes, _):
        fakes[1].set("hangs")
        started = time.monotonic()
        engine.update_weights(POLICY, 1)
        assert states(engine) == ["serving", "retired", "serving"] and time.monotonic() - started < 10
        assert engine.info.version == 1 and [fakes[0].version, fakes[2].version] == [1, 1]
    with fleet() as (engine, fakes, _):
        fakes[0].set("not found")  # an answer that says nothing about its health does not end the questions
        time.sleep(1.0)
        assert states(engine)[0] == "serving"
        fakes[0].set("unhealthy")
        until(lambda: states(engine)[0] == "retired")  # by the questions about its health alone


def test_an_event_loop_that_is_held_up_is_no_fault_of_the_servers() -> None:
    """In asynchronous training, environments may hold up the event loop that asks the servers."""

    class Slow(FakeServer):
        def __call__(self, path: str, body: Any) -> Answer:
            time.sleep(0.15 if path == "/health" else 0.0)
            return super().__call__(path, body)

    with engine_on(Slow(), Slow(), kind=VersionedEngine, health_timeout_s=0.4) as (engine, _):
        engine.update_weights(POLICY, 0)
        for _ in range(2):
            time.sleep(0.1)
            engine.loop.post(lambda: time.sleep(0.65))
            engine.loop.call(asyncio.sleep(0))
        assert states(engine) == ["serving"] * 2


def test_the_last_server_is_never_retired_and_its_error_is_reported() -> None:
    with fleet(2) as (engine, fakes, lines):
        for fake in fakes:
            fake.set("garbage")
        with pytest.raises(UserError, match="something that is not JSON"):
            generate(engine, requests(4))
        assert sorted(states(engine)) == ["retired", "serving"] and len(lines) == 1


def test_if_all_servers_are_gone_requests_fail_until_an_update_has_reached_one() -> None:
    with fleet(2, recover_s=60) as (engine, fakes, lines):
        for fake in fakes:
            fake.set("drops connections")
        with pytest.raises(UserError, match=r"all echo servers have failed: .* is not reachable"):
            generate(engine, requests(4))
        assert engine.lost and len(lines) == 2 and "(none left)" in lines[-1]
        with pytest.raises(UserError, match="all echo servers have failed"):
            engine.update_weights(POLICY, 1)
        fakes[0].set("restarted")  # answers again, without weights
        with pytest.raises(UserError, match="all echo servers have failed"):
            generate(engine, requests(1))
        engine.update_weights(POLICY, 1)
        assert states(engine) == ["serving", "retired"] and not engine.lost
        check_tokens(engine)


def test_an_answer_of_the_last_server_that_is_garbage_fails_its_request_alone() -> None:
    with fleet(1, recover_s=60) as (engine, fakes, lines):
        fakes[0].set("garbage")
        with pytest.raises(UserError, match="not JSON"):
            generate(engine, requests(1))
        fakes[0].set("")
        assert not engine.lost and lines == [] and generate(engine, requests(1))


def test_before_the_first_update_a_failure_is_an_error() -> None:
    with fleet(2, first=None) as (engine, fakes, _):
        fakes[1].set("garbage")
        with pytest.raises(UserError, match="not JSON"):
            engine.update_weights(POLICY, 0)
        assert states(engine) == ["serving"] * 2 and engine.info.version == -1


def test_a_request_on_which_a_server_fails_is_tried_elsewhere_and_the_server_is_kept() -> None:
    with fleet() as (engine, fakes, lines):
        fakes[0].set("fails")
        check_tokens(engine)
        assert states(engine) == ["serving"] * 3 and lines == []
        for fake in fakes:
            fake.set("fails")
        with pytest.raises(UserError, match="answered 500: out of memory"):
            generate(engine, requests(12))


def test_a_single_lost_connection_is_no_reason_to_retire_a_server() -> None:
    with fleet() as (engine, fakes, lines):
        http, answer, lost = fakes[0].http, fakes[0].__call__, [2]

        def sometimes(path: str, body: Any) -> Answer:
            if path == "/generate" and lost[0]:
                lost[0] -= 1
                raise ConnectionResetError
            return answer(path, body)

        http.answer = sometimes  # type: ignore[union-attr]
        check_tokens(engine)
        assert lost == [0] and states(engine) == ["serving"] * 3 and lines == []


def test_cancelled_requests_of_a_retired_server_are_not_sent_again() -> None:
    with fleet(2, health_timeout_s=0) as (engine, fakes, _):
        for fake in fakes:
            fake.set("hangs")
        client = connect(engine)

        async def cancel() -> None:
            futures = [future for one in requests(4) for future in client.submit(one)]
            while sum(fake.http.paths().count("/generate") for fake in fakes) < 12:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            for future in futures:
                future.cancel()
            assert engine.retire(engine.all_servers[0], "test")

        run_sync(cancel(), client)
        until(lambda: not engine.all_servers[0].tasks)
        assert sum(fake.http.paths().count("/generate") for fake in fakes) == 12  # type: ignore[union-attr]


def test_random_faults_lose_and_double_nothing(until_s: float = 1.0) -> None:
    """Faults of all kinds at random times, on two of three servers; requests and updates all the while."""
    kinds = ["drops connections", "hangs", "garbage", "restarted", "fails", "unhealthy"]
    draw, stop, injected = random.Random(0), threading.Event(), [0]

    def inject(fakes: Sequence[FakeServer]) -> None:
        while not stop.is_set():
            fake = draw.choice(fakes)
            fake.released.clear()
            fake.set(draw.choice(kinds))
            injected[0] += 1
            stop.wait(draw.uniform(0.01, 0.1))
            fake.set("")

    with fleet(3, health_timeout_s=1.0) as (engine, fakes, lines):
        thread = threading.Thread(target=inject, args=(fakes[1:],))
        thread.start()
        try:
            deadline, version = time.monotonic() + until_s, 0
            while time.monotonic() < deadline or (engine.failures < 4 and time.monotonic() < deadline + 60):
                check_tokens(engine, 20)
                version += 1
                engine.update_weights(POLICY, version)
        finally:
            stop.set()
            thread.join()
        for fake in fakes:
            fake.set("")
        until(lambda: not any(fake.fault for fake in fakes))
        engine.update_weights(POLICY, version + 1)
        assert injected[0] > 10 and engine.failures > 3
        assert states(engine) == ["serving"] * 3
        assert sum("serves again" in line for line in lines) == sum("has failed" in line for line in lines)


def test_states_of_the_main_rank_are_adopted() -> None:
    with fleet() as (engine, _, _lines):
        urls = [server.url for server in engine.all_servers]
        engine.adopt(urls[:2])
        assert states(engine) == ["serving", "serving", "retired"]
        engine.adopt(urls[1:])
        assert states(engine) == ["retired", "serving", "serving"]
        assert engine.least_busy() in engine.serving() and engine.all_servers[0].state is ServerState.RETIRED


class Placed:
    """Servers that come and go, as on a cluster."""

    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.refused = 0

    def refresh(self) -> dict[str, str]:
        return self.keys()

    def keys(self) -> dict[str, str]:
        return dict.fromkeys(self.urls, "key")

    def refuse_changes(self, notify: Any) -> None:
        self.refused += 1

    def restart(self, url: str) -> None: ...

    def death(self, url: str) -> str:
        return ""

    def close(self) -> None: ...


def test_servers_come_and_go_with_an_update() -> None:
    with fleet(2) as (engine, fakes, lines), fleet(1, first=None) as (_, others, _):
        urls = [server.url for server in engine.all_servers]
        new = others[0].http.url  # type: ignore[union-attr]
        engine.launched = placed = Placed(*urls, new)
        engine.update_weights(POLICY, 1)
        assert states(engine) == ["serving"] * 3 and others[0].version == 1
        check_tokens(engine)
        assert any("/generate" in path for path in others[0].http.paths())  # type: ignore[union-attr]
        placed.urls = [new]
        engine.update_weights(POLICY, 2)
        assert [server.url for server in engine.all_servers] == [new]
        before = [len(fake.http.paths()) for fake in fakes]  # type: ignore[union-attr]
        check_tokens(engine)
        assert before == [len(fake.http.paths()) for fake in fakes]  # type: ignore[union-attr]
        assert [fake.version for fake in fakes] == [1, 1] and others[0].version == 2
        assert engine.server_metrics() == {} and not any("has failed" in line for line in lines)


def test_servers_cannot_change_with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(2) as (engine, _, _), fleet(1, first=None) as (_, others, _):
        urls = [server.url for server in engine.all_servers]
        engine.launched = placed = Placed(urls[0], others[0].http.url)  # type: ignore[union-attr]
        engine.transport = NcclTransport.__new__(NcclTransport)
        monkeypatch.setattr(engine, "_publish", lambda weights, version: None)
        engine.update_weights(POLICY, 1)
        assert [server.url for server in engine.all_servers] == urls and placed.refused == 1


def test_all_servers_are_lost_while_their_successors_are_started() -> None:
    with fleet(2) as (engine, fakes, _), fleet(1, first=None) as (_, others, _):
        engine.launched = placed = Placed()
        for version in (1, 2):
            with pytest.raises(UserError, match=r"all .* servers have failed: .* is not used any more"):
                engine.update_weights(POLICY, version)
            assert engine.lost
        with pytest.raises(UserError, match="servers have failed"):
            generate(engine, requests(2))
        assert all(fake.version < 1 for fake in fakes)  # no weights for servers that are not used
        placed.urls = [others[0].http.url]  # type: ignore[union-attr]
        engine.update_weights(POLICY, 3)
        check_tokens(engine)
        assert [server.url for server in engine.all_servers] == placed.urls
