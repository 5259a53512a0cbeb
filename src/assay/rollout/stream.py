"""Groups as a stream: they are started at any time, and each is returned, judged, when it is finished.

One thread calls `next`; all other methods may be called by any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from assay.engine.base import Engine, Failed, Finished, Request, RequestError, TokenChunk
from assay.engine.outputs import handles_of
from assay.rollout.collect import Collector
from assay.rollout.episodes import Episode, EpisodeBatch
from assay.types import Completion, Group, Prompt


@dataclass(eq=False)
class Ticket:
    """A group that is to be sampled."""

    number: int  # in the order in which groups were started for the first time
    position: int  # of its prompt in the stream of prompts
    prompt: Prompt
    request: Request
    version: int  # of the engine's weights when it was started: no token of it is older
    restarts: int = 0


class GroupStream(Protocol):
    """Samples groups of which other threads start and drop some while others are sampled."""

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Start to sample these groups."""

    def next(self) -> list[tuple[Ticket, Group]]:
        """Wait until some group is finished, and return those that are, judged. Empty if no group is being sampled."""

    def drop(self, tickets: Iterable[Ticket]) -> list[int]:
        """Stop sampling groups. Returns the number of tokens of each of their sequences so far, if it is known."""

    def close(self) -> None:
        """Stop sampling all groups."""


def open_stream(collector: Collector, engine: Engine) -> GroupStream:
    """A stream of groups of the collector's kind, sampled by this client of its engine."""
    if collector.env is None:
        return CompletionStream(collector, engine)
    return EpisodeStream(collector, engine)


@dataclass(eq=False)
class Sampling:
    """A group of completions that is being sampled."""

    ticket: Ticket
    completions: dict[int, Completion] = field(default_factory=dict)  # by sample
    tokens: dict[int, int] = field(default_factory=dict)  # of unfinished samples, if the engine streams them

    @property
    def lengths(self) -> list[int]:
        return [*(len(one.token_ids) for one in self.completions.values()), *self.tokens.values()]


class CompletionStream:
    """Groups of single completions."""

    def __init__(self, collector: Collector, engine: Engine) -> None:
        self.collector, self.engine = collector, engine
        self._lock = threading.Lock()
        self._running: dict[int, Sampling] = {}  # by request id

    def start(self, tickets: Sequence[Ticket]) -> None:
        with self._lock:  # until all ids are known: the first event may arrive immediately
            for ticket in tickets:
                self._running[self.engine.add(ticket.request)] = Sampling(ticket)

    def next(self) -> list[tuple[Ticket, Group]]:
        finished: list[Sampling] = []
        while not finished and (events := self.engine.step()):
            with self._lock:
                for event in events:
                    group = self._running.get(event.request_id)
                    if group is None:
                        continue  # dropped
                    if isinstance(event, Failed):
                        raise RequestError({event.request_id: event.error})
                    if isinstance(event, TokenChunk):
                        group.tokens[event.sample] = group.tokens.get(event.sample, 0) + len(event.token_ids)
                    elif isinstance(event, Finished):
                        group.tokens.pop(event.sample, None)
                        group.completions[event.sample] = event.completion
                        if len(group.completions) == group.ticket.request.params.n:
                            finished.append(self._running.pop(event.request_id))
        tickets = [one.ticket for one in finished]
        completions = [[one.completions[sample] for sample in sorted(one.completions)] for one in finished]
        groups = self.collector.as_groups([(ticket.prompt, ticket.request) for ticket in tickets], completions)
        self.collector.judge_groups(groups)
        return list(zip(tickets, groups, strict=True))

    def drop(self, tickets: Iterable[Ticket]) -> list[int]:
        unwanted = set(tickets)
        with self._lock:
            ids = [request_id for request_id, one in self._running.items() if one.ticket in unwanted]
            dropped = [self._running.pop(request_id) for request_id in ids]
        self.engine.abort(ids)
        return [length for one in dropped for length in one.lengths]

    def close(self) -> None:
        self.drop([one.ticket for one in list(self._running.values())])


class EpisodeStream:
    """Groups of episodes of the collector's environment."""

    def __init__(self, collector: Collector, engine: Engine) -> None:
        assert collector.env is not None
        self.collector, self.engine = collector, engine
        self._lock = threading.Lock()
        self._batch = EpisodeBatch(collector.episode_runner(engine, collector.env), ())
        self._waiting: deque[Ticket] = deque()  # of the groups in `EpisodeBatch.waiting`
        self._running: dict[Ticket, list[Episode]] = {}

    def start(self, tickets: Sequence[Ticket]) -> None:
        with self._lock:
            for ticket in tickets:
                self._waiting.append(ticket)
                self._batch.waiting.append((ticket.prompt, ticket.request))
            self._batch.start_episodes()
            self._note_started()

    def next(self) -> list[tuple[Ticket, Group]]:
        finished: list[Ticket] = []
        while not finished and (self._batch.requests or self._batch.stepper.busy):
            wait = not self._batch.stepper.busy
            events = self.engine.step(wait) if self._batch.requests else []
            with self._lock:
                late = [event for event in events if event.request_id not in self._batch.requests]  # dropped meanwhile
                self.engine.release(handles_of(late))
                self._batch.process([event for event in events if event.request_id in self._batch.requests])
                self._batch.apply_steps(wait=not self._batch.requests)
                self._batch.start_episodes()
                self._note_started()
                if self._batch.errors:
                    raise RequestError(self._batch.errors)
                finished = [one for one, group in self._running.items() if all(episode.over for episode in group)]
                groups = [self._running.pop(ticket) for ticket in finished]
        if not finished:
            return []
        judged = self.collector.judge_episodes([ticket.prompt for ticket in finished], groups)
        return list(zip(finished, judged, strict=True))

    def drop(self, tickets: Iterable[Ticket]) -> list[int]:
        lengths: list[int] = []
        with self._lock:
            for ticket in tickets:
                if ticket in self._waiting:
                    del self._batch.waiting[self._waiting.index(ticket)]
                    self._waiting.remove(ticket)
                elif ticket in self._running:
                    episodes = self._running.pop(ticket)
                    lengths += [episode.sampled_tokens for episode in episodes]
                    self._batch.drop(episodes)
        return lengths

    def close(self) -> None:
        self.drop([*self._waiting, *self._running])
        self._batch.stepper.close()

    def _note_started(self) -> None:
        """Assign the groups that have started to their tickets."""
        for episodes in self._batch.groups:
            self._running[self._waiting.popleft()] = episodes
        self._batch.groups.clear()
