"""Groups as a stream: they are started at any time, and each is returned, judged, when it is finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from assay.engine.base import Request
from assay.engine.client import ClientThread
from assay.rollout.collect import Collector
from assay.rollout.play import GroupInPlay, GroupPlayer
from assay.types import Group, Prompt


@dataclass(eq=False)
class Ticket:
    """A group that is to be sampled."""

    number: int  # in the order in which groups were started for the first time
    position: int  # of its prompt in the stream of prompts
    prompt: Prompt
    request: Request
    version: int  # of the engine's weights when it was started: no token of it is older
    restarts: int = 0


class GroupStream:
    """Samples groups in the thread of an engine, and judges them in another one. One thread calls its methods."""

    def __init__(self, collector: Collector, thread: ClientThread) -> None:
        self.collector, self.thread = collector, thread
        self.finished_at = time.perf_counter()  # when the last group was finished
        self._sampling: dict[Ticket, Future[Group]] = {}  # started, and neither returned nor dropped
        self._judge = ThreadPoolExecutor(1, "assay-judge")
        # These belong to the thread of the engine.
        self._player: GroupPlayer | None = None
        self._groups: dict[Ticket, GroupInPlay] = {}
        self._played: list[GroupInPlay] = []  # not judged yet
        self._judging: asyncio.Future[dict[GroupInPlay, Group]]

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Start to sample these groups."""
        new: dict[Ticket, Future[Group]] = {ticket: Future() for ticket in tickets}
        self._sampling |= new
        self.thread.loop.post(partial(self._start, new))

    def next(self, wait: bool = True) -> list[tuple[Ticket, Group]]:
        """The groups that have finished since the last call, judged. Empty if no group is being sampled.

        `wait`: until there is one; then an error that has ended the sampling of a group is raised.
        """
        if wait:
            futures.wait(self._sampling.values(), return_when=futures.FIRST_COMPLETED)
        ended = [(ticket, future) for ticket, future in self._sampling.items() if future.done()]
        finished = [(ticket, future.result()) for ticket, future in ended if wait or not future.exception()]
        for ticket, _ in finished:
            del self._sampling[ticket]
        return finished

    def drop(self, tickets: Iterable[Ticket]) -> list[int]:
        """Stop sampling groups. Returns the number of tokens of each of their sequences so far, if it is known."""
        tickets = [ticket for ticket in tickets if self._sampling.pop(ticket, None)]
        return self.thread.run(self._drop(tickets)) if tickets else []

    def close(self) -> None:
        """Stop sampling all groups."""
        if self.thread.loop.running:
            self.drop(list(self._sampling))
        self._judge.shutdown(cancel_futures=True)

    # -- in the thread of the engine

    def _start(self, new: dict[Ticket, Future[Group]]) -> None:
        for ticket, future in new.items():
            asyncio.ensure_future(self._sample(ticket)).add_done_callback(partial(pass_on, future))

    async def _sample(self, ticket: Ticket) -> Group:
        if self._player is None:
            self._player = self.collector.player(self.thread.client)
        group = self._groups[ticket] = self._player.start(ticket.prompt, ticket.request)
        try:
            await group.result
        finally:
            del self._groups[ticket]
        self._played.append(group)
        if len(self._played) == 1:
            self._judging = asyncio.ensure_future(self._judge_played())
        return (await asyncio.shield(self._judging))[group]

    async def _judge_played(self) -> dict[GroupInPlay, Group]:
        await asyncio.sleep(0)  # together with all groups that end now
        played, self._played = self._played, []
        judging = self._judge.submit(self.collector.finish, played)
        await asyncio.wait([asyncio.wrap_future(judging)])
        self.finished_at = time.perf_counter()
        return dict(zip(played, judging.result(), strict=True))

    async def _drop(self, tickets: Sequence[Ticket]) -> list[int]:
        lengths: list[int] = []
        for ticket in tickets:
            if (group := self._groups.get(ticket)) is not None:
                lengths += group.sampled_tokens(self.thread.client)
                group.cancel()
        return lengths


def pass_on(future: Future[Group], task: asyncio.Task[Group]) -> None:
    error = RuntimeError("the group was cancelled") if task.cancelled() else task.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())
