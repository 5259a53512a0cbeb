"""Samples of HTTP requests: a handler that is cancelled, and requests that start together. See also test_app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from serve_parts import tiny_model

from assay.engine import NativeEngine, Request, SamplingParams, make_engine
from assay.engine.client import EngineClient, LocalClient
from assay.server.protocol import ApiError
from assay.server.running import RequestBatches, RunningSamples, until_disconnect

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
        async with until_disconnect({}, asyncio.Event().wait):
            with RunningSamples(client, [Request([1], LONG, seed=0)]) as samples:
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
        joined = RequestBatches()

        async def handler(index: int) -> None:
            await joined.join("a", index, 3)
            with RunningSamples(client, [Request([1, index], SHORT, seed=index)]) as samples:
                await samples.completions()

        await asyncio.gather(*map(handler, (2, 0, 1)))

    run_with(engine, submit)
    assert batches[0] == [0, 1, 2]


def test_a_duplicate_in_a_batch_is_rejected_and_an_incomplete_batch_starts_after_a_while() -> None:
    async def run() -> None:
        batches, started = RequestBatches(timeout_s=0.05), list[int]()

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
