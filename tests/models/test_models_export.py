"""What we save is what transformers, and we, load."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest
import torch
from safetensors.torch import load_file

from assay.models import Decoder, HFModel, fingerprint, load_model, save_model
from assay.models.load import build_preset
from assay.types import UserError

CASES = [
    ("llama", "llama3", {"attention_bias": True, "mlp_bias": True}),
    ("llama", "linear", {"tie_word_embeddings": True, "head_dim": 24}),
    ("qwen2", None, {"tie_word_embeddings": True}),
    ("qwen2", None, {}),
    ("qwen3", "llama3", {"head_dim": 16}),
    ("mistral", None, {"sliding_window": 9, "head_dim": 12}),
    ("mistral", None, {}),
    ("gemma3_text", "linear", {}),
    ("gemma3_text", None, {"layer_types": ["full_attention"] * 3, "query_pre_attn_scalar": 8}),
    ("smollm3", None, {}),
    ("olmo2", None, {}),
    ("phi3", None, {"sliding_window": 9}),
    ("phi3", None, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.75}}),
    ("glm4", None, {}),
]


def from_pretrained(folder, **options):
    from transformers import AutoModelForCausalLM

    hf, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return hf.eval()


@pytest.mark.parametrize(("family", "scaling", "changes"), CASES)
def test_transformers_loads_the_same_logits(family, scaling, changes, make_hf, logit_difference, tmp_path):
    make_hf(family, scaling, **changes).save_pretrained(tmp_path / "theirs")
    model = load_model(str(tmp_path / "theirs"))
    save_model(model, tmp_path / "ours")
    assert logit_difference(model, from_pretrained(tmp_path / "ours")) < 1e-4
    again = load_model(str(tmp_path / "ours"))
    assert isinstance(model, Decoder) and isinstance(again, Decoder) and again.spec == model.spec
    assert fingerprint(again.weights()) == fingerprint(model.weights())


def test_shards_with_an_index(logit_difference, tmp_path):
    model = build_preset("nano", vocab_size=30, max_length=64, seed=0)
    save_model(model, tmp_path, shard_bytes=200_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3 and all(shard.stat().st_size < 210_000 for shard in shards)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * model.spec.parameters
    assert set(index["weight_map"]) == {name for name, _ in model.weights()}
    assert fingerprint(load_model(str(tmp_path)).weights()) == fingerprint(model.weights())
    assert torch.equal(from_pretrained(tmp_path).lm_head.weight, model.lm_head.weight)


def test_saving_again_leaves_no_old_weights_behind(tmp_path):
    first, second = (build_preset("nano", vocab_size=30, max_length=64, seed=seed) for seed in (0, 1))
    for shard_bytes in (200_000, 10**9, 300_000):
        save_model(first, tmp_path, shard_bytes=shard_bytes)
        save_model(second, tmp_path)
        assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
        assert fingerprint(load_model(str(tmp_path)).weights()) == fingerprint(second.weights())


def test_dtype_and_special_tokens_are_written(tmp_path):
    model = build_preset("tiny-llama", vocab_size=30, max_length=64, seed=0)
    save_model(model, tmp_path, torch.bfloat16, eos_ids=[5, 6], pad_id=7)
    hf = from_pretrained(tmp_path, dtype="auto")
    assert hf.dtype == torch.bfloat16
    assert hf.generation_config.eos_token_id == [5, 6] and hf.generation_config.pad_token_id == 7
    assert hf.config.bos_token_id is None  # and not the family's default
    # Without its version, transformers takes a large tokenizer beside it for one with a broken pattern.
    assert json.loads((tmp_path / "config.json").read_text())["transformers_version"] == version("transformers")
    saved = load_model(str(tmp_path), dtype=torch.bfloat16)
    assert fingerprint(saved.weights()) == fingerprint(model.weights(), torch.bfloat16)
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fallback_models_come_back(randomise, logit_difference, tmp_path, dtype):
    from transformers import GPT2Config, GPT2LMHeadModel

    hf = randomise(
        GPT2LMHeadModel(
            GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
        )
    )
    model = HFModel(hf)
    save_model(model, tmp_path, dtype, eos_ids=[3], pad_id=4)
    again = load_model(str(tmp_path), dtype=dtype or torch.float32)
    assert fingerprint(again.weights()) == fingerprint(model.weights(), dtype)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert from_pretrained(tmp_path, dtype="auto").dtype == (dtype or torch.float32)
    assert from_pretrained(tmp_path).generation_config.eos_token_id == 3
    assert model.hf.dtype == torch.float32
    if dtype is None:
        assert logit_difference(again, hf) < 1e-4


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the model"):
        save_model(build_preset("nano", vocab_size=30, max_length=64, seed=0), tmp_path / "file" / "model")


def test_a_file_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    from assay.models import export

    monkeypatch.setattr(export, "WRITERS", 2)
    files = [(tmp_path / str(n), {"a": torch.full((3,), n)}) for n in range(7)]
    export.write_files(iter(files))
    assert [int(load_file(path)["a"][0]) for path, _ in files] == list(range(7))
    with pytest.raises(Exception, match="No such file"):
        export.write_files([*files[:3], (tmp_path / "absent" / "x", files[0][1]), *files[3:]])
