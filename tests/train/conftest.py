"""Makes `train_parts` and `small_run` importable, and spares the runs of these tests their curves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in another order are other sums: runs that must be equal to the last bit compute alike."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the tiny runs that are drawn; tests/cli checks the picture."""
    monkeypatch.setattr("assay.train.run.draw_curves", lambda path: None)
