"""Several consumers share one engine through a dispatcher."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_parts import small_decoder
from native_parts import MODES, SPECS, Mode, assert_same_groups, engine_for, mixed_prompts, transformers_model, words

from assay.engine import Engine, NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.base import Event, Failed, Finished, RequestError, TokenChunk
from assay.engine.dispatch import POLL_S, Dispatcher, EngineClient
from assay.models.decoder import Decoder
from assay.models.fallback import HFModel
from assay.types import Completion

WAYS = {name: MODES[name] for name in ("plain", "windows", "all at once")}
LONG = SamplingParams(max_new_tokens=60)


@functools.cache
def model() -> Decoder:
    return small_decoder(SPECS["qwen3"], seed=21)


def requests_of(consumer: int, count: int = 6) -> list[Request]:
    draw = random.Random(consumer)
    params = SamplingParams(n=2, max_new_tokens=24, stop_token_ids=(3, 5))
    prompts = draw.sample(mixed_prompts(seed=consumer), count)
    return [
        Request(prompt, replace(params, max_new_tokens=draw.choice((1, 9, 24))), seed=100 * consumer + i)
        for i, prompt in enumerate(prompts)
    ]


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "this never came true"
        time.sleep(0.001)


def nothing_left(dispatcher: Dispatcher) -> bool:
    """Whether dispatcher and engine have no state of any request."""
    engine = dispatcher.engine
    assert isinstance(engine, NativeEngine)
    held = (dispatcher._owners, engine.outputs.jobs, engine.outputs.events, engine.incoming, engine.scheduler.kept)
    return not any(held) and not engine.scheduler.unfinished and not engine.blocks.in_use


def events_until_finished(client: EngineClient) -> list[Event]:
    events: list[Event] = []
    while new := client.step():
        events += new
    return events


class Gate:
    """Holds the engine's thread inside its first decoding step until `open` is called."""

    def __init__(self, engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.passed = threading.Event(), threading.Event()
        decode = engine.runner.decode

        def wait(*args: Any) -> None:
            self.reached.set()
            assert self.passed.wait(60)
            decode(*args)

        monkeypatch.setattr(engine.runner, "decode", wait)

    def open(self) -> None:
        self.passed.set()


@pytest.mark.parametrize("mode", WAYS)
def test_concurrent_clients_get_the_same_results_as_alone(mode: str) -> None:
    with Dispatcher(engine_for(model(), WAYS[mode])) as dispatcher:

        def consume(consumer: int) -> list[list[Completion]]:
            with dispatcher.connect() as client:
                return generate(client, requests_of(consumer))

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(consume, range(8)))
        assert nothing_left(dispatcher)
    alone = engine_for(model())
    for consumer, groups in enumerate(found):
        requests = requests_of(consumer)
        assert [len(group) for group in groups] == [2] * len(requests)
        assert_same_groups(model(), requests, groups, generate(alone, requests))


def test_concurrent_clients_of_the_hf_engine() -> None:
    hf: Any = transformers_model(SPECS["qwen3"], model())
    engine = make_engine("hf", HFModel(hf), device="cpu", dtype=torch.float32, max_batch=4, decode=words)
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as one, dispatcher.connect() as other:
        request = Request([1, 2, 3], SamplingParams(max_new_tokens=5), seed=0)
        one.add(request)
        (group,) = generate(other, [request])
        (event,) = events_until_finished(one)
        assert isinstance(event, Finished) and event.completion == group[0]


def test_streaming_chunks_reach_only_their_client() -> None:
    with (
        Dispatcher(engine_for(model())) as dispatcher,
        dispatcher.connect() as streaming,
        dispatcher.connect() as other,
    ):
        ids = [streaming.add(replace(request, stream=True)) for request in requests_of(1)]
        other.add(requests_of(2)[0])
        tokens: dict[tuple[int, int], list[int]] = {}
        finished: dict[tuple[int, int], Completion] = {}
        for event in events_until_finished(streaming):
            assert not isinstance(event, Failed) and event.request_id in ids
            key = event.request_id, event.sample
            if isinstance(event, TokenChunk):
                tokens.setdefault(key, []).extend(event.token_ids)
            else:
                finished[key] = event.completion
        assert len(finished) == 2 * len(ids)
        assert tokens == {key: completion.token_ids for key, completion in finished.items()}
        assert all(isinstance(event, Finished) for event in events_until_finished(other))


def test_client_step_returns_immediately_without_requests_or_without_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for(model())
    gate = Gate(engine, monkeypatch)
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as client, dispatcher.connect() as other:
        assert client.step() == []
        client.add(requests_of(0)[0])
        assert gate.reached.wait(60)
        assert client.step(wait=False) == [] and other.step() == []
        gate.open()
        assert len(events_until_finished(client)) == 2 and client.step() == []


def test_polling_client_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model())
    gate = Gate(engine, monkeypatch)
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as client:
        request_id = client.add(Request([1, 2, 3], LONG, seed=0))
        gate.reached.wait(60)
        polls, start = 0, time.monotonic()
        while time.monotonic() < start + 30 * POLL_S:
            assert client.step(wait=False) == []
            polls += 1
        assert 1 <= polls <= (time.monotonic() - start) / POLL_S + 1
        gate.open()
        events: list[Event] = []
        while not events:
            events = client.step(wait=False)
        assert [event.request_id for event in events] == [request_id]


class Mistake(Exception):
    pass


@pytest.mark.parametrize("ending", ["exception", "close", "garbage collection"])
def test_requests_of_a_client_that_ends_early_are_aborted(ending: str) -> None:
    with Dispatcher(engine_for(model(), MODES["small cache"])) as dispatcher, dispatcher.connect() as other:
        requests = requests_of(1)
        ids = [other.add(request) for request in requests]
        client = dispatcher.connect()
        generate(client, [replace(requests[0], keep=True)])
        many = [replace(request, params=LONG, keep=True) for request in requests_of(2)]
        if ending == "exception":
            with pytest.raises(Mistake), client:
                for request in many:
                    client.add(request)
                client.step()
                raise Mistake
        else:
            for request in many:
                client.add(request)
            if ending == "close":
                client.close()
        if ending != "garbage collection":
            with pytest.raises(RuntimeError, match="client is closed"):
                client.step()
        del client
        gc.collect()
        groups: dict[int, list[Completion]] = {request_id: [] for request_id in ids}
        for event in sorted(events_until_finished(other), key=lambda event: (event.request_id, event.sample)):  # type: ignore[union-attr]
            assert isinstance(event, Finished)
            groups[event.request_id].append(event.completion)
        alone = engine_for(model())
        assert_same_groups(model(), requests, list(groups.values()), generate(alone, requests))
        eventually(lambda: nothing_left(dispatcher))


def test_failed_event_reaches_only_its_client() -> None:
    with Dispatcher(engine_for(model())) as dispatcher, dispatcher.connect() as client, dispatcher.connect() as other:
        other.add(requests_of(1)[0])
        with pytest.raises(RequestError, match=r"request 'odd': .*outside the vocabulary"):
            generate(client, [Request([99], LONG, seed=0, name="odd"), *requests_of(2)])
        assert [type(event) for event in events_until_finished(other)] == [Finished, Finished]


@pytest.mark.parametrize("what", ["request", "sample"])
def test_aborted_requests_and_samples_yield_no_event(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model())
    gate = Gate(engine, monkeypatch)
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as client:
        short = SamplingParams(n=2, max_new_tokens=1)  # finished after the blocked step
        first, second = (client.add(Request([1, 2, i], short, seed=i, keep=True)) for i in range(2))
        assert gate.reached.wait(60)
        client.abort([first] if what == "request" else [(first, 1)])
        gate.open()
        events = events_until_finished(client)
        keys = {(event.request_id, event.sample) for event in events if isinstance(event, Finished)}
        assert keys == {(second, 0), (second, 1)} | ({(first, 0)} if what == "sample" else set())
        client.release(event.completion.handle for event in events if isinstance(event, Finished))  # type: ignore[misc]
        eventually(lambda: nothing_left(dispatcher))  # also kept sequences whose handles were never returned


def test_abort_drops_finished_results_that_were_not_taken_and_releases_their_handles() -> None:
    with Dispatcher(engine_for(model())) as dispatcher, dispatcher.connect() as client:
        request_id = client.add(Request([1, 2, 3], SamplingParams(max_new_tokens=2), seed=0, keep=True))
        eventually(lambda: not dispatcher._owners)
        client.abort([request_id])
        assert client.step() == []
        eventually(lambda: nothing_left(dispatcher))


def test_clients_cannot_abort_release_or_continue_requests_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model())
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as owner, dispatcher.connect() as other:
        params = SamplingParams(max_new_tokens=5)
        ((kept,),) = generate(owner, [Request([4, 5, 6], params, seed=1, keep=True)])
        assert kept.handle is not None
        request_id = owner.add(Request([1, 2], LONG, seed=2))
        other.abort([request_id, (request_id, 0)])
        other.release([kept.handle])
        with pytest.raises(RequestError, match=f"request 'mine': handle {kept.handle} cannot be continued"):
            generate(other, [Request([7], params, seed=3, name="mine", continues=kept.handle)])
        (event,) = events_until_finished(owner)
        assert isinstance(event, Finished) and len(event.completion.token_ids) == 60
        continued = generate(owner, [Request([7], params, seed=3, continues=kept.handle)])
        whole = [Request([4, 5, 6, *kept.token_ids, 7], params, seed=3)]
        assert_same_groups(model(), whole, continued, generate(engine_for(model()), whole))
        eventually(lambda: nothing_left(dispatcher))


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_weights_are_updated_from_another_thread_while_requests_run(
    kv_on_update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(model(), Mode(max_batch=4))
    engine.kv_on_update = kv_on_update  # type: ignore[assignment]
    request = Request([1, 2, 3], LONG, seed=7, stream=True)
    (alone,) = generate(engine, [request])
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as client, dispatcher.connect() as trainer:
        client.add(request)
        received = 0
        while received < 9:
            received += sum(len(event.token_ids) for event in client.step() if isinstance(event, TokenChunk))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(trainer.update_weights, model(), 1).result(60)
        assert trainer.info.version == client.info.version == 1
        *_, event = events_until_finished(client)
        assert isinstance(event, Finished) and event.completion.token_ids == alone[0].token_ids
        (first, before), *others = event.completion.versions
        assert first == 0 and before >= 9
        assert others == ([(1, 60 - before)] if before < 60 else [])  # the update may have come after the last token


def test_engine_exception_reaches_clients_with_requests_and_later_requests_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for(model())
    expected = generate(engine, requests_of(1))
    gate, decode = Gate(engine, monkeypatch), engine.runner.decode

    def fail(*args: Any) -> None:
        gate.reached.set()
        assert gate.passed.wait(60)
        raise MemoryError("out of memory")

    monkeypatch.setattr(engine.runner, "decode", fail)
    with Dispatcher(engine) as dispatcher:
        clients = [dispatcher.connect() for _ in range(3)]
        for client in clients[:2]:
            for request in requests_of(1):
                client.add(request)
        assert gate.reached.wait(60)
        gate.open()
        for client in clients[:2]:
            with pytest.raises(MemoryError, match="out of memory"):
                client.step()
            assert client.step() == []
        assert clients[2].step() == []
        monkeypatch.setattr(engine.runner, "decode", decode)
        for client in clients:
            assert_same_groups(model(), requests_of(1), generate(client, requests_of(1)), expected)
        assert nothing_left(dispatcher)


def test_engine_exception_is_not_raised_for_aborted_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model())
    decode = engine.runner.decode

    def fail(*args: Any) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(engine.runner, "decode", fail)
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as client:
        request_id = client.add(requests_of(1)[0])
        eventually(lambda: not dispatcher._owners)
        client.abort([request_id])
        monkeypatch.setattr(engine.runner, "decode", decode)
        assert len(generate(client, requests_of(2))) == 6


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_accumulates_over_thousands_of_requests(rounds: int) -> None:
    """Requests with streaming, handles, errors, aborts and weight updates, of several clients."""
    engine = engine_for(model(), Mode(max_batch=64))
    per_round = 60
    sizes: list[list[int]] = []
    counts: list[int] = []
    with Dispatcher(engine) as dispatcher:

        def consume(number: int) -> int:
            failed = 0
            with dispatcher.connect() as client:
                for turn in range(per_round):
                    params = SamplingParams(max_new_tokens=1 + turn % 3)
                    keep, stream = turn % 4 == 0, turn % 5 == 0
                    prompt = [99] if turn % 7 == 0 else [1, number, turn % 61]
                    request_id = client.add(Request(prompt, params, seed=turn, keep=keep, stream=stream))
                    if turn % 6 == 0:
                        client.abort([request_id])
                    for event in events_until_finished(client):
                        failed += isinstance(event, Failed)
                        if isinstance(event, Finished) and event.completion.handle is not None and turn % 8:
                            client.release([event.completion.handle])
                if number == 0:
                    client.update_weights(model(), engine.info.version + 1)
            return failed

        for number in range(rounds):
            with ThreadPoolExecutor(3) as pool:
                assert sum(pool.map(consume, range(3))) == 3 * 7  # of 9 bad requests 2 were aborted
            eventually(lambda: nothing_left(dispatcher))
            assert not dispatcher._abandoned and not engine.in_flight and not engine.boundary.queue
            sizes.append([len(engine.outputs.versions.starts), engine.outputs.history.tokens.nbytes])
            if number in (0, rounds - 1):
                counts.append(objects())
    assert sizes[-1] == sizes[0]
    assert counts[1] - counts[0] <= rounds  # each round has 180 requests


def objects() -> int:
    gc.collect()
    kinds = (Request, Completion, Finished, Failed, TokenChunk, threading.Condition, EngineClient)
    return sum(type(one) in kinds for one in gc.get_objects())


def test_dispatcher_thread_waits_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model())
    calls: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda wait=True: calls.append(1) or step(wait))
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as client:
        generate(client, requests_of(0))
        eventually(lambda: bool(dispatcher._work._waiters))  # type: ignore[attr-defined]
        before = len(calls)
        time.sleep(0.05)
        assert len(calls) == before > 0


def test_closing_the_dispatcher_ends_waiting_clients_and_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model())
    gate = Gate(engine, monkeypatch)
    closed: list[bool] = []
    monkeypatch.setattr(engine, "close", lambda: closed.append(True))
    dispatcher = Dispatcher(engine)
    client = dispatcher.connect()
    client.add(Request([1], LONG, seed=0))
    assert gate.reached.wait(60)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(client.step)
        closing = pool.submit(dispatcher.close)
        with pytest.raises(RuntimeError, match="dispatcher is closed"):
            waiting.result(60)
        gate.open()
        closing.result(60)
    assert closed == [True] and not dispatcher._thread.is_alive() and not engine.outputs.jobs
    for call in (lambda: client.add(requests_of(0)[0]), client.step, dispatcher.connect):
        with pytest.raises(RuntimeError, match="dispatcher is closed"):
            call()
    client.close()
    dispatcher.close()


def test_only_the_dispatcher_puts_the_engine_to_sleep() -> None:
    with Dispatcher(engine_for(model())) as dispatcher, dispatcher.connect() as client:
        with pytest.raises(RuntimeError, match=r"call Dispatcher\.sleep"):
            client.sleep()
        dispatcher.sleep()
        dispatcher.wake()
        assert len(generate(client, requests_of(0))) == 6
        client.close()
        with dispatcher.connect() as another:  # closing a client leaves the engine open
            assert len(generate(another, requests_of(0))) == 6


def test_clients_score_and_compute_fingerprints_while_others_generate() -> None:
    engine = engine_for(model())
    sequences: Sequence[Sequence[int]] = [[1, 2, 3, 4], [5, 6]]
    expected, fingerprint = engine.score(sequences), engine.fingerprint()
    with Dispatcher(engine) as dispatcher, dispatcher.connect() as client, dispatcher.connect() as other:
        other.add(Request([1], LONG, seed=0))
        typed: Engine = client
        assert typed.score(sequences) == expected and typed.fingerprint() == fingerprint
        typed.reset_prefix_cache()
        assert len(events_until_finished(other)) == 1


def collect_until(condition: Callable[[list[Event]], bool], batches: list[list[Event]]) -> list[Event]:
    def events() -> list[Event]:
        return [event for batch in list(batches) for event in batch]

    eventually(lambda: condition(events()))
    return events()


def finished_ids(events: Sequence[Event]) -> set[tuple[int, int]]:
    return {(event.request_id, event.sample) for event in events if isinstance(event, Finished)}


def test_events_are_handed_to_a_function_in_batches() -> None:
    requests = [replace(request, stream=True) for request in requests_of(1)]
    expected = generate(engine_for(model(), WAYS["plain"]), requests)
    batches: list[list[Event]] = []
    with Dispatcher(engine_for(model(), WAYS["plain"])) as dispatcher:
        client = dispatcher.connect(batches.append)
        ids = [client.add(request) for request in requests]
        events = collect_until(lambda events: len(finished_ids(events)) == 2 * len(requests), batches)
        eventually(lambda: nothing_left(dispatcher))
    completions = {(e.request_id, e.sample): e.completion for e in events if isinstance(e, Finished)}
    assert_same_groups(model(), requests, [[completions[one, sample] for sample in range(2)] for one in ids], expected)
    chunks = [
        token
        for e in events
        if isinstance(e, TokenChunk) and (e.request_id, e.sample) == (ids[0], 1)
        for token in e.token_ids
    ]
    assert chunks == completions[ids[0], 1].token_ids
    assert all(batches) and any(len({event.request_id for event in batch}) > 1 for batch in batches)


def test_the_function_may_add_and_abort_requests() -> None:
    received: list[Event] = []

    def receive(events: list[Event]) -> None:
        received.extend(events)
        if len(received) == len(events):
            slow.append(events[0].request_id)
            client.abort(slow)
            client.add(replace(requests_of(2)[0], stream=False))

    slow: list[int] = []
    with Dispatcher(engine_for(model(), WAYS["plain"])) as dispatcher:
        client = dispatcher.connect(receive)
        client.add(Request([1, 2], LONG, seed=1, stream=True))
        eventually(lambda: len(finished_ids(received)) == 2 and nothing_left(dispatcher))
    assert slow[0] not in {request_id for request_id, _ in finished_ids(received)}


def test_an_engine_failure_is_handed_over_as_failed_events(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model(), WAYS["plain"])
    batches: list[list[Event]] = []
    with Dispatcher(engine) as dispatcher:
        client = dispatcher.connect(batches.append)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_iterate", lambda: 1 / 0)
            ids = {client.add(request) for request in requests_of(3)}
            events = collect_until(lambda events: {event.request_id for event in events} == ids, batches)
        assert {type(event) for event in events} == {Failed}
        assert all("ZeroDivisionError" in event.error for event in events if isinstance(event, Failed))
        batches.clear()
        client.add(requests_of(3)[0])
        collect_until(lambda events: len(finished_ids(events)) == 2, batches)


def test_an_unknown_handle_is_handed_over_as_a_failed_event() -> None:
    batches: list[list[Event]] = []
    with Dispatcher(engine_for(model(), WAYS["plain"])) as dispatcher:
        client = dispatcher.connect(batches.append)
        rejected = client.add(replace(requests_of(1)[0], continues=77))
        (event,) = collect_until(bool, batches)
        assert isinstance(event, Failed) and event.request_id == rejected


def test_a_closed_client_receives_nothing_more() -> None:
    batches: list[list[Event]] = []
    with Dispatcher(engine_for(model(), WAYS["plain"])) as dispatcher:
        client = dispatcher.connect(batches.append)
        client.add(Request([1, 2], LONG, seed=1, stream=True))
        eventually(lambda: bool(batches))
        client.close()
        eventually(lambda: nothing_left(dispatcher))
        assert not dispatcher._receivers
