from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import start
from safetensors.torch import save_file
from torch import Tensor, nn
from train_parts import make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.config import OptimConfig
from assay.mesh import Mesh, init_mesh
from assay.runs import checkpoints
from assay.runs.files import disk_error
from assay.text import char_tokenizer
from assay.train import checkpoint
from assay.train.learner.optim import make_optimizer, optimizer_tensors
from assay.train.learner.pack import rows_of
from assay.train.learner.parallel import is_sharded, load_sharded, parallelise, save_sharded, saved_shapes
from assay.train.learner.update import Updater
from assay.types import UserError

TENSORS = {"a|exp_avg": torch.randn(3, 4, dtype=torch.float64), "b|momentum": torch.randn(5), "a|step": torch.tensor(3)}


def test_tensors_come_back_from_a_folder_of_parts_and_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_lies_in_one_place_is_not_split() -> None:
    assert not is_sharded(nn.Linear(2, 2))


LAYOUTS = ((1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"))  # tensor-parallel ranks of four, and the others' mode


def updater(tp: int, mode: str) -> Updater:
    mesh = init_mesh(tp)
    policy = parallelise(tiny_decoder(seed=1), mesh, mode)
    optim = OptimConfig(name="muon", lr=1e-2, matrix_lr=1e-2)  # with all kinds of moments
    return Updater(policy, make_optimizer(policy, optim), mesh=mesh)


def trained(tp: int, mode: str) -> Updater:
    algo = make_algorithm("grpo")
    groups = make_groups(tiny_decoder())
    algo.credit(groups)
    found = updater(tp, mode)
    for _ in range(2):
        found.step(rows_of(groups, algo), algo, 1e-2)
    return found


def moments(found: Updater) -> dict[str, Tensor]:
    tensors = optimizer_tensors(found.policy.named_parameters(), found.optimizer)
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


def move(_: Mesh, folder: Path) -> None:
    """Moments saved in any layout come back in any other, bit by bit."""
    for step, layout in enumerate(LAYOUTS):
        saved = trained(*layout)
        checkpoint.save(folder, {"step": step}, saved.policy, saved.optimizer, char_tokenizer(), saved.mesh)
        assert (checkpoints.folder(folder, step) / "optimizer").is_dir() == is_sharded(saved.policy)
        assert checkpoints.last_intact(folder) == (step, [])
        expected = moments(saved)
        assert len(expected) > 20
        for other in LAYOUTS:
            found = updater(*other)
            checkpoint.load_optimizer(folder, step, found.policy, found.optimizer)
            got = moments(found)
            assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_moments_move_between_layouts(tmp_path: Path) -> None:
    start(4, move, tmp_path)


def fill_disk(mesh: Mesh, folder: Path) -> None:
    saved = trained(1, "fsdp")
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
