"""Asynchronous training: another thread samples groups while the learner updates the policy.

Groups are started with the weights that the engine serves at that moment, and may be finished by later weights: the
engine is updated while it generates. The staleness of a group is the version of the learner that trains on it minus the
version that sampled its oldest token. It never exceeds `source.max_staleness` = k:

- When the learner has version v, at most (k + 1) batches of groups are being sampled or wait to be trained. They fill
  the batches of versions v to v + k.
- A batch consists of the groups that are finished first, and of the oldest of these if there are more.
- A group that would become too old is sampled again from its start, with the same seed. After `MAX_RESTARTS` of these,
  the learner waits for the group instead, so that long answers cannot be restarted forever. With
  `source.cancel_stale`, a group that is not finished by then is dropped, and another prompt takes its place.

With several training processes, the main rank samples all groups, which needs engine servers, and shares each batch.

k is at least 1. With `source.max_staleness = 0`, a run uses the on-policy source.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from assay.engine.base import Request
from assay.engine.client import ClientThread
from assay.rollout import Collector
from assay.rollout.episodes import GroupInPlay, GroupPlayer
from assay.training.progress import RunState
from assay.training.sources import OnPolicySource, SampledGroups, version_of
from assay.types import Group, Prompt, UserError


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
        self.sampling: dict[Ticket, Future[Group]] = {}  # started, and neither returned nor dropped
        self._judge = ThreadPoolExecutor(1, "assay-judge")
        # These belong to the thread of the engine.
        self._player: GroupPlayer | None = None
        self._groups: dict[Ticket, GroupInPlay] = {}
        self._played: list[GroupInPlay] = []  # not judged yet
        self._judging: asyncio.Future[dict[GroupInPlay, Group]]

    def start(self, tickets: Sequence[Ticket]) -> None:
        """Start to sample these groups."""
        new: dict[Ticket, Future[Group]] = {ticket: Future() for ticket in tickets}
        self.sampling |= new
        self.thread.loop.post(partial(self._start, new))

    def next(self, wait: bool = True) -> list[tuple[Ticket, Group]]:
        """The groups that have finished since the last call, judged. Empty if no group is being sampled.

        `wait`: until there is one; then an error that has ended the sampling of a group is raised.
        """
        if wait:
            futures.wait(self.sampling.values(), return_when=futures.FIRST_COMPLETED)
        ended = [(ticket, future) for ticket, future in self.sampling.items() if future.done()]
        finished = [(ticket, future.result()) for ticket, future in ended if wait or not future.exception()]
        for ticket, _ in finished:
            del self.sampling[ticket]
        return finished

    def drop(self, tickets: Iterable[Ticket]) -> list[int]:
        """Stop sampling groups. Returns the number of tokens of each of their sequences so far, if it is known."""
        tickets = [ticket for ticket in tickets if self.sampling.pop(ticket, None)]
        return self.thread.run(self._drop(tickets)) if tickets else []

    def close(self) -> None:
        """Stop sampling all groups."""
        if self.thread.loop.running:
            self.drop(list(self.sampling))
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


MAX_RESTARTS = 2  # of a group, before the learner waits for it
QUARTERS = 4  # restarted sequences are counted by their length, in quarters of the limit


@dataclass
class Tally:
    """What engine and learner did since the last batch, for metrics."""

    began: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0  # the learner waited for groups
    idle_s: float = 0.0  # nothing was being sampled
    sampled_tokens: int = 0  # of finished groups
    restarted: list[int] = field(default_factory=list)  # lengths of sequences that were sampled again
    cancelled: list[int] = field(default_factory=list)  # lengths of sequences of groups that were dropped
    expired: int = 0  # finished groups that were sampled again


class Interrupted(Exception):
    """A stop request came while the learner waited for groups."""


class AsyncSource(OnPolicySource):
    """Takes batches of the groups that another thread samples. See the description of this module."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_staleness, self.cancels = self.cfg.source.max_staleness, self.cfg.source.cancel_stale
        # Evaluations share the engine with the groups that are sampled meanwhile.
        self.thread = self.collector.thread = ClientThread(self.collector.engine)
        self.stream = GroupStream(self.collector, self.thread)
        self._ready: list[tuple[Ticket, Group]] = []  # finished, not yet taken into a batch
        self._activity = Tally()
        self._unstarted: list[Ticket] = []  # of a resumed run
        self._next_number = 0
        self._seen_version = -1  # `_seen` are the prompts that were started with the weights of this version
        self._numbers: dict[int, int] = {}  # of the tickets of the batch, by the id of its groups
        self._idle_since = time.perf_counter()
        self._before: tuple[dict[str, Any], list[Group]] | None = None  # state at the start of an interrupted `next`
        self._saved: list[Group] = []  # the finished groups of the last `state_dict`

    def next(self, state: RunState) -> SampledGroups:
        """Wait for the groups of a batch, and start the groups of later batches."""
        self.stopping.check()
        outcome = self.collector.mesh.on_main(lambda: self._next(state))
        if outcome is None:
            self.stopping.check()
            raise RuntimeError("sampling was interrupted without a stop request")
        sampled, state.answers, state.tokens, self.prompts.cursor = outcome
        return sampled

    def _next(self, state: RunState) -> tuple[SampledGroups, int, int, int] | None:
        """On the main rank: the batch, numbers of answers and tokens of the run, and the position of the next prompt.

        None if a stop request has interrupted it.
        """
        self._before = self._state()
        self._restart_stale(state.step)
        self._numbers.clear()
        try:
            sampled = self._fill_batch(state)
        except Interrupted:
            return None
        sampled.groups.sort(key=lambda group: self._numbers[id(group)])
        self._start_groups(state)  # the engine goes on while the learner updates
        self._measure(sampled, state.step)
        self._before = None
        return sampled, state.answers, state.tokens, self.prompts.cursor

    def _take(self, count: int, state: RunState, answers: int) -> list[Group]:
        """Wait for `count` groups and take the oldest; fewer if the run needs no more."""
        self._receive(wait=False)
        while self._needs_more(count, state.step):
            self._start_groups(state, count, answers)
            if not self.stream.sampling:
                break
            started = time.perf_counter()
            if self.stopping.interruptible(self._receive) is None:
                raise Interrupted
            self._activity.waited_s += time.perf_counter() - started
        self._ready.sort(key=lambda pair: (pair[0].version, pair[0].number))
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._numbers |= {id(group): ticket.number for ticket, group in taken}
        groups = sorted((group for _, group in taken), key=lambda group: self._numbers[id(group)])
        self.collector.check_verdicts(groups)
        return groups

    def _needs_more(self, count: int, step: int) -> bool:
        """Whether groups are missing, or a group must be waited for because it cannot be restarted again."""
        if len(self._ready) < count:
            return True
        sampling = self.stream.sampling
        return any(t.restarts >= MAX_RESTARTS and step - t.version >= self.max_staleness for t in sampling)

    def _receive(self, wait: bool = True) -> bool:
        """Take the groups that have finished, and `wait` until there is one. Returns True: it was not interrupted."""
        for ticket, group in self.stream.next(wait):
            self._ready.append((ticket, group))
            self._activity.sampled_tokens += sum(rollout.length for rollout in group.rollouts)
            if not self.stream.sampling:
                self._idle_since = self.stream.finished_at
        return True

    def _restart_stale(self, step: int) -> None:
        """Sample groups again, or drop them, that would be staler than allowed in the next batch."""

        def is_stale(ticket: Ticket) -> bool:
            return step - ticket.version > self.max_staleness

        self._receive(wait=False)
        stale = [ticket for ticket in self.stream.sampling if is_stale(ticket)]
        expired = [ticket for ticket, _ in self._ready if is_stale(ticket)]
        self._ready = [pair for pair in self._ready if not is_stale(pair[0])]
        lengths = self._activity.cancelled if self.cancels else self._activity.restarted
        lengths += self.stream.drop(stale)
        self._activity.expired += len(expired)
        again = expired if self.cancels else [*stale, *expired]
        self._start([replace(ticket, version=step, restarts=ticket.restarts + 1) for ticket in again])

    def _start_groups(self, state: RunState, wanted: int = 0, answers: int = 0) -> None:
        """Start as many groups as may be sampled now: `wanted` for the step, and more for later steps."""
        unstarted, self._unstarted = self._unstarted, []
        self._start([replace(ticket, version=state.step) for ticket in unstarted])
        present = len(self.stream.sampling) + len(self._ready)
        allowed = self.prompts_per_step * self.max_staleness + wanted
        allowed = min(allowed, self._groups_left(state, wanted, answers))
        if allowed > present:
            self._start(self._new_tickets(allowed - present, state.step))

    def _groups_left(self, state: RunState, wanted: int, answers: int) -> int:
        """Number of groups that the rest of the run needs, at least."""
        if self.schedule.budget:
            return -(-(self.schedule.budget - state.answers - answers) // self.params.n)
        return (self.schedule.total_steps - state.step - 1) * self.prompts_per_step + wanted

    def _new_tickets(self, count: int, step: int) -> list[Ticket]:
        if self._seen_version != step:
            self._seen, self._seen_version = Counter(), step
        accepted = self._next_accepted(count, step)
        prompts = [prompt for _, prompt in accepted]
        requests = self._requests(prompts, step, self._seen)
        numbers = range(self._next_number, self._next_number + count)
        self._next_number += count
        return [
            Ticket(number, position, prompt, request, step)
            for number, (position, _), (prompt, request) in zip(numbers, accepted, requests, strict=True)
        ]

    def _requests(self, prompts: Sequence[Prompt], step: int, seen: Counter[str]) -> list[tuple[Prompt, Request]]:
        """Requests that report their tokens as they are sampled, since they may be restarted."""
        requests = self.collector.requests_for(prompts, self.params, (self.seed, step), seen)
        return [(prompt, replace(request, stream=True)) for prompt, request in requests]

    def _start(self, tickets: Sequence[Ticket]) -> None:
        if not tickets:
            return
        if not self.stream.sampling:
            self._activity.idle_s += time.perf_counter() - max(self._idle_since, self._activity.began)
        self.stream.start(tickets)

    def _measure(self, sampled: SampledGroups, step: int) -> None:
        """Set the metrics of a batch."""
        done, now = self._activity, time.perf_counter()
        self._activity = Tally(now)
        sampled.seconds, self.collector.seconds = dict(self.collector.seconds), {}
        ages = [step - version_of(group) for group in sampled.groups]
        elapsed = max(now - done.began, 1e-9)
        sampled.seconds["wait"] = done.waited_s
        sampled.metrics = {
            "async/staleness": sum(ages) / max(len(ages), 1),
            "async/staleness_max": float(max(ages, default=0)),
            **{f"async/staleness_{age}": ages.count(age) / len(ages) for age in range(self.max_staleness + 1) if ages},
            "async/queued": float(len(self._ready)),
            "async/running": float(len(self.stream.sampling)),
            "async/engine_idle": min(done.idle_s / elapsed, 1.0),
            "async/learner_idle": min(done.waited_s / elapsed, 1.0),
            "async/tokens_per_s": done.sampled_tokens / elapsed,
            "async/expired": float(done.expired),
            **self._by_length("async/restarted", done.restarted),
            **(self._by_length("async/cancelled", done.cancelled) if self.cancels else {}),
        }

    def _by_length(self, name: str, lengths: Sequence[int]) -> dict[str, float]:
        """The number of sequences, and of those in each quarter of the longest possible length."""
        limit = self.params.max_new_tokens
        quarters = Counter(min(QUARTERS * length // limit, QUARTERS - 1) for length in lengths)
        counts = {f"{name}_q{quarter + 1}": float(count) for quarter, count in sorted(quarters.items())}
        return {name: float(len(lengths))} | counts

    def close(self) -> None:
        """End the thread. Groups that are being sampled are dropped."""
        self.stream.close()
        self.thread.close()
        self.collector.thread = None

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Includes every group that was started and not trained. If `next` was interrupted: as before that."""
        state, self._saved = self._before or self._state()
        return state

    def saved_groups(self) -> list[Group]:
        """The finished groups of the last `state_dict`, in its order."""
        return self._saved

    def _state(self) -> tuple[dict[str, Any], list[Group]]:
        self._receive(wait=False)
        running = sorted([*self.stream.sampling, *self._unstarted], key=lambda ticket: ticket.number)
        source_state = {
            "next_number": self._next_number,
            "running": [saved_ticket(ticket) for ticket in running],
            "finished": [saved_ticket(ticket) for ticket, _ in self._ready],
            "seen": dict(self._seen),
            "seen_version": self._seen_version,
        }
        return {"cursor": self.prompts.cursor, "source": source_state}, [group for _, group in self._ready]

    def load_state_dict(self, saved: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        super().load_state_dict(saved)
        if self.stream.sampling:  # all servers had failed: groups are sampled again
            self.stream.close()
            self.stream, self._before = GroupStream(self.collector, self.thread), None
        if (source_state := saved.get("source")) is None:  # the run was synchronous until now
            return
        self._next_number = source_state["next_number"]
        self._seen, self._seen_version = Counter(source_state["seen"]), source_state["seen_version"]
        self._unstarted = [self._restored(**ticket) for ticket in source_state["running"]]
        finished = [self._restored(**ticket) for ticket in source_state["finished"]]
        if len(groups) != len(finished):
            raise UserError(
                f"the checkpoint has {len(groups)} finished groups, and its state names {len(finished)}: resume "
                "from another checkpoint"
            )
        self._ready = list(zip(finished, groups, strict=True))

    def _restored(self, number: int, position: int, seed: int, version: int, restarts: int) -> Ticket:
        prompt = self.prompts.at(position)
        ((_, request),) = self._requests([prompt], 0, Counter())
        return Ticket(number, position, prompt, replace(request, seed=seed), version, restarts)


def saved_ticket(ticket: Ticket) -> dict[str, int]:
    """A ticket as JSON: its prompt is found by its position."""
    entries = {name: getattr(ticket, name) for name in ("number", "position", "version", "restarts")}
    return entries | {"seed": ticket.request.seed}
