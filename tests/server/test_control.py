"""Weights in folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.server.control import FolderWeights
from assay.types import UserError


def test_missing_and_damaged_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no safetensors files"):
        FolderWeights(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="cannot read the weights"):
        list(FolderWeights(str(tmp_path)).weights())
