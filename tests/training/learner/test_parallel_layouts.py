"""The same rollouts give the same losses and weights on 1, 2 and 4 processes, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mesh_parts import SPECS, STEPS, Case, train, train_cases
from processes import start
from safetensors.torch import load_file

from assay.mesh import Mesh


def differences(case: Case, folder: Path) -> tuple[float, float]:
    """Largest differences from one process: of any metric of any step (relative above 1), and of any final weight."""
    metrics, weights = train(Case(case.family, double=case.double), Mesh())
    left = json.loads((folder / f"{case.name}.json").read_text())
    found = load_file(folder / f"{case.name}.safetensors")
    assert len(set(left["fingerprints"])) == 1, "ranks hold different weights"
    assert weights.keys() == found.keys() and len(left["metrics"]) == STEPS
    assert metrics[0]["optim/grad_norm"] > 0.1 and metrics[0]["policy/kl"] > 0.1  # clipped, and with a reference
    gaps = []
    for here, there in zip(metrics, left["metrics"], strict=True):
        assert here.keys() == there.keys()
        gaps += [abs(here[key] - there[key]) / max(1.0, abs(here[key])) for key in here]
    return max(gaps), max(float((weights[name] - found[name]).abs().max()) for name in weights)


def check(world: int, cases: list[Case], folder: Path) -> None:
    start(world, train_cases, folder, cases)
    for case in cases:
        metric, weight = differences(case, folder)
        limit = 1e-9 if case.double else 1e-4
        assert metric < limit and weight < limit, (case.name, metric, weight)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_layout_of_every_family_equals_one_process(world: int, tmp_path: Path) -> None:
    layouts = [("ddp", 1), ("fsdp", 1), ("ddp", 2), ("fsdp", 2)]
    cases = [Case(f, mode, tp, double) for f in SPECS for mode, tp in layouts for double in (True, False)]
    check(world, cases, tmp_path)
