"""Loading folders and hub ids, and what is said when it cannot be done."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.models import Decoder, HFModel, fingerprint, load_model, preset, save_model
from assay.models.load import PRESETS, build_preset, is_classifier, weight_files
from assay.types import UserError


@pytest.fixture
def folder(tmp_path):
    save_model(build_preset("nano", vocab_size=30, max_length=64, seed=0), tmp_path / "model")
    return tmp_path / "model"


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_shards_written_by_transformers(make_hf, logit_difference, tmp_path):
    hf = make_hf("qwen2")
    hf.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(weight_files(tmp_path)) > 2
    assert logit_difference(load_model(str(tmp_path)), hf) < 1e-4


def test_bin_files_are_read_without_running_them(make_hf, logit_difference, tmp_path):
    hf = make_hf("llama", tie_word_embeddings=True)
    hf.config.save_pretrained(tmp_path)
    torch.save(hf.state_dict(), tmp_path / "pytorch_model.bin")
    model = load_model(str(tmp_path))
    assert isinstance(model, Decoder)
    assert logit_difference(model, hf) < 1e-4
    torch.save({"evil": pytest.fail}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than plain weights"):
        load_model(str(tmp_path))


def test_a_tied_head_may_stand_for_the_embedding(folder):
    exact = load_model(str(folder))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert torch.equal(load_model(str(folder)).lm_head.weight, exact.lm_head.weight)


def test_names_without_the_outer_prefix_and_old_rotary_buffers(folder):
    exact = dict(load_model(str(folder)).weights())

    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(folder, strip)
    loaded = dict(load_model(str(folder)).weights())
    assert exact.keys() == loaded.keys() and all(torch.equal(exact[name], loaded[name]) for name in exact)


def cut_off(folder) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


UP_PROJ = "model.layers.2.mlp.up_proj.weight"
DAMAGES = {
    r"lacks weights .*model\.layers\.2\.mlp\.up_proj\.weight": lambda f: rewrite(
        f, lambda tensors: tensors.pop(UP_PROJ)
    ),
    r"lacks weights .*lm_head\.weight": lambda f: set_config(f, tie_word_embeddings=False),
    r"model\.layers\.9\.odd": lambda f: rewrite(
        f, lambda tensors: tensors.update({"model.layers.9.odd": torch.ones(1)})
    ),
    r"embed_tokens\.weight has shape \[30, 64\].* asks for \[31, 64\]": lambda f: set_config(f, vocab_size=31),
    r"model\.safetensors' is damaged": cut_off,
}


@pytest.mark.parametrize("said", DAMAGES)
def test_weights_that_do_not_fit_the_config_are_named(folder, said):
    DAMAGES[said](folder)
    with pytest.raises(UserError, match=said):
        load_model(str(folder))


def test_a_shard_that_is_not_there(make_hf, tmp_path):
    make_hf("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    gone = weight_files(tmp_path)[1]
    gone.unlink()
    with pytest.raises(UserError, match=gone.name):
        load_model(str(tmp_path))


def test_folders_that_are_no_models(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):
        load_model(str(tmp_path / "empty"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        load_model(str(folder))
    (folder / "config.json").write_text("{ not json")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        load_model(str(folder))


@pytest.mark.parametrize("source", ["/nowhere/at/all", "preset:tiny", "run:demo@last", "nothing", "a/b/c"])
def test_a_path_that_does_not_exist_lists_what_can_be_given(source):
    with pytest.raises(UserError, match=r"\.gguf.*hub id.*preset:NAME.*run:NAME@STEP"):
        load_model(source)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UserError, match="not a GGUF"):
        load_model(str(tmp_path / "notes.txt"))


def test_hub_ids_go_to_the_hub_for_what_is_needed(folder, monkeypatch):
    calls = []

    def download(source, cache_dir, allow_patterns, tqdm_class):
        calls.append((source, cache_dir, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert isinstance(load_model("org/name", cache_dir="here"), Decoder)
    assert len(calls) == 1 and calls[0][:2] == ("org/name", "here")
    assert "*.safetensors" in calls[0][2] and "*" not in calls[0][2]


def test_an_unreachable_hub_says_to_give_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'org/name'.*give a local folder"):
        load_model("org/name", cache_dir=tmp_path)


def test_other_architectures_fall_back_to_transformers(tmp_path, logit_difference, randomise):
    from transformers import GPT2Config, GPT2LMHeadModel

    hf = randomise(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64)))
    hf.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert isinstance(model, HFModel)
    assert logit_difference(model, hf) < 1e-4
    rewrite(tmp_path, lambda tensors: tensors.pop("transformer.h.0.mlp.c_fc.weight"))
    with pytest.raises(UserError, match=r"h\.0\.mlp\.c_fc\.weight"):
        load_model(str(tmp_path))


SIZES = {"pico": 0.14e6, "nano": 0.25e6, "tiny": 0.9e6, "tiny-llama": 0.9e6, "small": 4e6, "base": 12e6, "medium": 30e6}


def test_presets_have_the_documented_sizes():
    assert SIZES.keys() == PRESETS.keys()
    for name, size in SIZES.items():
        assert preset(name, vocab_size=256, max_length=512).parameters == pytest.approx(size, rel=0.1), name


def test_preset_weights_depend_on_the_seed_only():
    prints = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(prints))
        prints.append(fingerprint(build_preset("nano", vocab_size=30, max_length=64, seed=seed).weights()))
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["Qwen2ForSequenceClassification"], True),
        (["BertForSequenceClassification"], True),
        (["Qwen2ForCausalLM"], False),
        ("ForSequenceClassification", False),
        (None, False),
    ],
)
def test_classification_models_are_recognized_by_their_config(tmp_path, monkeypatch, architectures, expected):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    assert is_classifier(str(tmp_path)) is expected
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, file: str(tmp_path / file))
    assert is_classifier("org/name") is expected


def test_sources_without_a_config_are_no_classification_models(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    for source in ("org/name", "run:demo@last", str(tmp_path), str(tmp_path / "missing"), "model.gguf"):
        assert not is_classifier(source)
