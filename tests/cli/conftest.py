"""Runs in tests do not plot their curves."""

from __future__ import annotations

import pytest
from transformers.utils import logging as transformers_logging

from assay.training import run as train_run

transformers_logging.get_logger()  # its handler keeps the stderr of this moment, which is not closed after a test


@pytest.fixture
def draws_curves() -> None:
    """Request this fixture in tests that need curves.png."""


@pytest.fixture(autouse=True)
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plotting takes longer than a small run."""
    if "draws_curves" not in request.fixturenames:
        monkeypatch.setattr(train_run, "draw_curves", lambda path: None)
