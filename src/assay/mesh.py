"""The processes of a run as a grid: `dp` of them split each batch, `tp` of them hold one model together.

One process is a grid too, the trivial one: it needs no torch.distributed, and every exchange below gives back what it
was handed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from assay.types import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """Where this process stands among all. Ranks of one tensor-parallel group are neighbours."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # of this process
    device_mesh: DeviceMesh | None = None  # dimensions "dp" and "tp"; None: one process

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
        """What each data-parallel rank handed in, in their order."""
        if self.dp_size == 1:
            return [item]
        found: list[Any] = [None] * self.dp_size
        dist.all_gather_object(found, item, group=self.dp_group)
        return found

    def sum_(self, values: Tensor) -> Tensor:
        """Adds `values` up over the data-parallel ranks, in place."""
        if self.dp_size > 1:
            dist.all_reduce(values, group=self.dp_group)
        return values

    def any(self, here: bool) -> bool:
        """Whether it is so on any rank at all."""
        if self.device_mesh is None:
            return here
        flag = torch.tensor(float(here), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def broadcast_object(self, item: T) -> T:
        """What the main process handed in, on every rank."""
        if self.device_mesh is None:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.device_mesh is not None:
            dist.barrier()

    def close(self) -> None:
        if self.device_mesh is not None:
            dist.destroy_process_group()


def init_mesh(tp: int = 1, device: torch.device | str = "cpu") -> Mesh:
    """The grid of the processes that torchrun started, `tp` of them to a model; without torchrun, this one alone."""
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
        # Gloo beside NCCL, so that plain objects need not go through a GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Mesh(device, init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp")))


def own_gpu(local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise UserError(f"torchrun started more processes on this node than its {count} GPUs: lower --nproc-per-node")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
