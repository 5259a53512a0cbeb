"""The engine of a server: events in batches, aborts, failures, the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from serve_parts import tiny_model, until

from assay.engine import Event, Failed, Finished, Request, SamplingParams, TokenChunk, generate, make_engine
from assay.serve.engine_thread import EngineThread

SHORT, LONG = SamplingParams(n=2, max_new_tokens=5), SamplingParams(max_new_tokens=60)
REQUESTS = [Request([1, 2, number], SHORT, seed=number, stream=True) for number in range(4)]


def new_engine() -> Any:
    return make_engine("native", tiny_model(), device="cpu", dtype=torch.float32, max_length=128)


def collect_until(condition: Callable[[list[Event]], bool], batches: list[list[Event]]) -> list[Event]:
    def events() -> list[Event]:
        return [event for batch in list(batches) for event in batch]

    until(lambda: condition(events()))
    return events()


def finished_ids(events: Sequence[Event]) -> set[tuple[int, int]]:
    return {(event.request_id, event.sample) for event in events if isinstance(event, Finished)}


def nothing_left(thread: EngineThread) -> bool:
    engine: Any = thread.engine
    return not (thread._owners or engine.outputs.jobs or engine.incoming or engine.blocks.in_use)


def test_events_are_handed_over_in_batches() -> None:
    expected = generate(new_engine(), REQUESTS)
    batches: list[list[Event]] = []
    with EngineThread(new_engine()) as thread:
        ids = thread.connect(batches.append).add(REQUESTS)
        events = collect_until(lambda events: len(finished_ids(events)) == 2 * len(REQUESTS), batches)
        until(lambda: nothing_left(thread))
    completions = {(e.request_id, e.sample): e.completion for e in events if isinstance(e, Finished)}
    assert [[completions[one, sample] for sample in range(2)] for one in ids] == expected
    chunks = [
        token
        for e in events
        if isinstance(e, TokenChunk) and (e.request_id, e.sample) == (ids[0], 1)
        for token in e.token_ids
    ]
    assert chunks == completions[ids[0], 1].token_ids
    assert all(batches) and any(len({event.request_id for event in batch}) > 1 for batch in batches)


def test_connections_receive_their_own_events_and_cannot_abort_requests_of_others() -> None:
    one: list[list[Event]] = []
    other: list[list[Event]] = []
    with EngineThread(new_engine()) as thread:
        first, second = thread.connect(one.append), thread.connect(other.append)
        own, foreign = first.add(REQUESTS[:2]), second.add(REQUESTS[2:])
        second.abort(own)
        events = collect_until(lambda events: len(finished_ids(events)) == 4, one)
        others = collect_until(lambda events: len(finished_ids(events)) == 4, other)
    assert {event.request_id for event in events} == set(own)
    assert {event.request_id for event in others} == set(foreign)


def test_the_receiver_may_add_and_abort_requests() -> None:
    received: list[Event] = []
    slow: list[int] = []

    def receive(events: list[Event]) -> None:
        received.extend(events)
        if len(received) == len(events):
            slow.append(events[0].request_id)
            connection.abort(slow)
            connection.add([Request([3], SHORT, seed=2)])

    with EngineThread(new_engine()) as thread:
        connection = thread.connect(receive)
        connection.add([Request([1, 2], LONG, seed=1, stream=True)])
        until(lambda: len(finished_ids(received)) == 2 and nothing_left(thread))
    assert slow[0] not in {request_id for request_id, _ in finished_ids(received)}


def test_an_engine_failure_fails_all_requests_and_later_ones_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    batches: list[list[Event]] = []
    with EngineThread(engine) as thread:
        connection = thread.connect(batches.append)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_iterate", lambda: 1 / 0)
            ids = set(connection.add(REQUESTS))
            events = collect_until(lambda events: {event.request_id for event in events} == ids, batches)
        assert {type(event) for event in events} == {Failed}
        assert all("ZeroDivisionError" in event.error for event in events if isinstance(event, Failed))
        batches.clear()
        connection.add(REQUESTS[:1])
        collect_until(lambda events: len(finished_ids(events)) == 2, batches)


def test_a_closed_connection_receives_nothing_more_and_leaves_nothing() -> None:
    batches: list[list[Event]] = []
    closed = threading.Event()

    def receive(events: list[Event]) -> None:
        batches.append(events)
        assert closed.wait(60)  # the engine continues when the connection is closed

    with EngineThread(new_engine()) as thread:
        connection = thread.connect(receive)
        connection.add([Request([1, 2], LONG, seed=1, stream=True)])
        until(lambda: bool(batches))
        connection.close()
        closed.set()
        until(lambda: nothing_left(thread))
    assert len(batches) == 1 and not finished_ids(batches[0])


def test_closing_ends_the_thread_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, closed, batches = new_engine(), threading.Event(), list[list[Event]]()
    monkeypatch.setattr(engine, "close", closed.set)
    thread = EngineThread(engine)
    connection = thread.connect(batches.append)
    connection.add([Request([1], LONG, seed=0, stream=True)])
    until(lambda: bool(batches))
    thread.close()
    assert closed.is_set() and not thread._thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        connection.add(REQUESTS)
    thread.close()
