"""Our decoder against transformers, and what must hold when it is moved or cast."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from assay.build.models import prepare_policy
from assay.config import LoopConfig
from assay.models import Decoder, load_model
from assay.models.attention import PackedCausal
from assay.models.base import HFModel
from assay.models.load import build_preset, preset
from assay.models.lora import Lora
from assay.models.spec import ModelSpec
from assay.types import UserError

CASES = {
    "llama": ("llama", None, {}),
    "llama tied": ("llama", None, {"tie_word_embeddings": True}),
    "llama biases": ("llama", None, {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", None, {"head_dim": 24}),
    "llama narrow heads": ("llama", None, {"head_dim": 2, "num_key_value_heads": 1}),
    "llama without groups": ("llama", None, {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama 3 scaling": ("llama", "llama3", {}),
    "llama linear scaling": ("llama", "linear", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", None, {}),
    "qwen2 tied": ("qwen2", None, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2 linear scaling": ("qwen2", "linear", {}),
    "qwen3": ("qwen3", None, {}),
    "qwen3 tied, wide heads": ("qwen3", None, {"tie_word_embeddings": True, "head_dim": 16}),
    "qwen3 biases": ("qwen3", None, {"attention_bias": True}),
    "qwen3 llama3 scaling": ("qwen3", "llama3", {}),
    "mistral": ("mistral", None, {"head_dim": 12}),
    "mistral window": ("mistral", None, {"sliding_window": 9}),
    "gemma 3": ("gemma3_text", None, {}),
    "gemma 3 scaling, usual query scale": ("gemma3_text", "linear", {"query_pre_attn_scalar": 8}),
    "gemma 3 untied, biases": ("gemma3_text", None, {"tie_word_embeddings": False, "attention_bias": True}),
    "smollm3": ("smollm3", None, {}),
    "smollm3 every second, biases": (
        "smollm3",
        None,
        {"no_rope_layers": None, "no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo 2": ("olmo2", None, {}),
    "olmo 2 biases": ("olmo2", None, {"attention_bias": True, "num_key_value_heads": 4}),
    "phi 3": ("phi3", None, {}),
    "phi 3 window, partial rotary": (
        "phi3",
        None,
        {
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        },
    ),
    "glm 4": ("glm4", None, {}),
    "glm 4 without biases": ("glm4", None, {"attention_bias": False, "head_dim": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case, make_hf, logit_difference, tmp_path):
    family, scaling, changes = CASES[case]
    hf = make_hf(family, scaling, **changes)
    hf.save_pretrained(tmp_path)
    model = load_model(str(tmp_path))
    assert isinstance(model, Decoder)
    assert (
        model.spec.parameters == sum(p.numel() for p in hf.parameters()) == sum(p.numel() for p in model.parameters())
    )
    assert logit_difference(model, hf) < 1e-4
    assert logit_difference(model, hf, lengths=[9, 9]) < 1e-4  # equal lengths take the path without padding
    ids = torch.arange(12) % 7
    hf(input_ids=ids[None]).logits.logsumexp(-1).sum().backward()
    model.unembed(model.hidden(ids, [12])).logsumexp(-1).sum().backward()
    expected = dict(hf.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name].grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("mode", [True, "offload", pytest.param("partial", marks=pytest.mark.slow)])
def test_activation_checkpointing_changes_no_bit_of_the_gradients(mode, monkeypatch):
    """What is kept shrinks; with "offload", the inputs of layers are moved to main memory. "partial" is compiled."""
    moved = []
    save_on_cpu = torch.autograd.graph.save_on_cpu
    monkeypatch.setattr("assay.models.decoder.save_on_cpu", lambda **kwargs: moved.append(1) or save_on_cpu(**kwargs))
    gradients, kept = {}, {}
    for setting in (False, mode):
        model = build_preset("nano", vocab_size=20, max_length=64, seed=0)
        prepare_policy(
            model, LoopConfig(activation_checkpointing=setting, compile="on" if mode == "partial" else "off")
        )
        sizes = Counter()

        def pack(tensor, sizes=sizes):
            sizes["numbers"] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model.hidden(torch.arange(40) % 20, [25, 15])
        model.unembed(hidden).logsumexp(-1).sum().backward()
        gradients[setting] = [weight.grad for weight in model.parameters()]
        kept[setting] = sizes["numbers"]
    assert all(torch.equal(a, b) for a, b in zip(*gradients.values(), strict=True))
    assert kept[mode] < kept[False] * (0.9 if mode == "partial" else 0.25)
    assert len(moved) == (model.spec.layers if mode == "offload" else 0)


def test_settings_of_checkpointing_that_need_something_else_are_refused(make_hf):
    model = build_preset("nano", vocab_size=20, max_length=64, seed=0)
    with pytest.raises(UserError, match=r"'partial' needs compiled layers: set train.compile = 'on'"):
        prepare_policy(model, LoopConfig(activation_checkpointing="partial"))
    with pytest.raises(UserError, match="not for models that run through transformers"):
        prepare_policy(HFModel(make_hf("llama", None)), LoopConfig(activation_checkpointing=True))


def test_sequences_do_not_see_each_other():
    model = build_preset("nano", vocab_size=20, max_length=64, seed=0)
    ids = torch.arange(18) % 20
    other = ids.clone()
    other[:5] += 1
    with torch.no_grad():
        first, second = (model.hidden(packed, [5, 13])[5:] for packed in (ids, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("lengths", "shared"),
    [([6, 6], [0, 6]), ([4, 6, 6, 6], [0, 0, 6, 6]), ([6, 6, 6, 9], [0, 6, 6, 6]), ([6, 6, 9, 9, 8], [0, 6, 0, 9, 0])],
)
def test_identical_sequences_share_all_of_their_tokens(lengths, shared):
    """A shared prefix may be the whole sequence, and then no token follows it."""
    model = build_preset("nano", vocab_size=20, max_length=64, seed=0).double()
    leader, sequences = [], []
    for number, (length, prefix) in enumerate(zip(lengths, shared, strict=True)):
        fresh = [(7 * number + 3 * i + i * i) % 20 for i in range(length)]
        sequences.append(torch.tensor(leader[:prefix] + fresh[prefix:]))
        leader = leader if prefix else fresh
    with torch.no_grad():
        found = model.hidden(torch.cat(sequences), lengths, shared)
        alone = torch.cat([model.hidden(ids, [len(ids)]) for ids in sequences])
    torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 4, 7, 30])
@pytest.mark.parametrize("shared", [None, [0, 6, 6, 0, 0, 5]])
def test_attention_with_a_sliding_window_by_brute_force(window, shared):
    """Windows within a suffix, across the end of the shared prefix, and longer than all sequences."""
    lengths = [9, 8, 12, 20, 5, 7]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(sum(lengths), heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    leader = 0
    for start, common in zip(starts, shared or [], strict=False):
        leader = leader if common else start
        for x in (q, k, v):
            x[start : start + common] = x[leader : leader + common]
    layout = PackedCausal(lengths, "cpu", shared)
    if shared:
        out = layout(*(x[layout.computed] for x in (q, k, v)), window, 0.3)[layout.restore]
    else:
        out = layout(q, k, v, window, 0.3)
    for start, length in zip(starts, lengths, strict=True):
        for token in range(start, start + length):
            seen = slice(max(start, token + 1 - window), token + 1)
            for head in range(4):
                weights = (k[seen, head // 2] @ q[token, head] * 0.3).softmax(0)
                torch.testing.assert_close(out[token, head], weights @ v[seen, head // 2], rtol=0, atol=1e-12)


def test_casting_keeps_the_rotary_frequencies_exact():
    model = build_preset("nano", vocab_size=20, max_length=64, seed=0)
    before = model.inv_freq.clone()
    model.to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.inv_freq.dtype == torch.float32 and torch.equal(model.inv_freq, before)
    assert model.hidden(torch.arange(6), [6]).dtype == torch.bfloat16


def test_a_tied_head_stays_tied_when_materialised():
    with torch.device("meta"):
        model = Decoder(preset("nano", vocab_size=20, max_length=64))
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.inv_freq.device.type == "cpu"
    assert "lm_head.weight" not in dict(model.weights())


PIECES = {
    "llama": {"family": "llama"},
    "biases": {"family": "qwen2", "qkv_bias": True, "mlp_bias": True},
    "head norms": {"family": "qwen3", "qk_norm": True},
    "one layer": {"family": "llama", "layers": 1},
    "adapters": {"family": "llama"},
}


@pytest.mark.parametrize("bridged", [True, False])
@pytest.mark.parametrize("piece", PIECES)
def test_pieces_that_are_compiled_compute_the_same(piece, bridged):
    sizes = {"vocab_size": 50, "hidden": 16, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 24}
    model = Decoder(ModelSpec(**sizes | {"max_length": 32} | PIECES[piece])).double()
    model.initialise(0)
    if piece == "adapters":
        model.add_lora(Lora(rank=2, alpha=4.0, targets=("k_proj",)))
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.lora_B.weight.fill_(0.1)
    names = list(model.state_dict())
    expected = hidden_and_gradients(model)
    model.compile_layers(bridged)
    with torch.compiler.set_stance("force_eager"):  # the pieces themselves: fusing them is torch's own business
        found = hidden_and_gradients(model)
    assert list(model.state_dict()) == names
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def hidden_and_gradients(model):
    ids = torch.arange(12) % model.vocab_size
    hidden = model.hidden(ids, [5, 7])
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    mix = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    return [hidden.detach(), *torch.autograd.grad((hidden * mix).sum(), weights, allow_unused=True)]
