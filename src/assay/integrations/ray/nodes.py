"""Judging (`reward.pool = "ray"`) and environments (`env.pool = "ray"`) on all nodes of a Ray cluster.

For judging, an actor on each node holds a pool of processes. Neither the driver nor the actors run the judge: that is
left to the sandboxed workers of the pools. The values of environment variables stay on their node; only the names of
those to pass are sent.

Episodes are played by another actor on each node. A node that is lost costs time, not episodes: they are repeated on
another node, with the same seed and actions. If an environment then answers differently, the episode ends with status
error.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Generic, Self, TypeVar

from assay.envs import Env
from assay.envs.base import EnvWrapper, Info, Observation, Step, safe_reset, safe_step
from assay.integrations.ray.cluster import KEEP_SUPERVISORS, connect, membership, nodes, ray_package
from assay.system.awaiting import resolve
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
from assay.types import Prompt, UserError, clip, describe_error

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


CLOSE_S = 10.0  # time limit
THREADS = 8  # episodes that a node steps at the same time
RETRY_S = 1.0  # after a loss: Ray notices lost nodes late
Start = tuple[int | None, dict[str, Any] | None]  # arguments of `reset`


class NodeEpisodes:
    """The episodes of a node. Runs in an actor."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._env = make()
        self._episodes: dict[int, Env] = {}

    def play(self, key: int, start: Start | None, actions: Sequence[str], ended: Sequence[int]) -> list[Any]:
        """Start an episode, unless `start` is None, and apply actions. Returns what `reset` and `step` returned.

        `ended`: other episodes, which are not needed any more.
        """
        for other in ended:
            self._episodes.pop(other, None)
        results = []
        if start is not None:
            self._episodes[key] = self._env.copy()
            results.append(resolve(safe_reset(self._episodes[key], *start)))
        return results + [resolve(safe_step(self._episodes[key], action)) for action in actions]

    def close(self) -> None:
        self._episodes.clear()
        resolve(self._env.close())


@dataclass(eq=False)
class Node:
    """A node as seen from the training process."""

    actor: Any  # a `NodeEpisodes`
    assigned: int = 0  # episodes, also ended ones
    ended: deque[int] = field(default_factory=deque)  # keys of episodes that the actor still has
    lost: bool = False

    @property
    def episodes(self) -> int:
        return self.assigned - len(self.ended)


class Nodes:
    """All nodes that have CPUs, also those that join later."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.ray = connected("env.pool")
        self.make = make
        self.found: dict[str, Node] = {}
        self.refused: set[str] = set()  # nodes that cannot make the environment
        self.keys = itertools.count()
        self.next_search = 0.0
        self.proven = False  # whether one of them has made it

    def assign(self, episode: object) -> tuple[Node, int]:
        """The node with the fewest episodes, and the key of this one there. It ends when the object is deleted."""
        self._search()
        node = min(self.found.values(), key=lambda node: node.episodes, default=None)
        if node is None:
            raise LookupError("it has no node with CPUs")
        key = next(self.keys)
        node.assigned += 1
        weakref.finalize(episode, node.ended.append, key)
        return node, key

    async def play(self, node: Node, key: int, start: Start | None, actions: Sequence[str]) -> list[Any]:
        """Raises a `LookupError` if the node is lost."""
        if node.lost:
            raise LookupError("its node is lost")
        ended = [node.ended.popleft() for _ in range(len(node.ended))]
        node.assigned -= len(ended)
        try:
            results = await node.actor.play.remote(key, start, actions, ended)
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause or error from None
        except self.ray.exceptions.RayError as error:
            self._lose(node, error)
            raise LookupError(reason(error)) from error
        self.proven = True
        return results

    def close(self) -> None:
        actors = [node.actor for node in self.found.values()] if self.ray.is_initialized() else []
        for node in self.found.values():
            node.lost = True
        self.found, self.next_search = {}, math.inf
        if actors:
            self.ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_S)
        for actor in actors:
            self.ray.kill(actor)

    def _search(self) -> None:
        if time.monotonic() < self.next_search:
            return
        self.next_search = time.monotonic() + REFRESH_S
        for node in nodes():
            name = node["NodeID"]
            if name not in {*self.found, *self.refused} and node["Resources"].get("CPU"):
                self.found[name] = Node(actor_on(name, NodeEpisodes, THREADS).remote(self.make))

    def _lose(self, node: Node, error: Exception) -> None:
        """Give up a node. Raises a `UserError` if no node can make the environment."""
        if node.lost:  # another episode has noticed
            return
        node.lost = True
        name = next(name for name, found in self.found.items() if found is node)
        del self.found[name]
        if getattr(error, "actor_init_failed", False):
            self.refused.add(name)
            if not self.proven:
                raise UserError(
                    f"env.pool = 'ray': a node cannot make the environment ({reason(error)}): it needs the same assay, "
                    "packages and files as this machine"
                ) from error
        warnings.warn(f"an actor with episodes is lost, and others repeat them ({reason(error)})", stacklevel=2)


class ClusterEnv(EnvWrapper):
    """An environment whose episodes are played on the nodes. Problems and judges are those of `env`, in this process.

    `make` makes the same environment on a node. A lost node is noticed in `reset` and `step`, which wait for another.
    """

    def __init__(self, env: Env, make: Callable[[], Any]) -> None:
        super().__init__(env)
        self.slow = True
        self._nodes = Nodes(make)
        self._place: tuple[Node, int] | None = None
        self._start: Start = (None, None)
        self._actions: list[str] = []
        self._observations: list[Observation] = []

    def copy(self) -> Self:
        other = copy.copy(self)
        other._place = None
        return other

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        self._start, self._actions, self._observations = (seed, options), [], []
        return await self._latest()

    async def step(self, action: str) -> Step:
        self._actions.append(action)
        return await self._latest()

    async def _latest(self) -> Any:
        """What `reset`, or `step` with the last action, returns. Repeats the episode where its node is lost."""
        losses, deadline = 0, time.monotonic() + NODE_LIMIT_S
        while True:
            starts = self._place is None or not self._observations
            try:
                node, key = self._place = self._place or self._nodes.assign(self)
                start, actions = (self._start, self._actions) if starts else (None, self._actions[-1:])
                results = await self._nodes.play(node, key, start, actions)
                break
            except LookupError as error:
                losses += self._place is not None
                self._place = None
                if losses == MAX_LOSSES or time.monotonic() > deadline:
                    raise UserError(f"no node of the Ray cluster could play the episode ({error})") from error
            await asyncio.sleep(RETRY_S)
        seen = [result[0] for result in results]
        if starts and seen[:-1] != self._observations:
            raise UserError("its node was lost, and the environment answered differently when it was repeated")
        self._observations.append(seen[-1])
        return results[-1]

    def gold_completion(self, prompt: Prompt) -> str:
        return self.env.gold_completion(prompt)

    def gold_episode(self, prompt: Prompt) -> Any:
        return self.env.gold_episode(prompt)

    def standalone(self) -> Env:  # type: ignore[override]
        return self.env.standalone()

    def close(self) -> None:
        self._nodes.close()
        resolve(self.env.close())
