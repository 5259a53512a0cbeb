"""Makes `web_parts` and `small_run` importable; indexes are written to a folder of the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.train import run as train_run

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "train"))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_curves() -> Iterator[None]:
    """Plotting takes longer than a small run. Tests of other folders in the same process do plot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_run, "draw_curves", lambda path: None)
        yield
