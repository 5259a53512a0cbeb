"""The processes of a run as a grid: `dp` of them split each batch, `tp` of them hold one model together.

One process is a grid too, the trivial one: it needs no torch.distributed, and every exchange below gives back what it
was handed.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

from assay.heartbeat import TIMEOUT_S, Heartbeat
from assay.types import UserError

T = TypeVar("T")
# Within a pass ranks are seconds apart at most. Between passes one of them may judge or save for as long as it takes:
# heartbeats tell whether it still lives.
IN_A_PASS, IN_BETWEEN = timedelta(minutes=5), timedelta(days=2)
START = timedelta(minutes=10)  # until all processes have imported what they need
FAILED = "assay/failed"  # in the store that all processes share: how many of them have told of an error


@dataclass(frozen=True)
class Mesh:
    """Where this process stands among all. Ranks of one tensor-parallel group are neighbours."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of this process
    device_mesh: DeviceMesh | None = None  # dimensions "dp" and "tp"; None: one process
    between: dist.ProcessGroup | None = None  # all ranks, for what is exchanged between passes

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
            dist.all_gather_object(found, item, group=self.between)
        return found

    def sum_(self, values: Tensor) -> Tensor:
        """Adds `values` up over the data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def largest(self, value: int) -> int:
        """Of what all ranks handed in."""
        if self.device_mesh is None:
            return value
        found = torch.tensor(value)
        with waiting():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.between)
        return int(found)

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank at all."""
        return self.largest(int(here)) > 0

    def broadcast_object(self, item: T) -> T:
        """What the main process handed in, on every rank."""
        if self.device_mesh is None:
            return item
        box = [item]
        with waiting():
            dist.broadcast_object_list(box, src=0, group=self.between)
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
        self.largest(0)

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
        set_timeout(IN_A_PASS, group)
    # Gloo even beside NCCL: plain objects need not go through a GPU, and a GPU need not spin while a judge thinks.
    return Mesh(device, grid, dist.new_group(backend="gloo", timeout=IN_BETWEEN))


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
