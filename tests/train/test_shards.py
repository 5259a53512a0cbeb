from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from assay.mesh import Mesh
from assay.train.shards import is_split, load_parts, save_parts, saved_shapes

TENSORS = {"a|exp_avg": torch.randn(3, 4, dtype=torch.float64), "b|momentum": torch.randn(5), "a|step": torch.tensor(3)}


def test_tensors_come_back_from_a_folder_of_parts_and_from_a_file(tmp_path: Path) -> None:
    save_parts(tmp_path / "parts", TENSORS, Mesh())
    (tmp_path / "whole").mkdir()
    save_file(TENSORS, tmp_path / "whole" / "optimizer.safetensors")
    for folder in (tmp_path / "parts", tmp_path / "whole"):
        assert {file.suffix for file in folder.iterdir()} == {".safetensors"}  # and no pickle
        assert saved_shapes(folder) == {name: tensor.shape for name, tensor in TENSORS.items()}
        found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        load_parts(folder, found)
        assert all(found[name].equal(tensor) for name, tensor in TENSORS.items())


def test_what_lies_in_one_place_is_not_split() -> None:
    assert not is_split(nn.Linear(2, 2))
