"""Tensor-parallel serving for consumers on one rank: the leader sends its commands to the other ranks.

Experimental: tested with several processes on CPUs (gloo), never on two GPUs.

All ranks of the group run the whole engine, as described in `scheduler.Lockstep`. Where all ranks receive identical
calls anyway (training), nothing else is needed. A server runs on rank 0 alone: there a `TensorParallelLeader` has the
engine interface, and the other ranks run `follow` until the leader is closed. At each step boundary the leader
broadcasts one list of commands (requests, aborts, weight updates, ...), which all ranks apply before they take the same
step.

A broadcast is a header of three integers, followed by the commands (pickled) if there are any. An idle leader sends
nothing. If a step raises an exception on the leader, requests are dropped on all ranks. If a follower fails alone, its
`follow` raises, and the group can no longer be used.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from operator import index
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from assay.engine.base import (
    Engine,
    EngineInfo,
    EngineLoad,
    Event,
    Request,
    TokenScores,
    WeightSource,
)
from assay.engine.in_process import StepBoundary
from assay.engine.native.engine import NativeEngine
from assay.engine.sequence import Kept
from assay.system.spawn import handlers_restored

NO_TIMEOUT = timedelta(days=3650)  # followers wait for an idle leader; heartbeats detect a dead one
STEP = 1  # flag of a header: take a step after the commands
Command = tuple[Any, ...]  # its name, and its arguments


def new_cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A CPU group of the same ranks, without a timeout, for commands. All of its ranks must call this."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", timeout=NO_TIMEOUT, use_local_synchronization=True)


class Link:
    """Broadcasts from the first rank of `group` to all others."""

    def __init__(self, engine: NativeEngine, group: dist.ProcessGroup) -> None:
        assert engine.lockstep is not None, "the engine must be built with the group of the ranks"
        engine.lockstep.compares_requests = False
        self.engine, self.group, self.leads = engine, group, group.rank() == 0

    def exchange(
        self, flags: int = 0, failures: int = 0, commands: Sequence[Command] = ()
    ) -> tuple[int, int, Sequence[Command]]:
        """The leader sends its arguments, all other ranks receive them."""
        payload = pickle.dumps(commands) if commands else b""
        header = torch.tensor([flags, failures, len(payload)])
        dist.broadcast(header, group=self.group, group_src=0)
        flags, failures, size = header.tolist()
        if not size:
            return flags, failures, []
        data = np.frombuffer(payload, dtype=np.uint8).copy() if self.leads else np.empty(size, dtype=np.uint8)
        dist.broadcast(torch.from_numpy(data), group=self.group, group_src=0)
        return flags, failures, [] if self.leads else pickle.loads(data.tobytes())

    def tensor(self, tensor: Tensor) -> Tensor:
        """The leader's tensor, on every rank, through the group of the network's own collectives."""
        tensor = tensor.detach().to(self.engine.device).contiguous()
        dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.engine.group, group_src=0)
        return tensor


class SentWeights:
    """A weight source of the leader that sends each weight to the followers before it is used."""

    def __init__(self, link: Link, source: WeightSource) -> None:
        self.link, self.source = link, source

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = iter(self.source.weights())
        while True:
            try:
                name, weight = next(weights)
            except StopIteration:
                self.link.exchange(commands=[("end",)])
                return
            except BaseException as error:
                self.link.exchange(commands=[("error", str(error))])
                raise
            self.link.exchange(commands=[("weight", name, weight.shape, weight.dtype)])
            yield name, self.link.tensor(weight)


class ReceivedWeights:
    """The same weights on a follower."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            _, _, ((kind, *values),) = self.link.exchange()
            if kind == "end":
                return
            if kind == "error":
                raise RuntimeError(f"the leader's weight source failed: {values[0]}")
            name, shape, dtype = values
            yield name, self.link.tensor(torch.empty(shape, dtype=dtype, device=self.link.engine.device))


class SharedCommand:
    """A command that runs on all ranks: on this one by calling it."""

    def __init__(self, run: Callable[[], Any], name: str, *arguments: Any) -> None:
        self.run, self.sent = run, (name, *arguments)

    def __call__(self) -> Any:
        return self.run()


class LeaderBoundary(StepBoundary):
    """Sends queued commands, all of them in one list, before they run here. All of them are `SharedCommand`s."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.failures = 0  # commands that raised an exception

    def run_queued(self, flags: int = 0) -> None:
        queued = [self.queue.popleft() for _ in range(len(self.queue))]
        if queued or flags:
            with signals_deferred():
                self.link.exchange(flags, self.failures, [command.sent for command, _ in queued])  # type: ignore[attr-defined]
                for command, future in queued:
                    self.run(command, future)

    def run(self, work: Callable[[], Any], future: Future | None) -> None:
        super().run(work, future)
        self.failures += future is not None and future.exception() is not None


class TensorParallelLeader(Engine):
    """The engine interface on rank 0 of a group whose other ranks run `follow`.

    All ranks make their engines with the same arguments and `group`. `cpu_group`: see `new_cpu_group`.
    """

    def __init__(self, engine: NativeEngine, cpu_group: dist.ProcessGroup) -> None:
        self.engine, self._link = engine, Link(engine, cpu_group)
        assert self._link.leads, "only the first rank of the group leads; the others run follow()"
        self._boundary = LeaderBoundary(self._link)
        self._ids = count(next(engine.next_id))
        self._closed = False

    @property
    def info(self) -> EngineInfo:  # type: ignore[override]
        return self.engine.info

    def add(self, request: Request) -> int:
        request_id = next(self._ids)
        request = replace(request, prompt_ids=[index(token) for token in request.prompt_ids])  # checks types here
        command = self._command("add", request_id, request, run=partial(add_as, self.engine, request_id, request))
        self._boundary.queue.append((command, None))
        return request_id

    def step(self, wait: bool = True) -> list[Event]:
        with self._boundary.lock:
            while self._boundary.queue or self.engine.has_work:
                with signals_deferred():
                    events = self._step()
                if events or not wait:
                    return events
            return []

    def _step(self) -> list[Event]:
        self._boundary.run_queued(STEP)
        try:
            return self.engine.step(wait=False)
        except BaseException:
            self._drop_requests()
            raise

    def _drop_requests(self) -> None:
        """After an exception within a step, which may have stopped the ranks in different states: send this rank's."""
        scheduler = self.engine.scheduler
        kept = {handle: kept.tokens for handle, kept in scheduler.kept.items()}
        command = ("drop_requests", scheduler.step, scheduler.next_handle, kept)
        self._link.exchange(failures=self._boundary.failures, commands=[command])
        dist.barrier(group=self._link.group)  # a follower may still be inside the step, waiting for this rank

    def abort(self, ids: Iterable[int | tuple[int, int]]) -> None:
        self._boundary.post(self._command("abort", list(ids)))

    def release(self, handles: Iterable[int]) -> None:
        self._boundary.post(self._command("release", list(handles)))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return self._boundary.call(self._command("score", sequences, temperature))

    def top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float = 1.0
    ) -> list[TokenScores]:
        return self._boundary.call(self._command("top_logprobs", sequences, starts, count, temperature))

    def update_weights(self, source: WeightSource, version: int) -> None:
        """`source` is read on this rank alone; each weight is sent to the other ranks in its own dtype."""
        sent = SentWeights(self._link, source)
        run = partial(self.engine.update_weights, sent, version)
        self._boundary.call(self._command("update_weights", version, run=run))

    def fingerprint(self) -> str:
        return self._boundary.call(self._command("fingerprint"))

    def digests(self) -> dict[str, str]:
        return self._boundary.call(self._command("digests"))

    def sleep(self) -> None:
        self._boundary.call(self._command("sleep"))

    def wake(self) -> None:
        self._boundary.call(self._command("wake"))

    def reset_prefix_cache(self) -> None:
        self._boundary.call(self._command("reset_prefix_cache"))

    @property
    def load(self) -> EngineLoad:
        return self.engine.load

    def close(self) -> None:
        """Close the engines of all ranks; `follow` returns."""
        if not self._closed:
            command, self._closed = self._command("close"), True
            self._boundary.call(command)

    def _command(self, name: str, *arguments: Any, run: Callable[[], Any] | None = None) -> SharedCommand:
        """`run`: on this rank, unless it is the engine's method of this name with these arguments."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        return SharedCommand(run or partial(getattr(self.engine, name), *arguments), name, *arguments)


def follow(engine: NativeEngine, cpu_group: dist.ProcessGroup) -> None:
    """Apply the leader's commands until it is closed. Signals are handled afterwards: the leader decides."""
    follower = Follower(engine, Link(engine, cpu_group))
    with signals_deferred():
        while not follower.closed:
            follower.advance()


class Follower:
    def __init__(self, engine: NativeEngine, link: Link) -> None:
        assert not link.leads, "the first rank of the group leads"
        self.engine, self.link = engine, link
        self.failures = 0  # commands that raised an exception
        self.error: BaseException | None = None  # the last exception
        self.step_failed = self.closed = False

    def advance(self) -> None:
        """Wait for the leader's next commands and apply them."""
        flags, failures, commands = self.link.exchange()
        dropped = bool(commands) and commands[0][0] == "drop_requests"
        if failures != self.failures or (self.step_failed and not dropped):
            raise RuntimeError("this rank of a tensor-parallel engine failed where the leader did not") from self.error
        for name, *values in commands:
            try:
                self.apply(name, values)
            except Exception as error:
                self.failures, self.error = self.failures + 1, error
        if flags & STEP:
            try:
                self.engine.step(wait=False)
            except Exception as error:
                self.step_failed, self.error = True, error

    def apply(self, name: str, values: list[Any]) -> None:
        engine = self.engine
        match name, values:
            case "add", [request_id, request]:
                add_as(engine, request_id, request)
            case "update_weights", [version]:
                engine.update_weights(ReceivedWeights(self.link), version)
            case "drop_requests", [step, next_handle, kept]:
                self.drop_requests(step, next_handle, kept)
            case "close", []:
                self.closed = True
                engine.close()
            case _:
                getattr(engine, name)(*values)

    def drop_requests(self, step: int, next_handle: int, kept: dict[int, list[int]]) -> None:
        """Take over the leader's state after an exception."""
        self.engine.drop_requests()
        scheduler = self.engine.scheduler
        scheduler.step, scheduler.next_handle = step, next_handle
        scheduler.kept.clear()
        scheduler.kept.update({handle: Kept(tokens, []) for handle, tokens in kept.items()})
        self.engine.rows.step.fill_(step)
        self.engine.outputs.start(step)
        self.step_failed = False
        dist.barrier(group=self.link.group)


def add_as(engine: NativeEngine, request_id: int, request: Request) -> None:
    """Add a request under the leader's id."""
    engine.next_id = count(request_id)
    engine.add(request)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Call Python's handlers of SIGINT and SIGTERM afterwards: an exception in the middle of an exchange or of a step
    would leave the other ranks waiting. Handlers run in the main thread; other threads are not affected.
    """
    received: list[tuple[int, FrameType | None]] = []
    with handlers_restored((signal.SIGINT, signal.SIGTERM)) as handlers:
        for kind in (kind for kind, handler in handlers.items() if callable(handler)):
            signal.signal(kind, lambda number, frame: received.append((number, frame)))
        yield
    for number, frame in received:
        handlers[number](number, frame)
