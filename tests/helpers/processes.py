"""Run a function on several processes that communicate over gloo, as torchrun does."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.multiprocessing

from assay.mesh import init_mesh


def start(world: int, work: Callable[..., None], *args: object) -> None:
    """Run `work(mesh, *args)` on `world` data-parallel processes; an exception in one of them is raised here."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    # One process imports torch, which takes most of the time of a small test; the others are its forks.
    torch.multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "processes"])
    torch.multiprocessing.start_processes(_process, (world, port, work, args), nprocs=world, start_method="forkserver")


def _process(rank: int, world: int, port: int, work: Callable[..., None], args: Sequence[object]) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)  # no warning may go unnoticed in these processes
    warnings.filterwarnings("default", message="mkldnn_matmul failed")  # bfloat16 on a CPU that does not support it
    mesh = init_mesh()
    work(mesh, *args)
    mesh.close()
