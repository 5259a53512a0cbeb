from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
from processes import start

from assay.mesh import Mesh, first_to_fail, init_mesh
from assay.types import UserError


def test_one_process_is_a_mesh_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    mesh = init_mesh()
    assert (mesh.rank, mesh.world, mesh.dp_size, mesh.tp_size, mesh.dp_rank, mesh.tp_rank) == (0, 1, 1, 1, 0, 0)
    assert mesh.is_main and mesh.device_mesh is mesh.dp_group is mesh.tp_group is None
    assert mesh.all_gather_objects("mine") == ["mine"] and mesh.broadcast_object("mine") == "mine"
    assert mesh.any(True) and not mesh.any(False)
    assert mesh.max_over_ranks(-3) == -3 and first_to_fail()
    assert mesh.sum_(torch.ones(2)).tolist() == [1.0, 1.0]
    mesh.barrier()
    mesh.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("world", "tp", "device", "said"),
    [
        ("4", 3, "cpu", "tp = 3, but there are 4 processes: choose 1 or 2 or 4"),
        ("1", 2, "cpu", "tp = 2, but there is one process: .* torchrun start a multiple of 2"),
        ("2", 1, "mps", "2 processes cannot share device 'mps'"),
    ],
)
def test_impossible_mesh_sizes_are_refused(
    monkeypatch: pytest.MonkeyPatch, world: str, tp: int, device: str, said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UserError, match=said):
        init_mesh(tp, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="more processes on this node than its 0 GPUs"):
        init_mesh(1, "cuda")


def exchange(flat: Mesh) -> None:
    assert (flat.dp_size, flat.tp_size, flat.dp_rank) == (4, 1, flat.rank)
    mesh = init_mesh(2)
    assert mesh.world == 4 and (mesh.dp_rank, mesh.tp_rank) == divmod(mesh.rank, 2)
    assert mesh.is_main == (mesh.rank == 0)
    pair = [mesh.tp_rank, mesh.tp_rank + 2]  # those that see other rows of the batch with the same part of the model
    assert mesh.all_gather_objects({"rank": mesh.rank}) == [{"rank": rank} for rank in range(4)]
    values = torch.tensor([float(mesh.rank), 1.0])
    assert mesh.sum_(values) is values and values.tolist() == [sum(pair), 2.0]
    assert mesh.any(mesh.rank == 3) and not mesh.any(False)
    assert mesh.max_over_ranks(10 * mesh.rank) == 30
    assert sorted(mesh.all_gather_objects(first_to_fail())) == [False, False, False, True]
    assert mesh.broadcast_object(f"from {mesh.rank}") == "from 0"
    mesh.barrier()


@pytest.mark.slow
def test_collectives_of_four_ranks() -> None:
    start(4, exchange)


def wait(_: Mesh) -> None:
    from assay import mesh as module

    module.COLLECTIVE_TIMEOUT = timedelta(seconds=1)
    mesh = init_mesh()
    if mesh.rank == 0:
        time.sleep(3)
    assert mesh.all_gather_objects(mesh.rank) == [0, 1]  # a judge may take its time
    if mesh.rank == 0:
        time.sleep(3)
        os._exit(0)  # what it would say of the broken connection is of no interest
    with pytest.raises(RuntimeError, match=r"(?i)timed out"):  # but nobody waits long in the middle of a pass
        mesh.sum_(torch.ones(2))
    os._exit(0)


@pytest.mark.slow
def test_collectives_time_out_and_objects_wait() -> None:
    start(2, wait)
