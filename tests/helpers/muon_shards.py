"""Muon's steps on one matrix, whole or sharded over processes; importable by the processes that tests start."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from assay.training.learner.optim import Muon


def noise(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train(parameter: nn.Parameter, gradients: list[Tensor], weight_decay: float = 0.1) -> Tensor:
    group = {"params": [parameter], "kind": "matrix", "lr": 0.05, "weight_decay": weight_decay}
    optimizer = Muon([group], lr=1.0, momentum=0.9)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    return parameter.detach()


def sharded(mesh_shape: tuple[int, ...], shape: tuple[int, int], placements: list[Placement]) -> Tensor:
    mesh = init_device_mesh("cpu", mesh_shape)
    parameter, *gradients = (distribute_tensor(noise(shape, seed), mesh, placements) for seed in range(4))
    found = train(nn.Parameter(parameter), gradients)
    assert isinstance(found, DTensor) and found.placements == tuple(placements)
    return found.full_tensor()


def compare(mesh_shape: tuple[int, ...], placements: list[list[Placement]]) -> None:
    for placed in placements:
        for shape in [(8, 8), (25, 6), (5, 17)]:  # 25 and 5 rows cannot be cut evenly
            expected = train(nn.Parameter(noise(shape)), [noise(shape, seed) for seed in (1, 2, 3)])
            found = sharded(mesh_shape, shape, placed)
            assert torch.allclose(found, expected, rtol=0, atol=1e-12), (placed, shape)


def worker(rank: int, mesh_shape: tuple[int, ...], placements: list[list[Placement]], meeting: str) -> None:
    world = int(torch.tensor(mesh_shape).prod())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        compare(mesh_shape, placements)
    finally:
        dist.destroy_process_group()
