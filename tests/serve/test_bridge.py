"""Events reach the submission of their request; requests of closed submissions are aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from assay.engine.base import Failed, Finished, Request, SamplingParams, TokenChunk
from assay.serve.bridge import Disconnected, EngineBridge, RequestBatches
from assay.serve.protocol import ApiError
from assay.types import Completion, Finish


class RecordingPort:
    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted: list[int] = []
        self.added: list[int] = []  # numbers of requests that were added together

    def add(self, requests: Sequence[Request]) -> list[int]:
        self.added.append(len(requests))
        self.requests += requests
        return list(range(len(self.requests) - len(requests) + 1, len(self.requests) + 1))

    def abort(self, ids: Iterable[int]) -> None:
        self.aborted += ids

    async def call(self, name: str, *args: Any) -> Any: ...


def request(samples: int = 1) -> Request:
    return Request([1, 2], SamplingParams(n=samples), seed=0)


def finished(request_id: int, sample: int = 0) -> Finished:
    return Finished(request_id, sample, Completion([3], [0.0], [0.0], Finish.STOP))


@pytest.fixture
def bridge() -> EngineBridge:
    made = EngineBridge()
    made.port = RecordingPort()
    return made


def test_events_are_collected_until_they_are_awaited(bridge: EngineBridge) -> None:
    async def run() -> None:
        first, second = bridge.submit([request()]), bridge.submit([request(2), request()])
        chunk = TokenChunk(1, 0, [3], [0.0])
        bridge.receive([chunk, finished(2, 1), finished(1), finished(9)])
        assert await first.events() == [chunk, finished(1)] and first.unfinished == 0
        bridge.receive([finished(3)])
        assert await second.events() == [finished(2, 1), finished(3)] and second.unfinished == 1
        waiting = asyncio.ensure_future(second.events())
        await asyncio.sleep(0)
        bridge.receive([finished(2, 0)])
        assert await waiting == [finished(2, 0)]
        for submission in (first, second):
            submission.close()
        assert not bridge.submissions and not bridge.port.aborted  # type: ignore[attr-defined]

    asyncio.run(run())


def test_unfinished_requests_are_aborted_when_the_client_disconnects(bridge: EngineBridge) -> None:
    async def run() -> None:
        submission = bridge.submit([request(), request()])
        bridge.receive([finished(1)])
        await submission.events()
        waiting = asyncio.ensure_future(submission.events())
        await asyncio.sleep(0)
        submission.disconnect()
        with pytest.raises(Disconnected):
            await waiting
        submission.close()
        assert bridge.port.aborted == [1, 2]  # type: ignore[attr-defined]
        bridge.receive([finished(2)])  # late events are dropped

    asyncio.run(run())


def test_a_failed_request_is_not_aborted(bridge: EngineBridge) -> None:
    async def run() -> None:
        submission = bridge.submit([request(3)])
        bridge.receive([Failed(1, "broken")])
        assert await submission.events() == [Failed(1, "broken")]
        submission.close()
        assert not bridge.port.aborted  # type: ignore[attr-defined]

    asyncio.run(run())


def test_a_batch_of_requests_is_added_together_and_in_order(bridge: EngineBridge) -> None:
    requests = [Request([number], SamplingParams(), seed=0) for number in range(3)]

    async def run() -> None:
        batches = RequestBatches(bridge)
        submitted = [batches.submit(requests[index], "a", index, 3) for index in (2, 0, 1)]
        submissions = await asyncio.gather(*submitted)
        assert bridge.port.added == [3] and bridge.port.requests == requests  # type: ignore[attr-defined]
        assert [list(one.indices) for one in submissions] == [[3], [1], [2]]

    asyncio.run(run())


def test_a_duplicate_in_a_batch_is_rejected_at_once(bridge: EngineBridge) -> None:
    async def run() -> None:
        batches = RequestBatches(bridge, timeout_s=0.05)
        first = asyncio.ensure_future(batches.submit(request(), "a", 0, 2))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="already waiting") as raised:
            await batches.submit(request(), "a", 0, 2)
        assert raised.value.status == 409
        await asyncio.wait_for(first, timeout=10)
        assert bridge.port.added == [1]  # type: ignore[attr-defined]

    asyncio.run(run())


def test_an_incomplete_batch_is_added_after_a_while(bridge: EngineBridge) -> None:
    async def run() -> None:
        batches = RequestBatches(bridge, timeout_s=0.05)
        await asyncio.gather(batches.submit(request(), "a", 1, 3), batches.submit(request(), "a", 0, 3))
        assert bridge.port.added == [2]  # type: ignore[attr-defined]
        await batches.submit(request(), "a", 2, 3)  # too late: it is added alone
        assert bridge.port.added == [2, 1]  # type: ignore[attr-defined]

    asyncio.run(run())
