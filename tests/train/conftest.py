"""Makes `train_parts` and `small_run` importable, and spares the runs of these tests their curves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the tiny runs that are drawn; tests/cli checks the picture."""
    monkeypatch.setattr("assay.train.stages.draw_curves", lambda path: None)
