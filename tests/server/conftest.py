"""One server for all tests that do not change it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve_parts import RunningServer, serving


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with serving() as running:
        yield running
