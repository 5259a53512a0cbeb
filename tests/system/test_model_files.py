"""A model folder is checked before its files are read: special files and absurd configs end with one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from assay.models import load_model, save_model
from assay.models.load import build_preset
from assay.models.spec import spec_from_hf
from assay.system.model_files import MAX_LAYERS, check_model_files
from assay.text import char_tokenizer
from assay.text.tokenizer import load_tokenizer
from assay.types import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = char_tokenizer()
    save_model(build_preset("nano", tokenizer.vocab_size, max_length=64, seed=0), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def set_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_a_pipe_in_a_model_folder_is_refused_without_reading_it(folder: Path) -> None:
    check_model_files(folder)
    os.mkfifo(folder / "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors' is a pipe, socket or device"):
        check_model_files(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin"])
def test_models_and_tokenizers_are_not_read_from_devices(folder: Path, name: str) -> None:
    """Reading from a pipe would never end; /dev/null lets this test end without the check as well."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(os.devnull)
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match=r"is a pipe, socket or device") as raised:
            load(str(folder))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("nested", [False, True])
def test_an_impossible_number_of_layers_is_refused(folder: Path, nested: bool) -> None:
    """Both transformers and the decoder create objects for each layer before they read weights."""
    layers = {"num_hidden_layers": MAX_LAYERS + 1}
    set_config(folder, **({"text_config": layers} if nested else layers))
    for load in (load_model, load_tokenizer):
        with pytest.raises(UserError, match="num_hidden_layers must be at most 2,000, not 2001"):
            load(str(folder))
    if not nested:
        with pytest.raises(UserError, match="num_hidden_layers must be an integer from 1 to 2,000"):
            spec_from_hf(json.loads((folder / "config.json").read_text()))


def test_weights_behind_a_broken_link_are_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "nowhere")
    with pytest.raises(UserError, match="no weights"):
        load_model(str(folder))
