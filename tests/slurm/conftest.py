"""Makes `one_machine` importable, and skips where Slurm is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from one_machine import missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = missing()
    for item in items:
        if HERE in item.path.parents and absent:
            item.add_marker(pytest.mark.skip(reason=f"needs Slurm and munge (no {', '.join(absent)})"))
