"""Starts a function on several processes that speak over gloo, as torchrun would."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.multiprocessing

from assay.mesh import init_mesh


def start(world: int, work: Callable[..., None], *args: object) -> None:
    """`work(mesh, *args)` on as many processes, all of them data-parallel; what one of them raises is raised here."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    # One process imports torch, and the others are its forks: that is most of the time of a small test.
    torch.multiprocessing.set_forkserver_preload(["torch.distributed.tensor", "torch.distributed.fsdp", "processes"])
    torch.multiprocessing.start_processes(_process, (world, port, work, args), nprocs=world, start_method="forkserver")


def _process(rank: int, world: int, port: int, work: Callable[..., None], args: Sequence[object]) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)  # nothing may go wrong quietly in a process that nobody watches
    warnings.filterwarnings("default", message="mkldnn_matmul failed")  # bfloat16 on a CPU that is not made for it
    mesh = init_mesh()
    work(mesh, *args)
    mesh.close()
