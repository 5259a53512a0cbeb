"""The process mesh of a run: data-parallel and tensor-parallel ranks, collectives between them, and heartbeats.

Experimental: tested with several processes on CPUs (gloo), never on two GPUs.

`Mesh`: `dp` ranks split each batch, `tp` ranks hold one model together. A single process is a mesh of one rank: it does
not need torch.distributed, and every collective returns its input.

`Heartbeat`: reports a rank that hangs, or whose host is down, instead of waiting forever. Each rank publishes a counter
in the rendezvous store and watches the counter of the previous rank, so that at least one rank notices whatever set of
ranks stops. Its threads hold the interpreter lock only briefly: a rank that computes or judges for hours keeps beating.
A rank whose launcher has ended stops itself.

Sharded weights are DTensors. Forward passes compute with plain tensors: see `local_tensor`. (This module does not
import DTensor, which takes long.)
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

from assay.types import UserError, plural

INTERVAL_S = 1.0
WARN_S = 30.0  # without a heartbeat until it is reported
TIMEOUT_S = 300.0  # without a heartbeat until the run is ended
ORPHAN_S = 300.0  # for a rank without a launcher to save and end
NOTICE_S = 300.0  # of waiting for a rank that is alive until it is reported; doubled after each report
LOST = "assay/lost"  # key in the store: why the run was ended
EXIT_CODE = 2


@dataclass
class Peer:
    """A watched peer: its last counter, and for how long that has not changed."""

    name: str
    counter: object = None
    silence: float = 0.0
    warned: bool = False

    def observe(self, counter: object, elapsed: float) -> str:
        """Compare with the last observation; returns the text to report, or ""."""
        if counter != self.counter:
            text = f"{self.name} responds again after {self.silence:.0f} s" if self.warned else ""
            self.counter, self.silence, self.warned = counter, 0.0, False
            return text
        self.silence += elapsed
        if self.warned or self.silence < WARN_S:
            return ""
        self.warned = True
        return f"{self.name} has not responded for {self.silence:.0f} s; waiting"


class Heartbeat:
    """Two daemon threads: one talks to the store, and may hang with it; the other watches the time."""

    def __init__(self, store: dist.Store, rank: int, world: int, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: time without a heartbeat after which this process ends; 0: never."""
        # A separate connection: the main thread may be blocked on the shared one.
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self.rank, self.timeout_s = rank, timeout_s
        self.watched = (rank - 1) % world
        self._collectives = 0  # started by this rank so far
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
        """Context of a collective of all ranks, in which this one may wait for others."""
        self._collectives += 1
        self._waiting_since = time.monotonic()
        try:
            yield
        finally:
            self._waiting_since = None

    def stop(self) -> None:
        """Called on all ranks before a regular end of the process."""
        self._stopped.set()

    def _talk(self) -> None:
        """Publish this rank's counters and read the counters of the watched rank."""
        with suppress(RuntimeError):  # the store is unreachable, which `_watch` notices
            while not self._stopped.wait(INTERVAL_S):
                self.store.set(f"assay/beat/{self.rank}", f"{self._rounds} {self._collectives}")
                if self.store.check([f"assay/beat/{self.watched}"]):  # otherwise it has not started yet
                    host = self.store.get(f"assay/host/{self.watched}").decode()
                    self._other.name = f"rank {self.watched} on {host}"
                    self._heard = self.store.get(f"assay/beat/{self.watched}")
                self._lost = self.store.check([LOST])
                self._rounds += 1

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stopped.wait(INTERVAL_S):
            now = time.monotonic()
            # If the whole job was suspended, hours may have passed in which no rank could beat.
            elapsed, before = min(now - before, 2 * INTERVAL_S), now
            if self._launcher not in (None, os.getppid()):
                return self._end_as_orphan()
            if self._lost:
                os._exit(EXIT_CODE)  # the rank that noticed has reported it
            report = self._store.observe(self._rounds, elapsed)
            if report and os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks notice; one per host reports
                say(report)
            reachable = self._store.silence <= 2 * INTERVAL_S  # otherwise nothing is known about the other rank
            if reachable and self._heard and (report := self._other.observe(self._heard, elapsed)):
                say(report)
            for peer in (self._store, self._other):
                if 0 < self.timeout_s <= peer.silence:
                    self._end(peer)
            self._report_waiting(now)

    def _report_waiting(self, now: float) -> None:
        """Report a rank that is alive but has kept this one waiting for long: it may hang, or be busy."""
        since, (_, _, theirs) = self._waiting_since, self._heard.partition(b" ")
        if since is None:
            self._notice_s = NOTICE_S
        elif now - since >= self._notice_s and theirs and int(theirs) < self._collectives:
            self._notice_s *= 2
            say(f"rank {self.rank} has waited {now - since:.0f} s for {self._other.name}, which is alive and busy")

    def _end(self, peer: Peer) -> None:
        text = f"{peer.name} has not responded for {peer.silence:.0f} s: ending the run; see assay train --resume"
        first = threading.Thread(target=self._report_once, args=(text,), daemon=True)
        if peer is self._store:
            say(text)
        else:
            first.start()
            first.join(5)
        os._exit(EXIT_CODE)  # no exception can interrupt the main thread in a collective

    def _report_once(self, text: str) -> None:
        with suppress(RuntimeError):
            if self.store.compare_set(LOST, "", text).decode() != text:
                return
        say(text)

    def _end_as_orphan(self) -> None:
        """SIGTERM makes the run save a checkpoint, on all ranks together."""
        say(f"the launcher of rank {self.rank} has ended: stopping")
        os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopped.wait(ORPHAN_S):
            os._exit(128 + signal.SIGTERM)


def say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"\nassay: {text}\n".encode())


T = TypeVar("T")
# Within a pass, ranks differ by seconds. Between passes a rank may judge or save for hours: heartbeats tell whether it
# is alive.
COLLECTIVE_TIMEOUT, OBJECT_TIMEOUT = timedelta(minutes=5), timedelta(days=2)
START = timedelta(minutes=10)  # until all processes have finished their imports
FAILED = "assay/failed"  # key in the store: number of processes that have reported an error


@dataclass(frozen=True)
class Mesh:
    """The position of this process among all. Ranks of one tensor-parallel group are consecutive."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of this process
    device_mesh: DeviceMesh | None = None  # dimensions "dp" and "tp"; None: one process
    cpu_group: dist.ProcessGroup | None = None  # all ranks; for objects, between passes
    rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    dp_group: dist.ProcessGroup | None = None
    tp_size: int = 1
    tp_rank: int = 0
    tp_group: dist.ProcessGroup | None = None

    @property
    def world(self) -> int:
        return self.dp_size * self.tp_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_gather_objects(self, item: T) -> list[T]:
        """The items of all ranks, ordered by rank. Waits for slow ranks without a time limit."""
        return [item] if self.device_mesh is None else gathered(item, self.cpu_group)

    def sum_(self, values: Tensor) -> Tensor:
        """Sum `values` over the data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def max_over_ranks(self, value: int) -> int:
        if self.device_mesh is None:
            return value
        maximum = torch.tensor(value)
        with waiting():
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return int(maximum)

    def any(self, here: bool) -> bool:
        """Whether `here` is true on any rank."""
        return self.max_over_ranks(int(here)) > 0

    def broadcast_object(self, item: T) -> T:
        """The item of the main rank, on every rank."""
        return self.on_main(lambda: item)

    def on_main(self, work: Callable[[], T]) -> T:
        """Call `work` on the main rank alone; every rank gets its result, or raises its UserError."""
        return work() if self.cpu_group is None else shared_result(work, self.cpu_group)

    def barrier(self) -> None:
        self.max_over_ranks(0)

    def close(self) -> None:
        """Called by all ranks at the end; waits until all of them are done."""
        if self.device_mesh is not None:
            self.barrier()
            stop_heartbeat()
            dist.destroy_process_group()

    def require_equal(self, values: Mapping[str, str], remedy: str) -> None:
        """Raise a UserError on all ranks that names a differing rank and its values, unless all values are equal.

        Ranks need not have the same keys: a value is compared among the ranks that have it.
        """
        if self.device_mesh is not None:
            check_equal(self.all_gather_objects((socket.gethostname(), dict(values))), remedy)


def init_mesh(
    tp: int = 1,
    device: torch.device | str = "cpu",
    settings: Callable[[], Mapping[str, str]] = dict,
    heartbeat_timeout_s: float = TIMEOUT_S,
) -> Mesh:
    """The mesh of the processes that torchrun started, with `tp` of them per model; without torchrun, one process.

    What `settings` returns must be equal on all ranks. It is compared first: with different `tp`, ranks would wait
    forever.
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
        dist.init_process_group(backend(device), timeout=START)
        start_heartbeat(heartbeat_timeout_s)
    by_rank = gathered((socket.gethostname(), dict(settings())))
    check_equal(by_rank, "start all ranks with the same command, config file, code and packages")
    return mesh_of_all(device, tp)


def join_children(name: str, device: torch.device) -> Mesh:
    """In a child process of each rank: a data-parallel mesh of these children. They meet in the store of the ranks,
    under a name that only they use.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, world = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=START)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own_keys = dist.PrefixStore(f"assay/children/{attempt}/{name}", store)
    dist.init_process_group(backend(device), store=own_keys, rank=rank, world_size=world, timeout=START)
    return mesh_of_all(device, 1)


def backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def mesh_of_all(device: torch.device, tp: int) -> Mesh:
    """The mesh of all processes of the default group."""
    grid = init_device_mesh(device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    for group in (None, grid.get_group("dp"), grid.get_group("tp")):
        set_timeout(COLLECTIVE_TIMEOUT, group)
    # Gloo also next to NCCL: objects need no GPU, and GPUs do not spin while a rank judges.
    objects = dist.new_group(backend="gloo", timeout=OBJECT_TIMEOUT)
    dp, tp_position = ((grid[name].size(), grid.get_local_rank(name), grid.get_group(name)) for name in ("dp", "tp"))
    return Mesh(device, grid, objects, dist.get_rank(), *dp, *tp_position)


def check_equal(by_rank: Sequence[tuple[str, Mapping[str, str]]], remedy: str) -> None:
    """`by_rank`: host and values of each rank. Ranks are compared with the value that most of them have."""
    keys = dict.fromkeys(key for _, values in by_rank for key in values)
    odd: dict[int, list[str]] = {}
    for key in keys:
        holders = [rank for rank, (_, values) in enumerate(by_rank) if key in values]
        (usual, _), *others = Counter(by_rank[rank][1][key] for rank in holders).most_common()
        if others:
            rank = next(rank for rank in holders if by_rank[rank][1][key] != usual)
            peer = next(other for other in holders if by_rank[other][1][key] == usual)
            value = by_rank[rank][1][key]
            odd.setdefault(rank, []).append(f"{key} is {value:.200} there, and {usual:.200} on rank {peer}")
    if odd:
        rank, texts = next(iter(odd.items()))
        more = f" (and {len(texts) - 3} more differences)" if len(texts) > 3 else ""
        raise UserError(f"rank {rank} on {by_rank[rank][0]} differs: {'; '.join(texts[:3])}{more}; {remedy}")


_heartbeat: Heartbeat | None = None  # of this process


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


def cpu_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A CPU group of the same ranks, or of all, that waits as long as it takes: heartbeats detect dead ranks. All of
    its ranks must call this."""
    endless = timedelta(days=3650)
    if group is None:
        return dist.new_group(backend="gloo", timeout=endless)
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", timeout=endless, use_local_synchronization=True)


def gathered(item: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The items of all ranks of a group (None: of all processes), ordered by rank."""
    items: list[Any] = [None] * dist.get_world_size(group)
    with waiting():
        dist.all_gather_object(items, item, group=group)
    return items


def shared_result(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Call `work` on the first rank of a group alone; all its ranks get the result, or raise its UserError."""
    outcome: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            outcome[0] = work()
        except UserError as error:
            outcome[1] = error
    with waiting():
        dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def own_gpu(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(
            f"torchrun started more processes on this node than its {plural(count, 'GPU')}: lower --nproc-per-node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def first_to_fail() -> bool:
    """Whether no other process has reported an error yet: later errors are mostly consequences of the first."""
    try:
        return not dist.is_initialized() or default_store().add(FAILED, 1) == 1
    except dist.DistError:  # the store ended with the process that held it
        return True


def local_tensor(weight: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor is returned as it is."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def full_tensor(weight: Tensor) -> Tensor:
    """The full tensor of a DTensor, which all ranks must gather together; a plain tensor is returned as it is."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def reshard(module: nn.Module) -> None:
    """Undo what FSDP leaves after a forward pass without a backward pass: gathered weights in the compute dtype."""
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
        return all_reduced(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The input of a computation that is split over ranks: its gradient is the sum over ranks."""
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The output of a computation that is split over ranks: the sum over ranks, on all of them."""
    return _ReduceFrom.apply(x, group)
