"""Ranks that share servers: work on one of them, results and errors on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from processes import start

from assay.engine.remote.base import Ranks
from assay.mesh import Mesh, init_mesh
from assay.types import UserError


def refuse() -> None:
    raise UserError("no server")


def test_a_single_process_does_everything() -> None:
    ranks = Ranks(None)
    assert ranks.leads and ranks.is_main and ranks.on_main(lambda: 1) == ranks.from_leader(lambda: 1) == 1
    with pytest.raises(UserError, match="no server"):
        ranks.on_leaders(refuse)


def share(mesh: Mesh, folder: Path) -> None:
    mesh = init_mesh(2)
    ranks = Ranks(mesh.tp_group)
    rank = dist.get_rank()
    assert (ranks.leads, ranks.is_main) == (rank % 2 == 0, rank == 0)
    assert ranks.from_leader(lambda: f"from {rank}") == f"from {rank // 2 * 2}"
    waited: list[int] = []
    assert ranks.on_main(lambda: f"from {rank}", meanwhile=lambda: waited.append(rank)) == "from 0"
    assert waited == [rank] * (rank > 0)
    for call in (ranks.on_main, ranks.from_leader, ranks.on_leaders):
        with pytest.raises(UserError, match="no server"):
            call(refuse)
    with pytest.raises(UserError, match="rank 2 alone"):  # of one leader, on all ranks
        ranks.on_leaders(lambda: refuse_alone(rank))
    ranks.barrier()
    (folder / str(rank)).touch()


def refuse_alone(rank: int) -> None:
    if rank == 2:
        raise UserError("rank 2 alone")


def test_results_and_errors_reach_all_ranks(tmp_path: Path) -> None:
    start(4, share, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2", "3"}
