"""A reference model on a server gives the run that the same model gives in the training process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from serve_parts import serving
from small_run import SmallRuns, mostly_slow

from assay.models import load_model

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")


@pytest.fixture
def small(tmp_path: Path) -> SmallRuns:
    return SmallRuns(tmp_path)


WORDS = ("--dtype", "float64", "--engine.dtype", "float64", "--train.steps", 2, "--save.every", 1, "--save.keep", 0)
WORDS = (*WORDS, "--algo.kl_coef", 0.1, "--algo.reward_kl_coef", 0.05, "--sampling.temperature", 0.8)


@pytest.mark.parametrize("process", mostly_slow(["same", "separate"], quick=["same"]))
def test_a_served_reference_gives_the_run_of_a_local_one(small: SmallRuns, process: str) -> None:
    assert small.train(*WORDS) == 0
    start = load_model(str(small.checkpoint(0) / "model"), dtype=torch.float64)
    with serving(start, dtype=torch.float64) as server:
        words = ("--reference.url", server.url, "--train.process", process, "--name", "served")
        assert small.train(*WORDS, *words) == 0
    local, served = small.timeless(), small.timeless("served")
    assert [row.keys() for row in local] == [row.keys() for row in served]
    for row, own in zip(local, served, strict=True):
        assert row == pytest.approx(own, rel=0, abs=1e-9)
    assert max(row.get("policy/kl", 0.0) for row in local) > 0 and not (small.runs / "served" / "reference").exists()
    weights = [load_file(small.checkpoint(2, name) / "model" / "model.safetensors") for name in ("small", "served")]
    assert all((weights[0][key] - weights[1][key]).abs().max() < 1e-9 for key in weights[0])
