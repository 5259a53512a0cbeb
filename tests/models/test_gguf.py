"""GGUF files, written here and read back; and a real one against transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assay.models import Decoder, load_model, spec_from_hf
from assay.models.base import LoadOptions
from assay.models.decoder import llama3_frequencies, rope_frequencies
from assay.models.load import load_fallback
from assay.types import UserError

gguf = pytest.importorskip("gguf")
Q8, Q4, F32, F16 = (getattr(gguf.GGMLQuantizationType, name) for name in ("Q8_0", "Q4_0", "F32", "F16"))


def gguf_name(name: str, arch: str) -> str:
    """By the table of the gguf package, which llama.cpp's converter uses. Unknown architectures: as Llama."""
    known = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    found = gguf.get_tensor_name_map(known.get(arch, gguf.MODEL_ARCH.LLAMA), 9).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp does to Llama's queries and keys, row by row: x0 x1 .. y0 y1 .. becomes x0 y0 x1 y1 .."""
    width = len(weight) // heads
    order = [
        head * width + half * (width // 2) + i for head in range(heads) for i in range(width // 2) for half in (0, 1)
    ]
    return weight[order]


def write_gguf(
    path: Path,
    hf: Any,
    arch: str,
    kinds: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    **metadata: Any,
) -> None:
    """A GGUF of a transformers model; `kinds` says how some tensors are stored (others in fp32)."""
    config = hf.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for name, value in metadata.items():
        getattr(writer, name)(value)
    tensors = {gguf_name(name, arch): weight.detach().numpy() for name, weight in hf.named_parameters()}
    for name, value in {**tensors, **(extra or {})}.items():
        if arch in ("llama", "smollm3") and ".attn_q." in name:
            value = interleave(value, config.num_attention_heads)
        if arch in ("llama", "smollm3") and ".attn_k." in name:
            value = interleave(value, config.num_key_value_heads)
        if arch == "gemma3" and "norm" in name:
            value = value + 1
        kind = (kinds or {}).get(name, F32)
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(value), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_weights(model: Any, hf: Any) -> bool:
    ours, theirs = dict(model.weights()), dict(hf.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5}),
        ("llama", {"head_dim": 24}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    ],
)
def test_spec_and_weights_come_back_exactly(arch, changes, make_hf, logit_difference, tmp_path):
    hf = make_hf(arch, **changes)
    write_gguf(tmp_path / "m.gguf", hf, arch)
    model = load_model(str(tmp_path / "m.gguf"))
    assert isinstance(model, Decoder)
    assert model.spec == spec_from_hf(hf.config.to_dict())
    assert same_weights(model, hf)
    assert logit_difference(model, hf) < 1e-4


SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
OTHERS = {  # architecture of the file, family, changes of the config, metadata
    "gemma 3": ("gemma3", "gemma3_text", {"num_hidden_layers": 7}, {"add_sliding_window": 6}),
    "gemma 3, all metadata": (
        "gemma3",
        "gemma3_text",
        {"layer_types": SLIDING},
        {"add_sliding_window": 6, "add_sliding_window_pattern": [True, True, False], "add_rope_freq_base_swa": 50.0},
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, {}),
    "olmo 2": ("olmo2", "olmo2", {}, {}),
    "phi 3": ("phi3", "phi3", {}, {"add_sliding_window": 0, "add_rope_dimension_count": 8}),
    "phi 3 window, partial rotary": (
        "phi3",
        "phi3",
        {
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        },
        {"add_sliding_window": 5, "add_rope_dimension_count": 6},
    ),
    "glm 4": ("glm4", "glm4", {}, {"add_rope_dimension_count": 4}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_files_of_other_families_come_back(case, make_hf, logit_difference, tmp_path):
    arch, family, changes, metadata = OTHERS[case]
    if case == "gemma 3":  # what its files leave out
        changes = changes | {
            "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        }
    elif arch == "gemma3":
        changes = changes | {"query_pre_attn_scalar": 8}
    hf = make_hf(family, **changes)
    write_gguf(tmp_path / "m.gguf", hf, arch, **metadata)
    model = load_model(str(tmp_path / "m.gguf"))
    assert isinstance(model, Decoder)
    assert model.spec == spec_from_hf(hf.config.to_dict())
    for name, weight in model.weights():  # adding and subtracting 1 rounds
        torch.testing.assert_close(weight, dict(hf.named_parameters())[name], rtol=0, atol=2e-7, msg=name)
    assert logit_difference(model, hf) < 1e-4


def test_longrope_is_named(make_hf, tmp_path):
    factors = {"rope_factors_long.weight": np.ones(4, dtype=np.float32)}
    write_gguf(tmp_path / "m.gguf", make_hf("phi3"), "phi3", extra=factors)
    with pytest.raises(UserError, match="longrope"):
        load_model(str(tmp_path / "m.gguf"))


def test_quantised_weights_are_dequantised_in_place(make_hf, tmp_path):
    hf = make_hf("llama", hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    kinds = {"token_embd.weight": Q8, "blk.0.attn_q.weight": Q8, "blk.1.ffn_up.weight": F16}
    write_gguf(tmp_path / "m.gguf", hf, "llama", kinds)
    counts: list[tuple[int, int]] = []
    model = load_model(str(tmp_path / "m.gguf"), report=lambda done, total, _: counts.append((done, total)))
    weights = model.state_dict()
    assert counts == sorted(counts) and counts[-1] == (model.spec.parameters,) * 2 and len(counts) > 10
    for name, exact in hf.state_dict().items():
        if name == "lm_head.weight":
            continue
        kind = kinds.get(gguf_name(name, "llama"), F32)
        bound = {F32: 0.0, F16: 1e-3, Q8: 0.01}[kind] * float(exact.abs().max())
        error = float((weights[name] - exact).abs().max())
        assert error <= bound and (kind == F32 or error > 0), name


def test_large_tensors_are_read_in_pieces(make_hf, tmp_path, monkeypatch):
    monkeypatch.setattr("assay.models.gguf.VALUES_AT_ONCE", 100)  # three rows of the embedding
    hf = make_hf("qwen2")
    write_gguf(tmp_path / "m.gguf", hf, "qwen2")
    assert same_weights(load_model(str(tmp_path / "m.gguf")), hf)


@pytest.mark.parametrize("embedding_kind", [Q4, F16])
def test_a_tied_embedding_takes_the_better_output_copy(make_hf, tmp_path, embedding_kind):
    hf = make_hf("qwen2", hidden_size=64, intermediate_size=64, tie_word_embeddings=True)
    output = hf.lm_head.weight.detach().numpy()
    kinds = {"token_embd.weight": embedding_kind}
    write_gguf(tmp_path / "m.gguf", hf, "qwen2", kinds, extra={"output.weight": output})
    model = load_model(str(tmp_path / "m.gguf"))
    assert isinstance(model, Decoder) and model.spec.tied
    assert torch.equal(model.model.embed_tokens.weight, hf.lm_head.weight)


def test_an_output_of_its_own_stays_apart(make_hf, tmp_path):
    hf = make_hf("qwen2", hidden_size=64, intermediate_size=64)
    write_gguf(tmp_path / "m.gguf", hf, "qwen2", {"token_embd.weight": Q4, "output.weight": Q8})
    model = load_model(str(tmp_path / "m.gguf"))
    assert isinstance(model, Decoder) and not model.spec.tied
    assert float((model.lm_head.weight - hf.lm_head.weight).detach().abs().max()) < 0.02


def test_linear_scaling_is_read(make_hf, logit_difference, tmp_path):
    hf = make_hf("llama", "linear")
    linear = {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 4.0}
    write_gguf(tmp_path / "m.gguf", hf, "llama", **linear)
    assert logit_difference(load_model(str(tmp_path / "m.gguf")), hf) < 1e-4


def test_llama3_scaling_is_recovered_from_its_divisors(make_hf, logit_difference, tmp_path):
    rule = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, **rule}
    hf = make_hf("llama", rope_parameters=rope, head_dim=32, max_position_embeddings=131072)
    plain = 1.0 / 500_000.0 ** (torch.arange(0, 32, 2).float() / 32)
    divisors = (plain / llama3_frequencies(plain, **rule)).numpy()
    write_gguf(tmp_path / "m.gguf", hf, "llama", extra={"rope_freqs.weight": divisors})
    model = load_model(str(tmp_path / "m.gguf"))
    assert isinstance(model, Decoder) and dict(model.spec.rope_scaling) == {"rope_type": "llama3", **rule}
    torch.testing.assert_close(rope_frequencies(model.spec), hf.model.rotary_emb.inv_freq)
    assert logit_difference(model, hf) < 1e-4
    odd = np.linspace(1, 5, 16, dtype=np.float32)
    write_gguf(tmp_path / "odd.gguf", hf, "llama", extra={"rope_freqs.weight": odd})
    with pytest.raises(UserError, match="unknown rotary frequencies"):
        load_model(str(tmp_path / "odd.gguf"))


def test_what_cannot_be_read_is_one_clear_line(make_hf, tmp_path):
    hf = make_hf("llama")
    write_gguf(tmp_path / "yarn.gguf", hf, "llama", add_rope_scaling_type=gguf.RopeScalingType.YARN)
    with pytest.raises(UserError, match="yarn"):
        load_model(str(tmp_path / "yarn.gguf"))
    write_gguf(tmp_path / "m.gguf", hf, "llama")
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (20, 300, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut\.gguf' is damaged"):
            load_model(str(tmp_path / "cut.gguf"))
    write_gguf(tmp_path / "rwkv.gguf", hf, "unheard-of")
    with pytest.raises(UserError, match=r"transformers cannot load the model in .*rwkv\.gguf"):
        load_model(str(tmp_path / "rwkv.gguf"))
    hf.config.num_hidden_layers = 10**7  # transformers would create as many
    write_gguf(tmp_path / "deep.gguf", hf, "unheard-of")
    with pytest.raises(UserError, match=r"deep\.gguf': block_count must be an integer from 1 to 2,000"):
        load_model(str(tmp_path / "deep.gguf"))


def test_a_file_for_transformers_names_the_missing_extra(make_hf, tmp_path, monkeypatch):
    write_gguf(tmp_path / "rwkv.gguf", make_hf("llama"), "unheard-of")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UserError, match=r"rwkv\.gguf .* needs the gguf extra: pip install"):
        load_model(str(tmp_path / "rwkv.gguf"))


def test_transformers_reads_a_file_with_accelerate(make_hf, logit_difference, tmp_path):
    pytest.importorskip("accelerate", reason="the extra gguf is not installed")
    hf = make_hf("llama")
    write_gguf(tmp_path / "m.gguf", hf, "llama")
    model = load_fallback(tmp_path, LoadOptions("cpu", torch.float32), "m.gguf")
    assert logit_difference(model, hf) < 1e-4


# The capital of France, in the tokens of each model, and the token of Paris.
REAL = {
    "smollm2-135m-instruct.q4_1.gguf": ([504, 3575, 282, 4649, 314], 7042),
    "gemma-3-270m.q4_k_m.gguf": ([2, 818, 5279, 529, 7001, 563], 9079),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_files_equal_transformers(real_models: Path, name: str) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    if not (real_models / name).is_file():
        pytest.skip(f"{name} is not in {real_models} (set ASSAY_MODELS)")
    prompt, paris = REAL[name]
    model = load_model(str(real_models / name))
    assert isinstance(model, Decoder)
    hf = load_fallback(real_models, LoadOptions("cpu", torch.float32), name)
    theirs = dict(hf.weights())
    assert all(torch.equal(weight, theirs.pop(name)) for name, weight in model.weights()) and not theirs
    ids = torch.tensor(prompt)
    long = torch.cat((ids, torch.randint(1000, 5000, (700,), generator=torch.Generator().manual_seed(0))))
    with torch.no_grad():
        logits = model.unembed(model.hidden(ids, [len(ids)]))
        assert paris in logits[-1].topk(5).indices.tolist()
        assert (logits - hf.hidden(ids, [len(ids)])).abs().max() < 1e-3  # they are as large as 30
        ends = [m.unembed(m.hidden(long, [len(long)])[-3:]) for m in (model, hf)]
    assert (ends[0] - ends[1]).abs().max() < 1e-3  # longer than Gemma's window of 512 tokens
