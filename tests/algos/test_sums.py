"""Sums over real processes equal sums in one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from assay.algos.batch import Sums, metrics

WORKER = """
import json, sys
import torch, torch.distributed as dist
from assay.algos.batch import Sums, metrics

rank, store, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
value = lambda x: torch.tensor(x, dtype=torch.float64)
losses, per_token, largest = value(0.5 - rank), value(2.0 * rank), value(5.0 - rank)
mine = Sums(value(3.0 + rank), {"loss/total": losses}, {"policy/x": per_token}, {"policy/m": largest})
with open(f"{out}.{rank}", "w") as file:
    json.dump(metrics(mine.all_reduce()), file)
dist.destroy_process_group()
"""


def one(tokens: float, loss: float, x: float, largest: float) -> Sums:
    as_tensor = [torch.tensor(v, dtype=torch.float64) for v in (tokens, loss, x, largest)]
    return Sums(as_tensor[0], {"loss/total": as_tensor[1]}, {"policy/x": as_tensor[2]}, {"policy/m": as_tensor[3]})


def test_addition_and_metrics() -> None:
    total = sum([one(3, 0.5, 0, 5), one(4, -0.5, 2, 4), one(1, 3, 2, 1)])
    assert isinstance(total, Sums)
    assert metrics(total) == {"loss/total": 3.0, "policy/x": 0.5, "policy/m": 5.0}
    assert metrics(total, updates=3)["loss/total"] == 1.0


def test_without_processes_all_reduce_changes_nothing() -> None:
    assert metrics(one(3, 0.5, 6, 5).all_reduce()) == {"loss/total": 0.5, "policy/x": 2.0, "policy/m": 5.0}


@pytest.mark.slow
def test_all_reduce_over_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER]
    ranks = [subprocess.Popen([*command, str(r), str(tmp_path / "store"), str(tmp_path / "out")]) for r in range(2)]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    expected = metrics(one(3, 0.5, 0, 5) + one(4, -0.5, 2, 4))
    for rank in range(2):
        assert json.loads((tmp_path / f"out.{rank}").read_text()) == expected
