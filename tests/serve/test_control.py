"""Weights in folders, and calls in the engine's process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serve_parts import save_folder, tiny_model

from assay.engine import make_engine
from assay.serve.control import EngineControl, FolderWeights
from assay.types import UserError


def test_a_folder_yields_every_weight_once(tmp_path: Path) -> None:
    model = tiny_model()
    read = list(FolderWeights(str(save_folder(model, tmp_path))).weights())
    expected = dict(model.weights())
    assert len(read) == len(expected) and {name for name, _ in read} == set(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read)


def test_missing_and_damaged_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no safetensors files"):
        FolderWeights(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match="cannot read the weights"):
        list(FolderWeights(str(tmp_path)).weights())


def test_the_load_counts_blocks_of_running_requests() -> None:
    engine = make_engine("native", tiny_model(), device="cpu", dtype=torch.float32)
    load = EngineControl(engine).load()
    assert (load.running, load.waiting, load.kv_blocks_used) == (0, 0, 0) and load.kv_blocks > 0
