"""Makes `train_parts` and `small_run` importable; fixtures for whole runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The order of sums depends on the number of threads: runs that must be equal to the last bit use one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No curves.png: plotting takes longer than a small run. tests/cli checks the picture."""
    from assay.training import run

    monkeypatch.setattr(run, "draw_curves", lambda path: None)
