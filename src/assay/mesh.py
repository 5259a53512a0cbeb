"""Heartbeats between ranks: a rank that is stopped, or whose host is gone, is named instead of waited for in silence.

Each rank publishes a counter in the store that all processes share, and watches the counter of the rank before it. So
whatever set of ranks falls silent, at least one of the others notices. The threads need the interpreter lock only for
moments: a rank that computes, judges or evaluates for hours keeps beating. One that is orphaned by its launcher ends.

The processes of a run as a grid: `dp` of them split each batch, `tp` of them hold one model together.

One process is a grid too, the trivial one: it needs no torch.distributed, and every exchange below gives back what it
was handed.

Exchanges between the ranks that hold one model together, as autograd sees them; and weights in parts.

A weight in parts is a DTensor. Forward passes compute with plain tensors: `local` gives this rank's part. (DTensor
itself is slow to import, so that nothing here names it.)
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

from assay.types import UserError

INTERVAL_S = 1.0
WARN_S = 30.0  # of silence, before it is reported
TIMEOUT_S = 300.0  # of silence, before it ends the run
ORPHAN_S = 300.0  # for a rank without a launcher to save and end by itself
NOTICE_S = 300.0  # that a rank waits for one that is alive before it says so; then twice as long, and so on
LOST = "assay/lost"  # in the store: why the run was ended
EXIT_CODE = 2


@dataclass
class Peer:
    """One source of signs of life, and for how long there has been none."""

    name: str
    news: object = None
    silence: float = 0.0
    warned: bool = False

    def look(self, news: object, elapsed: float) -> str:
        """Compare with the last look; returns what to report, if anything."""
        if news != self.news:
            text = f"{self.name} responds again after {self.silence:.0f} s" if self.warned else ""
            self.news, self.silence, self.warned = news, 0.0, False
            return text
        self.silence += elapsed
        if self.warned or self.silence < WARN_S:
            return ""
        self.warned = True
        return f"{self.name} has not responded for {self.silence:.0f} s; waiting"


class Heartbeat:
    """Two daemon threads: one talks to the store, and may hang with it; the other only reads the clock."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: silence after which this process ends; 0: never."""
        # A connection of its own: on the shared one, the main thread may be waiting.
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.timeout_s = rank, timeout_s
        self.watched = (rank - 1) % world
        self._exchanges = 0  # begun by this rank so far
        self._waiting_since: float | None = None
        self._notice_s = NOTICE_S
        self._rounds, self._heard, self._lost = 0, b"", False
        self._store = Peer("the rendezvous store, which the launcher or rank 0 holds,")
        self._other = Peer(f"rank {self.watched}")
        self._stopped = threading.Event()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        store.set(f"assay/host/{rank}", socket.gethostname())
        for work in (self._talk, self._watch):
            threading.Thread(target=work, name="assay-heartbeat", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around an exchange of all ranks, in which this one may wait for others."""
        self._exchanges += 1
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def stop(self) -> None:
        """Before the process ends as it should, on all ranks."""
        self._stopped.set()

    def _talk(self) -> None:
        """Publish this rank's counters, read those of the watched one."""
        with suppress(RuntimeError):  # the store is gone: the silence that follows is noticed
            while not self._stopped.wait(INTERVAL_S):
                self.store.set(f"assay/beat/{self.rank}", f"{self._rounds} {self._exchanges}")
                if self.store.check([f"assay/beat/{self.watched}"]):  # else it has not begun
                    host = self.store.get(f"assay/host/{self.watched}").decode()
                    self._other.name = f"rank {self.watched} on {host}"
                    self._heard = self.store.get(f"assay/beat/{self.watched}")
                self._lost = self.store.check([LOST])
                self._rounds += 1

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(INTERVAL_S):
            now = time.monotonic()
            # A job that was suspended as a whole finds hours on the clock in which no rank could beat.
            elapsed, before = min(now - before, 2 * INTERVAL_S), now
            if self._launcher not in (None, os.getppid()):
                return self._end_as_orphan()
            if self._lost:
                os._exit(EXIT_CODE)  # the rank that noticed has reported it
            report = self._store.look(self._rounds, elapsed)
            if report and os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks notice: one per host reports it
                say(report)
            reachable = self._store.silence <= 2 * INTERVAL_S  # else nothing is known of the other
            if reachable and self._heard and (report := self._other.look(self._heard, elapsed)):
                say(report)
            for peer in (self._store, self._other):
                if 0 < self.timeout_s <= peer.silence:
                    self._end(peer)
            self._report_waiting(now)

    def _report_waiting(self, now: float) -> None:
        """Name a rank that is alive and keeps this one waiting for long: it may hang, or have a lot to do."""
        since, (_, _, theirs) = self._waiting_since, self._heard.partition(b" ")
        if since is None:
            self._notice_s = NOTICE_S
        elif now - since >= self._notice_s and theirs and int(theirs) < self._exchanges:
            self._notice_s *= 2
            say(f"rank {self.rank} has waited {now - since:.0f} s for {self._other.name}, which is alive and busy")

    def _end(self, peer: Peer) -> None:
        text = f"{peer.name} has not responded for {peer.silence:.0f} s: the run ends; assay train --resume goes on"
        first = threading.Thread(target=self._report_once, args=(text,), daemon=True)
        if peer is self._store:
            say(text)
        else:
            first.start()
            first.join(5)
        os._exit(EXIT_CODE)  # the main thread waits in an exchange that no exception reaches

    def _report_once(self, text: str) -> None:
        with suppress(RuntimeError):
            if self.store.compare_set(LOST, "", text).decode() != text:
                return
        say(text)

    def _end_as_orphan(self) -> None:
        """SIGTERM lets a run save; all ranks do so together."""
        say(f"the launcher of rank {self.rank} has ended: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopped.wait(ORPHAN_S):
            os._exit(128 + signal.SIGTERM)


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"\nassay: {text}\n".encode())


T = TypeVar("T")
# Within a pass ranks are seconds apart at most. Between passes one of them may judge or save for as long as it takes:
# heartbeats tell whether it still lives.
COLLECTIVE_TIMEOUT, OBJECT_TIMEOUT = timedelta(minutes=5), timedelta(days=2)
START = timedelta(minutes=10)  # until all processes have imported what they need
FAILED = "assay/failed"  # in the store that all processes share: how many of them have told of an error


@dataclass(frozen=True)
class Mesh:
    """Where this process stands among all. Ranks of one tensor-parallel group are neighbours."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of this process
    device_mesh: DeviceMesh | None = None  # dimensions "dp" and "tp"; None: one process
    cpu_group: dist.ProcessGroup | None = None  # all ranks, for what is exchanged between passes

    @property
    def rank(self) -> int:
        return 0 if self.device_mesh is None else dist.get_rank()

    @property
    def world(self) -> int:
        return self.dp_size * self.tp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def dp_size(self) -> int:
        return 1 if self.device_mesh is None else self.device_mesh["dp"].size()

    @property
    def dp_rank(self) -> int:
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank("dp")

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        return None if self.device_mesh is None else self.device_mesh.get_group("dp")

    @property
    def tp_size(self) -> int:
        return 1 if self.device_mesh is None else self.device_mesh["tp"].size()

    @property
    def tp_rank(self) -> int:
        return 0 if self.device_mesh is None else self.device_mesh.get_local_rank("tp")

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return None if self.device_mesh is None else self.device_mesh.get_group("tp")

    def all_gather_objects(self, item: T) -> list[T]:
        """What each rank handed in, in their order. However long one of them takes, the others wait."""
        if self.device_mesh is None:
            return [item]
        found: list[Any] = [None] * self.world
        with waiting():
            dist.all_gather_object(found, item, group=self.cpu_group)
        return found

    def sum_(self, values: Tensor) -> Tensor:
        """Adds `values` up over the data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def max_over_ranks(self, value: int) -> int:
        """Of what all ranks handed in."""
        if self.device_mesh is None:
            return value
        found = torch.tensor(value)
        with waiting():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return int(found)

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank at all."""
        return self.max_over_ranks(int(here)) > 0

    def broadcast_object(self, item: T) -> T:
        """What the main process handed in, on every rank."""
        if self.device_mesh is None:
            return item
        box = [item]
        with waiting():
            dist.broadcast_object_list(box, src=0, group=self.cpu_group)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Call `work` on the main rank alone; every rank gets its result, or raises its UserError."""
        if self.device_mesh is None:
            return work()
        result: T | None = None
        error: UserError | None = None
        if self.is_main:
            try:
                result = work()
            except UserError as raised:
                error = raised
        result, error = self.broadcast_object((result, error))
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def barrier(self) -> None:
        self.max_over_ranks(0)

    def close(self) -> None:
        """All ranks, at the end: none goes before the others are done."""
        if self.device_mesh is not None:
            self.barrier()
            stop_heartbeat()
            dist.destroy_process_group()

    def require_equal(self, values: Mapping[str, str], remedy: str) -> None:
        """A UserError on all ranks, which names one and what it has, unless all ranks have equal values.

        Ranks need not have the same keys: a value is compared by those that have it.
        """
        if self.device_mesh is not None:
            check_equal(self.all_gather_objects((socket.gethostname(), dict(values))), remedy)


def init_mesh(
    tp: int = 1,
    device: torch.device | str = "cpu",
    settings: Mapping[str, str] | None = None,
    heartbeat_timeout_s: float = TIMEOUT_S,
) -> Mesh:
    """The grid of the processes that torchrun started, `tp` of them to a model; without torchrun, this one alone.

    `settings` have to be equal on all ranks, and are compared first: with another `tp` ranks would wait for each other.
    """
    device = torch.device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % tp:
        fitting = [str(size) for size in range(1, world + 1) if world % size == 0]
        count = "there is one process" if world == 1 else f"there are {world} processes"
        raise UserError(
            f"parallel.tp = {tp}, but {count}: choose {' or '.join(fitting)}, or let torchrun start a multiple of {tp}"
        )
    if world == 1:
        return Mesh(device)
    if device.type == "cuda":
        device = own_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    elif device.type != "cpu":
        raise UserError(f"{world} processes cannot share device '{device.type}': use cuda or cpu, or one process")
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=START)
        start_heartbeat(heartbeat_timeout_s)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (socket.gethostname(), dict(settings or {})))
    check_equal(found, "start all ranks with the same command, config file, code and packages")
    grid = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    for group in (None, grid.get_group("dp"), grid.get_group("tp")):
        set_timeout(COLLECTIVE_TIMEOUT, group)
    # Gloo even beside NCCL: plain objects need not go through a GPU, and a GPU need not spin while a judge thinks.
    return Mesh(device, grid, dist.new_group(backend="gloo", timeout=OBJECT_TIMEOUT))


def check_equal(found: Sequence[tuple[str, Mapping[str, str]]], remedy: str) -> None:
    """`found`: host and values of each rank. The value that most ranks have is the one that the others should have."""
    keys = dict.fromkeys(key for _, values in found for key in values)
    odd: dict[int, list[str]] = {}
    for key in keys:
        holders = [rank for rank, (_, values) in enumerate(found) if key in values]
        (usual, _), *others = Counter(found[rank][1][key] for rank in holders).most_common()
        if others:
            rank = next(rank for rank in holders if found[rank][1][key] != usual)
            peer = next(other for other in holders if found[other][1][key] == usual)
            value = found[rank][1][key]
            odd.setdefault(rank, []).append(f"{key} is {value:.200} there, and {usual:.200} on rank {peer}")
    if odd:
        rank, texts = next(iter(odd.items()))
        more = f" (and {len(texts) - 3} more differences)" if len(texts) > 3 else ""
        raise UserError(f"rank {rank} on {found[rank][0]} differs: {'; '.join(texts[:3])}{more}; {remedy}")


_heartbeat: Heartbeat | None = None  # of this process, as there is one process group


def start_heartbeat(timeout_s: float) -> None:
    global _heartbeat
    _heartbeat = Heartbeat(default_store(), dist.get_rank(), dist.get_world_size(), timeout_s)


def stop_heartbeat() -> None:
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.stop()
    _heartbeat = None


def waiting() -> AbstractContextManager[None]:
    return nullcontext() if _heartbeat is None else _heartbeat.waiting()


def own_gpu(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(f"torchrun started more processes on this node than its {count} GPUs: lower --nproc-per-node")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def first_to_fail() -> bool:
    """Whether no other process has told of an error yet: what comes after the first one mostly follows from it."""
    try:
        return not dist.is_initialized() or default_store().add(FAILED, 1) == 1
    except dist.DistError:  # the store went with the process that held it
        return True


def local_tensor(weight: Tensor) -> Tensor:
    """This rank's part of a weight or gradient, or the thing itself where it is whole."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def full_tensor(weight: Tensor) -> Tensor:
    """All of a weight. All ranks must ask for it together."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def reshard(module: nn.Module) -> None:
    """FSDP leaves weights unsharded, in its computing dtype, after a forward pass without a backward pass."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Where something that all ranks hold enters a computation that is split: its gradient is the sum of theirs."""
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Where a split computation ends: the sum over ranks, on all of them."""
    return _ReduceFrom.apply(x, group)
