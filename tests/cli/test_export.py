"""`assay export`: a checkpoint or model folder as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import preset_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.cli import export
from assay.cli.main import main
from assay.models import load_model
from assay.runs import Run, checkpoints
from assay.text import char_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return preset_folder(tmp_path / "source")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_checkpoint_has_the_same_weights_and_logits_in_transformers(
    source: Path, tmp_path: Path, dtype: str
) -> None:
    tokenizer, model = char_tokenizer(), load_model(str(source))
    weights = load_file(source / "model.safetensors")
    run = Run.create(tmp_path / "runs", "toy", "")
    with checkpoints.saving(run.path, 3) as folder:
        source.rename(folder / "model")
    checkpoints.set_best(run.path, 3, 0.5)
    (tmp_path / "out").mkdir()  # empty: can be used
    words = ["run:toy@best", str(tmp_path / "out"), "--dir", str(tmp_path / "runs"), "--dtype", dtype]
    assert main(["export", *words]) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(weight, weights[name].to(getattr(torch, dtype))) for name, weight in written.items())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert str(exported.dtype) == f"torch.{dtype}"
    ids = tokenizer.encode("12 + 7 = 19")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("12 + 7 = 19") == ids
    expected_model = model if dtype == "float32" else load_model(str(tmp_path / "out"))
    with torch.no_grad():
        logits = exported.float()(torch.tensor([ids])).logits[0]
        expected = expected_model.unembed(expected_model.hidden(torch.tensor(ids), [len(ids)]))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "out"}


def test_an_unknown_run_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run:demo", str(tmp_path / "out"), "--dir", str(tmp_path)]) == 2
    assert "unknown run 'demo'" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_nothing_is_overwritten(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    file.write_text("mine")
    for dest, message in ((taken, "not empty"), (file, "is a file")):
        assert main(["export", str(source), str(dest)]) == 2
        assert message in capsys.readouterr().err
    assert (taken / "notes.txt").read_text() == file.read_text() == "mine"


def test_a_failed_export_leaves_no_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "save", disk_full)
    assert main(["export", str(source), str(tmp_path / "out")]) == 2
    assert "No space left" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
