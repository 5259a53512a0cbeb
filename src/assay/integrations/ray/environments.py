"""Environments on all nodes of a Ray cluster (`env.pool = "ray"`): an actor on each node plays episodes.

A node that is lost costs time, not episodes: they are repeated on another node, with the same seed and actions. If an
environment then answers differently, the episode ends with status error.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from assay.envs import Env
from assay.envs.base import EnvWrapper, Info, Observation, Step, safe_reset, safe_step
from assay.integrations.ray.cluster import nodes
from assay.integrations.ray.judges import MAX_LOSSES, NODE_LIMIT_S, REFRESH_S, actor_on, connected, reason
from assay.system.awaiting import resolve
from assay.types import Prompt, UserError

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
