"""Judging on all nodes of a Ray cluster (`reward.pool = "ray"`): an actor on each node holds a pool of processes.

Neither the driver nor the actors run the judge: that is left to the sandboxed workers of the pools. The values of
environment variables stay on their node; only the names of those to pass are sent.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Generic, TypeVar

from assay.integrations.ray.cluster import KEEP_SUPERVISORS, connect, membership, nodes, ray_package
from assay.system.sandbox import WorkerSettings, environment
from assay.system.worker_pool import (
    REPORT_S,
    START_LIMIT_S,
    SUPPORT,
    Item,
    ItemFailure,
    StartFailed,
    WorkerPool,
    split_items,
)
from assay.types import UserError, clip, describe_error

T = TypeVar("T")
IN_FLIGHT = 2  # batches per node: the next one is there when a batch has been judged
BATCHES = 4  # into which a call is split per node, so that faster nodes judge more
MAX_LOSSES = 5  # after which the answers of a batch have status error: they may be why its actors die
REFRESH_S = 2.0  # between searches for nodes without an actor
NODE_LIMIT_S = 300.0  # to wait for a node when all are lost


class NodePool(Generic[T]):
    """The pool of a node. Runs in an actor."""

    def __init__(
        self, settings: WorkerSettings, workers: int, parse: Callable[[Any], T], pass_env: Sequence[str]
    ) -> None:
        self._unset = [name for name in pass_env if name not in os.environ]
        settings = replace(settings, environment=environment(settings.level, pass_env))
        self._pool = WorkerPool(settings, workers, parse)

    def unset(self) -> list[str]:
        """Names of environment variables that are to be passed but are not set on this node."""
        return self._unset

    def map(self, items: Sequence[Item]) -> tuple[list[T | ItemFailure] | str, set[str]]:
        """Results, or why no worker can be started; and the warnings about this node."""
        try:
            return self._pool.map(items), set(SUPPORT.warned)
        except StartFailed as error:
            return str(error), set(SUPPORT.warned)


@dataclass(eq=False)
class _JudgeActor:
    """An actor as seen from the driver."""

    node: str  # its id
    address: str
    actor: Any
    unset: Any  # the reply to the call of `unset`
    joined: bool  # after the first call of `map`
    ready: bool = False
    in_flight: int = 0  # batches
    total: int = 0  # batches so far


@dataclass
class _JudgeBatch:
    """Some items of a call of `map` with their indices, judged together by one actor."""

    items: list[tuple[int, Item]]
    losses: int = 0


class ClusterPool(Generic[T]):
    """A `WorkerPool` with `workers` processes on every node of the cluster that has CPUs, also nodes that join later.

    Each batch goes to the actor with the fewest in flight, and to another one if it is lost. Variables are those
    of the nodes, not those of `settings`.
    """

    def __init__(
        self, settings: WorkerSettings, workers: int, parse: Callable[[Any], T], pass_env: Sequence[str] = ()
    ) -> None:
        self._ray = connected("reward.pool")
        self._workers = workers
        self._arguments = (replace(settings, environment={}), workers, parse, tuple(pass_env))
        self._actors: dict[str, _JudgeActor] = {}  # by node
        self._changed = threading.Condition()
        self._refused: set[str] = set()  # nodes that joined but cannot judge
        self._next_search: float | None = None
        self._last_loss = "no actor is ready"
        self._closed = False

    def map(self, items: Sequence[Item], report: Callable[[int], None] | None = None) -> list[T | ItemFailure]:
        """As `WorkerPool.map`."""
        with self._changed:
            self._find_actors()
            receivers = sum(actor.ready for actor in self._actors.values())
        waiting = deque(map(_JudgeBatch, split_items(items, max(receivers, 1), BATCHES, scale=self._workers)))
        running: dict[Any, tuple[_JudgeActor, _JudgeBatch]] = {}
        results: dict[int, T | ItemFailure] = {}
        next_report = time.monotonic() + REPORT_S
        try:
            while waiting or running:
                while waiting and (actor := self._reserve(wait=not running)):
                    batch = waiting.popleft()
                    running[actor.actor.map.remote([item for _, item in batch.items])] = actor, batch
                for done in self._ray.wait([*running], timeout=REPORT_S)[0]:
                    actor, batch = running.pop(done)
                    self._release(actor)
                    judged = self._results(done, actor, batch)
                    if judged is None:
                        waiting.appendleft(batch)
                    else:
                        results.update(zip((index for index, _ in batch.items), judged, strict=True))
                if report is not None and time.monotonic() >= next_report:
                    report(len(results))
                    next_report = time.monotonic() + REPORT_S
        finally:
            for actor, _ in running.values():
                self._release(actor)
        return [results[index] for index in range(len(items))]

    def close(self) -> None:
        """End the actors with their workers. Calls of `map` that still wait in other threads fail."""
        with self._changed:
            self._closed = True
            for actor in self._actors.values() if self._ray.is_initialized() else ():
                self._ray.kill(actor.actor)
            self._actors.clear()
            self._changed.notify_all()

    def _results(self, done: Any, actor: _JudgeActor, batch: _JudgeBatch) -> Sequence[T | ItemFailure] | None:
        """What an actor has returned; None if it is lost and another one has to judge the items."""
        errors = self._ray.exceptions
        try:
            results, notes = self._ray.get(done)
        except errors.RayTaskError:  # a defect of this module
            raise
        except errors.RayError as error:
            self._drop(actor, reason(error))
            batch.losses += 1
            detail = f"{MAX_LOSSES} judge actors were lost while they judged it: {self._last_loss}"
            return [ItemFailure(False, detail)] * len(batch.items) if batch.losses == MAX_LOSSES else None
        for note in notes - SUPPORT.warned:
            SUPPORT.warned.add(note)
            warnings.warn(f"on node {actor.address}, {note}", stacklevel=2)
        if isinstance(results, str):
            self._refuse(actor, StartFailed(f"{results} (on node {actor.address})"))
            return None
        return results

    def _reserve(self, wait: bool) -> _JudgeActor | None:
        """The actor for the next batch; None if all have enough. `wait`: until one has not."""
        deadline = time.monotonic() + NODE_LIMIT_S
        with self._changed:
            while True:
                self._find_actors()
                ready = [actor for actor in self._actors.values() if actor.ready]
                if free := [actor for actor in ready if actor.in_flight < IN_FLIGHT]:
                    actor = min(free, key=lambda actor: (actor.in_flight, actor.total))
                    actor.in_flight += 1
                    actor.total += 1
                    return actor
                if not wait:
                    return None
                if ready:  # batches of other threads keep them busy
                    deadline = time.monotonic() + NODE_LIMIT_S
                if time.monotonic() > deadline:
                    raise UserError(
                        f"no node of the Ray cluster could judge for {NODE_LIMIT_S:g} s ({self._last_loss}): add a "
                        "node with CPUs, or set reward.pool = 'local'"
                    )
                self._changed.wait(REPORT_S / 5)

    def _release(self, actor: _JudgeActor) -> None:
        with self._changed:
            actor.in_flight -= 1
            self._changed.notify_all()

    def _find_actors(self) -> None:
        """Start actors on nodes that have none, and notice which ones are ready. Called with the lock."""
        self._check_open()
        first, now = self._next_search is None, time.monotonic()
        if self._next_search is None or now >= self._next_search:
            self._next_search = now + REFRESH_S
            for node in nodes():
                if node["NodeID"] not in {*self._actors, *self._refused} and node["Resources"].get("CPU"):
                    self._actors[node["NodeID"]] = self._start(node["NodeID"], node["NodeManagerAddress"], not first)
        starting = {actor.unset: actor for actor in self._actors.values() if not actor.ready}
        if starting:  # the first call waits for all, so that problems of any node are found before a run
            limit_s = START_LIMIT_S if first else 0
            for done in self._ray.wait([*starting], num_returns=len(starting), timeout=limit_s)[0]:
                self._check(starting[done])

    def _start(self, node: str, address: str, joined: bool) -> _JudgeActor:
        handle = actor_on(node, NodePool, IN_FLIGHT).remote(*self._arguments)
        return _JudgeActor(node, address, handle, handle.unset.remote(), joined)

    def _check(self, actor: _JudgeActor) -> None:
        """Notice that an actor has started, or why not."""
        try:
            unset = self._ray.get(actor.unset)
        except self._ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):
                why = f"judging cannot start on node {actor.address} ({reason(error)}): install assay there as here"
                self._refuse(actor, UserError(why))
            else:
                self._drop(actor, reason(error))
            return
        if unset:
            remedy = "set it there before `ray start`, or remove it from pass_env"
            why = f"reward.pass_env names {unset[0]}, which is not set on node {actor.address}: {remedy}"
            self._refuse(actor, UserError(why))
        actor.ready = True

    def _refuse(self, actor: _JudgeActor, error: UserError) -> None:
        """Raise an error of a node of the first call; do without a node that has joined later."""
        if not actor.joined:
            raise error
        self._refused.add(actor.node)
        self._drop(actor, str(error))

    def _drop(self, actor: _JudgeActor, reason: str) -> None:
        """Give up an actor."""
        with self._changed:
            self._check_open()
            if self._actors.get(actor.node) is not actor:
                return  # another thread has given it up
            del self._actors[actor.node]
            self._ray.kill(actor.actor)
            self._last_loss = f"node {actor.address}: {reason}"
        warnings.warn(f"a judge actor is lost, and others judge its answers ({self._last_loss})", stacklevel=2)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the worker pool was closed")


def actor_on(node: str, kind: type, threads: int) -> Any:
    """A class of actors of a node, which reserve no CPUs there. `threads`: number of concurrent calls."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray_package()
        .remote(kind)
        .options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=threads,
            runtime_env=KEEP_SUPERVISORS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
    )


def connected(setting: str) -> ModuleType:
    """The package ray, connected to the cluster of the run or to the one that RAY_ADDRESS or this machine has.

    `setting`: that needs it, for messages.
    """
    ray, member = ray_package(setting), membership()
    try:
        connect(member["address"] if member else "auto", None if member else lambda text: warnings.warn(text))  # noqa: B028
    except UserError as error:
        raise UserError(
            f"{setting} = 'ray' finds no Ray cluster ({describe_error(error.__cause__ or error)}): start one with "
            f"`ray start --head`, set RAY_ADDRESS, or set {setting} = 'local'"
        ) from error
    return ray


def reason(error: Exception) -> str:
    """Why an actor has died, without the ids and the traceback that Ray adds."""
    last = str(error).strip().splitlines()[-1].strip()
    return clip(last if getattr(error, "actor_init_failed", False) else last.partition(". ")[0], 200)
