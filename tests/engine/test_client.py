"""Coroutines that share an engine: futures of samples, cancellation, kept sequences, errors, drivers and threads."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from native_parts import MODES, Mode, assert_same_groups, engine_for, mixed_prompts, model_of
from waiting import until

from assay.engine import NativeEngine, Request, SamplingParams, generate, run_sync
from assay.engine.base import Failed, Finished, RequestError, TokenChunk
from assay.engine.client import ClientThread, EngineClient, LocalClient, connect
from assay.types import Completion

LONG = SamplingParams(max_new_tokens=60)


def requests_of(consumer: int, count: int = 6) -> list[Request]:
    draw = random.Random(consumer)
    params = SamplingParams(n=2, max_new_tokens=24, stop_token_ids=(3, 5))
    prompts = draw.sample(mixed_prompts(seed=consumer), count)
    return [
        Request(prompt, replace(params, max_new_tokens=draw.choice((1, 9, 24))), seed=100 * consumer + i)
        for i, prompt in enumerate(prompts)
    ]


async def sampled(client: EngineClient, requests: Sequence[Request]) -> list[list[Completion]]:
    submitted = [client.submit(request) for request in requests]
    return [list(await asyncio.gather(*futures)) for futures in submitted]


def nothing_left(engine: Any) -> bool:
    """Whether the engine has no state of any request."""
    held = (engine.outputs.jobs, engine.outputs.events, engine.incoming, engine.scheduler.kept)
    return not any(held) and not engine.scheduler.unfinished and not engine.blocks.in_use


@pytest.fixture
def engine() -> NativeEngine:
    return engine_for(model_of("qwen3"))


def test_concurrent_consumers_get_the_same_results_as_alone() -> None:
    engine = engine_for(model_of("qwen3"), MODES["all at once"])
    thread = ClientThread(engine)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: thread.run(sampled(thread.client, requests_of(one))), range(8)))
    thread.close()
    assert nothing_left(engine)
    alone = engine_for(model_of("qwen3"))
    for consumer, groups in enumerate(found):
        requests = requests_of(consumer)
        assert [len(group) for group in groups] == [2] * len(requests)
        assert_same_groups(model_of("qwen3"), requests, groups, generate(alone, requests))


def test_cancelling_futures_aborts_samples_and_requests(engine: NativeEngine) -> None:
    client = LocalClient(engine)

    async def cancel_some() -> list[Completion]:
        first, second = (client.submit(Request([1, 2, seed], replace(LONG, n=2), seed, keep=True)) for seed in range(2))
        streamed = client.submit(Request([5], SamplingParams(max_new_tokens=3), seed=9))
        await streamed[0]
        for future in (first[0], *second):
            future.cancel()
        kept = await first[1]
        client.release([kept.handle])
        return [kept]

    (kept,) = run_sync(cancel_some(), client)
    assert len(kept.token_ids) == 60 and nothing_left(engine)


@pytest.mark.parametrize("steps_before", [2, 1, 0])
def test_a_sample_that_is_cancelled_when_its_sibling_ends_is_aborted(engine: NativeEngine, steps_before: int) -> None:
    """Otherwise its end would look like that of another consumer's request, and all requests would fail."""
    client, params = connect(engine, strict=False, polls=True), SamplingParams(n=2, max_new_tokens=40)
    params = replace(params, stop_token_ids=tuple(range(16)))

    async def work() -> Completion:
        driver, loop = asyncio.ensure_future(client.drive()), asyncio.get_running_loop()
        for seed in range(200):
            first, second = await asyncio.gather(*client.submit(Request([1, 2, 3], params, seed)))
            if 3 < len(first.token_ids) < len(second.token_ids) - 3:
                break
        pair, (other,) = client.submit(Request([1, 2, 3], params, seed)), client.submit(Request([5], LONG, seed=9))
        step, steps = engine.step, count(1)

        def counted(wait: bool = True) -> Any:
            if next(steps) == len(first.token_ids) - steps_before:
                loop.call_soon(pair[1].cancel)
            return step(wait)

        engine.step = counted  # type: ignore[method-assign]
        completion = await other
        assert pair[0].result().token_ids == first.token_ids and pair[1].cancelled()
        driver.cancel()
        return completion

    assert len(asyncio.run(work()).token_ids) == 60 and nothing_left(engine)


def test_kept_sequences_are_released_when_the_work_ends(engine: NativeEngine) -> None:
    client = LocalClient(engine)

    async def keep() -> None:
        (first,) = client.submit(Request([4, 5, 6], SamplingParams(max_new_tokens=5), seed=1, keep=True))
        handle = (await first).handle
        client.submit(Request([7], LONG, seed=3, continues=handle))
        await client.submit(Request([4], SamplingParams(max_new_tokens=5), seed=1, keep=True))[0]

    run_sync(keep(), client)  # one sequence is kept, and one is being continued
    assert nothing_left(engine)


@pytest.mark.parametrize("threaded", [False, True])
def test_an_exception_reaches_all_requests_and_later_ones_are_served(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch, threaded: bool
) -> None:
    expected = generate(engine, requests_of(1))
    owner, name = (engine, "_iterate") if threaded else (engine.runner, "decode")
    error = SystemExit("no GPU") if threaded else MemoryError("out of memory")

    async def fail_once(client: EngineClient) -> tuple[list[Any], list[list[Completion]]]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(error))
            futures = [future for request in requests_of(1) for future in client.submit(request)]
            errors = await asyncio.gather(*futures, return_exceptions=True)
        return errors, await sampled(client, requests_of(1))

    if threaded:
        errors, served = run_with_thread(engine, fail_once)
        assert {str(one) for one in errors} == {"SystemExit: no GPU"}
    else:
        errors, served = run_sync(fail_once(client := LocalClient(engine)), client)
        assert {type(one) for one in errors} == {MemoryError} and nothing_left(engine)
    assert_same_groups(model_of("qwen3"), requests_of(1), served, expected)


def test_ctrl_c_in_a_step_ends_the_work_and_leaves_nothing(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = engine.runner.decode, []

    def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        decode(*args)

    client = LocalClient(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_sync(sampled(client, [replace(one, params=LONG, keep=True) for one in requests_of(3)]), client)
    assert nothing_left(engine)
    assert len(generate(engine, requests_of(1))) == 6


def test_a_strict_driver_waits_for_tasks_that_may_submit_requests(engine: NativeEngine) -> None:
    """Of two tasks, one does something slow between two requests: the next step serves both second requests."""
    client, steps = LocalClient(engine), list[int]()
    step = engine.step

    def counted(wait: bool = True) -> list[Any]:
        steps.append(len(engine.incoming))
        return step(wait)

    async def turns(pause: float) -> None:
        short = SamplingParams(max_new_tokens=1)
        await client.wait(client.submit(Request([1], short, seed=1))[0])
        await asyncio.sleep(pause)
        await client.wait(client.submit(Request([2], short, seed=2))[0])

    async def both() -> None:
        await asyncio.gather(client.spawn(turns(0.0)), client.spawn(turns(0.05)))

    engine.step = counted  # type: ignore[method-assign]
    run_sync(both(), client)
    assert steps == [2, 2]


def test_run_sync_works_inside_a_running_event_loop(engine: NativeEngine) -> None:
    expected = generate(engine, requests_of(1))

    async def notebook() -> list[list[Completion]]:
        return generate(engine, requests_of(1))

    assert asyncio.run(notebook()) == expected


def test_weights_are_updated_from_another_thread_while_requests_run() -> None:
    engine = engine_for(model_of("qwen3"), Mode(max_batch=4))
    request = Request([1, 2, 3], LONG, seed=7, stream=True)
    ((alone,),) = generate(engine, [request])
    thread, enough, received = ClientThread(engine), threading.Event(), list[int]()

    def receive(chunk: TokenChunk) -> None:
        received.extend(chunk.token_ids)
        if len(received) >= 9:
            enough.set()

    async def stream() -> Completion:
        (future,) = thread.client.submit(request, receive)
        return await future

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(thread.run, stream())
        assert enough.wait(60)
        engine.update_weights(model_of("qwen3"), 1)
        completion = streaming.result(60)
    thread.close()
    assert completion.token_ids == alone.token_ids
    (first, before), *others = completion.versions
    assert first == 0 and before >= 9
    assert others == ([(1, 60 - before)] if before < 60 else [])  # the update may have come after the last token


def test_a_thread_waits_without_requests_and_drops_them_when_it_is_closed(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda wait=True: calls.append(1) or step(wait))
    thread = ClientThread(engine)
    thread.run(sampled(thread.client, requests_of(0)))
    before = len(calls)
    time.sleep(0.05)
    assert len(calls) == before > 0

    async def leave() -> None:
        thread.client.submit(Request([1], LONG, seed=0))

    thread.run(leave())
    thread.close()
    assert nothing_left(engine)


def run_with_thread(engine: NativeEngine, work: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
    """The result of a coroutine, while another thread steps the engine."""

    async def run() -> Any:
        client = LocalClient(engine, strict=False)
        with client.driven_in_thread():
            return await work(client)

    return asyncio.run(run())


def test_requests_of_one_iteration_reach_an_idle_engine_together(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, batches, step = generate(engine, requests_of(1)), list[int](), engine.step

    def counted(wait: bool = True) -> list[Any]:
        batches.append(len(engine.incoming))
        return step(wait)

    monkeypatch.setattr(engine, "step", counted)
    assert run_with_thread(engine, lambda client: sampled(client, requests_of(1))) == expected
    assert batches[0] == len(requests_of(1)) and nothing_left(engine)


def test_the_event_loop_runs_while_a_thread_steps_the_engine(
    engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is cancelled during the last step of all leaves nothing, too."""
    step, running, cancelling = engine.step, threading.Event(), threading.Event()

    def slow(wait: bool = True) -> list[Any]:
        with engine.boundary.lock:  # as if the engine was computing: commands wait
            events = step(wait)
            running.set()
            assert cancelling.wait(60)
        return events

    async def cancel(client: EngineClient) -> None:
        futures = client.submit(Request([1, 2], replace(LONG, n=3), seed=1, stream=True))
        while not running.is_set():
            await asyncio.sleep(0.001)
        for future in futures:
            future.cancel()
        await asyncio.sleep(0.01)
        cancelling.set()
        while not nothing_left(engine):
            await asyncio.sleep(0.001)

    monkeypatch.setattr(engine, "step", slow)
    run_with_thread(engine, cancel)


def test_a_thread_that_waits_keeps_no_completions_and_ends_with_the_driver(engine: NativeEngine) -> None:
    async def leave(client: EngineClient) -> None:
        before = objects(Completion)
        await sampled(client, requests_of(1))
        await asyncio.sleep(0.01)
        assert objects(Completion) <= before
        client.submit(Request([1], LONG, seed=0))
        await asyncio.sleep(0.01)

    threads = set(threading.enumerate())
    run_with_thread(engine, leave)
    assert nothing_left(engine) and set(threading.enumerate()) <= threads


def test_nothing_accumulates_over_many_requests() -> None:
    """Requests with streaming, handles, errors, cancellations and weight updates, of several consumers."""
    engine = engine_for(model_of("qwen3"), Mode(max_batch=64))
    thread, counts, sizes = ClientThread(engine), list[int](), list[list[int]]()
    client = thread.client

    async def consume(number: int) -> int:
        failed = 0
        for turn in range(60):
            params = SamplingParams(max_new_tokens=1 + turn % 3)
            prompt = [99] if turn % 7 == 0 else [1, number, turn % 61]
            request = Request(prompt, params, seed=turn, keep=turn % 4 == 0, stream=turn % 5 == 0)
            (future,) = client.submit(request)
            if turn % 6 == 0:
                future.cancel()
            try:
                client.release([(await future).handle])
            except RequestError:
                failed += 1
            except asyncio.CancelledError:
                pass
        return failed

    for number in range(5):
        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(lambda one: thread.run(consume(one)), range(3))) == 3 * 7  # 2 of 9 were cancelled
        engine.update_weights(model_of("qwen3"), engine.info.version + 1)
        until(lambda: nothing_left(engine))
        sizes.append([len(engine.outputs.versions.starts), engine.outputs.history.tokens.nbytes])
        if number in (0, 4):
            counts.append(objects())
    thread.close()
    assert sizes[-1] == sizes[0]
    assert counts[1] - counts[0] <= 20  # each round has 180 requests


def objects(*kinds: type) -> int:
    gc.collect()
    kinds = kinds or (Request, Completion, Finished, Failed, TokenChunk, asyncio.Future)
    return sum(type(one) in kinds for one in gc.get_objects())
