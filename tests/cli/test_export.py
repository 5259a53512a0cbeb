"""`assay export`: a checkpoint or model folder as a Hugging Face folder, a GGUF file or an adapter; uploads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import upload_hub
from safetensors.torch import load_file
from small_run import SmallRuns, preset_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from assay.api.training import SavedRun
from assay.cli.main import main
from assay.models import load_model
from assay.runs import Run, checkpoints
from assay.text import char_tokenizer
from assay.text.tokenizer import load_tokenizer
from assay.types import UserError


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


def test_nothing_is_overwritten(source: Path, tmp_path: Path, stderr_of: Callable[..., str]) -> None:
    taken, file = tmp_path / "taken", tmp_path / "file"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    file.write_text("mine")
    for dest, message in ((taken, "not empty"), (file, "is a file")):
        assert message in stderr_of(main(["export", str(source), str(dest)]))
    assert (taken / "notes.txt").read_text() == file.read_text() == "mine"
    for dest in (".", "..", "/"):
        assert "name a new folder" in stderr_of(main(["export", str(source), dest]))


def test_a_failed_export_leaves_no_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr_of: Callable[..., str]
) -> None:
    def disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("assay.models.save_model", disk_full)
    assert "No space left" in stderr_of(main(["export", str(source), str(tmp_path / "out")]))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.fixture(scope="module")
def lora_runs(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    runs = SmallRuns(tmp_path_factory.mktemp("lora"))
    assert runs.train("--lora.rank", 2, "--optim.lr", 0.3) == 0
    return runs


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.unembed(model.hidden(ids, [len(ids)]))


def test_a_run_is_exported_with_a_model_card_and_lora_is_merged(lora_runs: SmallRuns, tmp_path: Path) -> None:
    assert lora_runs("export", "run:small@last", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| after 2 steps | test |" in card and "lora.rank = 2" in card
    saved = load_file(lora_runs.checkpoint(2) / "model" / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == saved.keys() and all(written[name].equal(saved[name]) for name in saved)


@pytest.mark.parametrize("words", [["out.gguf"], ["out", "--gguf", "q8_0"]])
def test_a_gguf_file_gives_the_same_logits_within_its_rounding(
    words: list[str], lora_runs: SmallRuns, tmp_path: Path, stdout_of: Callable[..., str]
) -> None:
    dest = tmp_path / words[0]
    facts = json.loads(stdout_of(lora_runs("export", "run:small@last", dest, *words[1:], "--json")))
    assert facts["dest"] == str(dest) and facts["format"] == (words[1:] or [0, "f16"])[1]
    assert "greedy decoding" in facts["notes"][0]
    file = dest if dest.is_file() else dest / "out-q8_0.gguf"
    assert {path.name for path in tmp_path.iterdir()} == {dest.name}
    assert dest.is_file() or {path.name for path in dest.iterdir()} == {file.name, "README.md"}
    source = str(lora_runs.checkpoint(2) / "model")
    assert load_tokenizer(str(file)).encode("7 + 5 = 2") == load_tokenizer(source).encode("7 + 5 = 2")
    ids = torch.tensor(load_tokenizer(source).encode("7 + 5 = 2"))
    expected = logits_of(load_model(source), ids)
    difference = float((logits_of(load_model(str(file)), ids) - expected).abs().max())
    assert 0 < difference < (0.01 if dest.is_file() else 0.3) < 3 * float(expected.std())


@pytest.mark.peer
def test_a_kept_adapter_loads_in_peft(lora_runs: SmallRuns, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    assert lora_runs("export", "run:small@last", tmp_path / "out", "--lora", "keep") == 0
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(tmp_path / "out"))
    ids = torch.tensor(AutoTokenizer.from_pretrained(tmp_path / "out").encode("7 + 5 = 2"))
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")  # finds the base by itself
    with torch.no_grad():
        theirs = adapted(ids[None]).logits[0]
    step = lora_runs.checkpoint(2)
    torch.testing.assert_close(theirs, logits_of(load_model(str(step / "model")), ids), atol=1e-4, rtol=0)
    base = logits_of(load_model(str(step.parents[1] / "base")), ids)
    assert float((theirs - base).abs().max()) > 0.01  # the adapter does something


def test_a_kept_adapter_is_the_checkpoints(lora_runs: SmallRuns, tmp_path: Path) -> None:
    assert lora_runs("export", "run:small@last", tmp_path / "out", "--lora", "keep") == 0
    saved = load_file(lora_runs.checkpoint(2) / "adapter" / "adapter_model.safetensors")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert written.keys() == saved.keys() and all(written[name].equal(saved[name]) for name in saved)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert Path(config["base_model_name_or_path"]).samefile(lora_runs.runs / "small" / "base")


@pytest.mark.parametrize("words", [[], ["--gguf", "f16"]])
def test_push_uploads_what_was_written(
    words: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with upload_hub() as uploads:
        monkeypatch.setenv("HF_ENDPOINT", uploads.url)
        assert main(["export", str(source), str(tmp_path / "out"), "--push", "me/tuned", "--private", *words]) == 0
    assert uploads.files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    card = uploads.files["README.md"].decode()
    assert "# tuned" in card and ("me/tuned" in card or words)


def test_a_refused_push_writes_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with upload_hub() as uploads:
        uploads.denied = 403
        monkeypatch.setenv("HF_ENDPOINT", uploads.url)
        assert main(["export", str(source), str(tmp_path / "out"), "--push", "me/tuned"]) == 2
    assert "may not write to me/tuned" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["SOURCE", "out", "--lora", "keep"], "runs with LoRA"),
        (["run:small", "out", "--lora", "keep", "--gguf", "f16"], "merged weights"),
        (["run:small", "out", "--lora", "keep", "--push", "me/tuned"], "only on this machine"),
        (["SOURCE", "out.gguf", "--push", "me/tuned"], "uploads a folder"),
        (["SOURCE", "out.gguf", "--dtype", "float32"], "--dtype is for"),
        (["SOURCE", "out", "--private"], "--push OWNER/NAME"),
        (["SOURCE", "taken.gguf"], "exists already"),
        (["run:demo", "out"], "unknown run 'demo'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str],
    message: str,
    source: Path,
    lora_runs: SmallRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.gguf").write_text("mine")
    assert lora_runs("export", *[str(source) if word == "SOURCE" else word for word in words]) == 2
    assert message in capsys.readouterr().err and (tmp_path / "taken.gguf").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"source", "taken.gguf"}


def test_arguments_of_save_pretrained_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    run = SavedRun(tmp_path / "runs" / "demo")
    with pytest.raises(UserError, match="a GGUF file has merged weights"):
        run.save_pretrained(tmp_path / "out", lora="keep", gguf="f16")
    with pytest.raises(UserError, match="uploads a folder"):
        run.save_pretrained(tmp_path / "out.gguf", push="me/model")
    wrong: list[dict[str, Any]] = [{"lora": "adapter"}, {"dtype": "bf16"}, {"gguf": "q4"}]
    for arguments in wrong:
        with pytest.raises(UserError, match=f"{next(iter(arguments))} = .* is unknown: choose"):
            run.save_pretrained(tmp_path / "out", **arguments)
