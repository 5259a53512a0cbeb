"""Marks these tests, and skips them where Ray is not installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = importlib.util.find_spec("ray") is None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.ray)
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs the package ray (make test-ray)"))


@pytest.fixture
def cluster() -> Iterator[object]:
    """A cluster of three nodes."""
    from cluster_parts import Nodes

    with Nodes() as nodes:
        yield nodes
