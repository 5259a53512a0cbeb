"""Fixtures of training runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import SmallRuns


@pytest.fixture
def small(tmp_path: Path, no_curves: None, one_thread: None) -> SmallRuns:
    """A folder for runs of a nano model."""
    return SmallRuns(tmp_path)
