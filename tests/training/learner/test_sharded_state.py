"""Optimizer state of sharded models: saved in one layout and loaded in another."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mesh_parts import muon_updater, trained_muon_updater
from processes import start
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.mesh import Mesh
from assay.runs import checkpoints
from assay.runs.files import disk_error
from assay.text import char_tokenizer
from assay.training import checkpoint
from assay.training.learner.optim import optimizer_tensors
from assay.training.learner.parallel import is_sharded, load_sharded, save_sharded, saved_shapes
from assay.training.learner.update import Updater
from assay.types import UserError

TENSORS = {"a|exp_avg": torch.randn(3, 4, dtype=torch.float64), "b|momentum": torch.randn(5), "a|step": torch.tensor(3)}


def test_tensors_are_loaded_from_shards_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sharded(tmp_path / "parts", TENSORS, Mesh())
    (tmp_path / "whole").mkdir()
    save_file(TENSORS, tmp_path / "whole" / "optimizer.safetensors")
    (tmp_path / "several").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FILE_BYTES", 50)
        checkpoint.write_files(checkpoint.files_of(TENSORS, tmp_path / "several"))
    assert len(list((tmp_path / "several").iterdir())) == 2
    for folder in (tmp_path / "parts", tmp_path / "whole", tmp_path / "several"):
        assert {file.suffix for file in folder.iterdir()} == {".safetensors"}  # and no pickle
        assert saved_shapes(folder) == {name: tensor.shape for name, tensor in TENSORS.items()}
        found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        load_sharded(folder, found)
        assert all(found[name].equal(tensor) for name, tensor in TENSORS.items())


def test_a_plain_module_is_not_sharded() -> None:
    assert not is_sharded(nn.Linear(2, 2))


LAYOUTS = ((1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"))  # tensor-parallel ranks of four, and the others' mode


def moments(found: Updater) -> dict[str, Tensor]:
    tensors = optimizer_tensors(found.policy.named_parameters(), found.optimizer)
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


def move(_: Mesh, folder: Path) -> None:
    """State saved in any layout is loaded bit by bit in any other."""
    for step, layout in enumerate(LAYOUTS):
        saved = trained_muon_updater(*layout)
        checkpoint.save(folder, {"step": step}, saved.policy, saved.optimizer, char_tokenizer(), saved.mesh)
        assert (checkpoints.folder(folder, step) / "optimizer").is_dir() == is_sharded(saved.policy)
        assert checkpoints.last_intact(folder) == (step, [])
        expected = moments(saved)
        assert len(expected) > 20
        for other in LAYOUTS:
            found = muon_updater(*other)
            checkpoint.load_optimizer(folder, step, found.policy, found.optimizer)
            got = moments(found)
            assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_optimizer_state_moves_between_layouts(tmp_path: Path) -> None:
    start(4, move, tmp_path)


def fill_disk(mesh: Mesh, folder: Path) -> None:
    saved = trained_muon_updater(1, "fsdp")
    checkpoint.save(folder, {"step": 1}, saved.policy, saved.optimizer, char_tokenizer(), saved.mesh)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if mesh.rank == 1:
        dcp.HuggingFaceStorageWriter.write_data = full  # type: ignore[method-assign, assignment]
    kind, said = (UserError, "the disk is full") if mesh.is_main else (RuntimeError, "No space left")
    with pytest.raises(kind, match=said) as caught:
        checkpoint.save(folder, {"step": 2}, saved.policy, saved.optimizer, char_tokenizer(), saved.mesh)
    assert mesh.is_main or disk_error(caught.value)
    mesh.barrier()
    assert checkpoints.last_intact(folder) == (1, []) and not checkpoints.unfinished(folder, 2).exists()


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank(tmp_path: Path) -> None:
    start(2, fill_disk, tmp_path)
