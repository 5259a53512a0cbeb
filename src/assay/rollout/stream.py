"""Groups as a stream: they are started at any time, and each is returned, judged, when it is finished."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

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
        self._sampling: set[Ticket] = set()  # started, and neither returned nor dropped
        self._finished: SimpleQueue[list[tuple[Ticket, Group]] | BaseException] = SimpleQueue()
        self._error: BaseException | None = None
        self._judge = ThreadPoolExecutor(1, "assay-judge")
        self.finished_at = time.perf_counter()  # when the last group was finished
        # These belong to the thread of the engine.
        self._player: GroupPlayer | None = None
        self._groups: dict[Ticket, GroupInPlay] = {}
        self._played: list[Ticket] = []  # not judged yet

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Start to sample these groups."""
        self._sampling.update(tickets)
        self.thread.loop.post(partial(self._start, tickets))

    def next(self, wait: bool = True) -> list[tuple[Ticket, Group]]:
        """The groups that have finished since the last call, judged. Empty if no group is being sampled.

        `wait`: until there is one; then an error that has ended the sampling of a group is raised.
        """
        finished: list[tuple[Ticket, Group]] = []
        while self._sampling and not (finished and self._finished.empty()):
            if wait and self._error is not None:
                raise self._error
            try:
                arrived = self._finished.get(block=wait and not finished)
            except Empty:
                break
            if isinstance(arrived, BaseException):
                self._error = arrived
                continue
            finished += [pair for pair in arrived if pair[0] in self._sampling]
            self._sampling.difference_update(ticket for ticket, _ in arrived)
        return finished

    def drop(self, tickets: Iterable[Ticket]) -> list[int]:
        """Stop sampling groups. Returns the number of tokens of each of their sequences so far, if it is known."""
        tickets = list(tickets)
        self._sampling.difference_update(tickets)
        return self.thread.run(self._drop(tickets)) if tickets else []

    def close(self) -> None:
        """Stop sampling all groups."""
        if self.thread.loop.running:
            self.drop(list(self._sampling))
        self._judge.shutdown(cancel_futures=True)

    # -- in the thread of the engine

    def _start(self, tickets: Sequence[Ticket]) -> None:
        try:
            if self._player is None:
                self._player = self.collector.player(self.thread.client)
            for ticket in tickets:
                group = self._groups[ticket] = self._player.start(ticket.prompt, ticket.request)
                group.result.add_done_callback(partial(self._on_end, ticket))
        except Exception as error:  # of any kind: the learner must not wait forever
            self._finished.put(error)

    def _on_end(self, ticket: Ticket, result: asyncio.Future[None]) -> None:
        if result.cancelled() or ticket not in self._groups:
            return  # dropped
        if (error := result.exception()) is not None:
            self._finished.put(error)
            return
        self._played.append(ticket)
        if len(self._played) == 1:
            self.thread.loop.post(self._judge_played)  # together with all groups that end now

    def _judge_played(self) -> None:
        tickets, self._played = self._played, []
        played = [(ticket, group) for ticket in tickets if (group := self._groups.pop(ticket, None)) is not None]
        if played:
            self._judge.submit(self._finish, played)

    async def _drop(self, tickets: Sequence[Ticket]) -> list[int]:
        lengths: list[int] = []
        for ticket in tickets:
            if (group := self._groups.pop(ticket, None)) is not None:
                lengths += group.sampled_tokens(self.thread.client)
                group.cancel()
        return lengths

    # -- in the thread of the judge

    def _finish(self, played: Sequence[tuple[Ticket, GroupInPlay]]) -> None:
        try:
            groups = self.collector.finish([group for _, group in played])
            self.finished_at = time.perf_counter()
        except BaseException as error:  # of any kind: the learner must not wait forever
            self._finished.put(error)
        else:
            self._finished.put([(ticket, group) for (ticket, _), group in zip(played, groups, strict=True)])
