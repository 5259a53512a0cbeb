"""Makes `serve_parts` importable; one server for all tests that do not change it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from serve_parts import RunningServer, serving


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running
