"""Adapters, also on quantized layers: what is trained, what is merged, and that PEFT reads what we save."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assay.engine import Request, SamplingParams, generate, make_engine
from assay.models import HFModel, Lora, PolicyModel, load_adapter, load_model, save_adapter, save_model
from assay.models.base import fingerprint
from assay.models.quantize import BLOCK, quantized_layers
from assay.types import UserError

IDS, LENGTHS = torch.randint(61, (30,), generator=torch.Generator().manual_seed(0)), [11, 4, 15]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SEVEN = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
LINEAR = 7 * 2  # linear layers of the two decoder layers
FAMILIES = {
    "qwen2": {},
    "llama": {"tie_word_embeddings": True},
    "gemma3_text": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "gemma": {"head_dim": 8},  # a fallback
}
TARGETS = {"phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}  # of the others: SEVEN

Loader = Callable[..., PolicyModel]


@pytest.fixture
def base(make_hf: Callable[..., Any], tmp_path: Path) -> Loader:
    def load(family: str = "qwen2", dtype: torch.dtype = torch.float64) -> PolicyModel:
        folder = tmp_path / family
        if not folder.exists():
            make_hf(family, **FAMILIES[family]).save_pretrained(folder)
        return load_model(str(folder), dtype=dtype)

    return load


def adapt(policy: PolicyModel, trained: bool = True, targets: Sequence[str] = SEVEN, rank: int = 3) -> PolicyModel:
    policy.add_lora(Lora(rank, 8.0, tuple(targets), base="org/base"), seed=5)
    if trained:
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for weight in (p for p in policy.parameters() if p.requires_grad):
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return policy


def quantized(policy: PolicyModel, really: bool = True) -> PolicyModel:
    if really:
        policy.quantize("cpu")
    return policy


def dequantized(policy: PolicyModel) -> PolicyModel:
    policy.dequantize()
    return policy


def logits(policy: PolicyModel) -> Tensor:
    return policy.unembed(policy.hidden(IDS, LENGTHS))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_fresh_adapters_change_nothing_and_learn_alone(base: Loader, family: str) -> None:
    targets = TARGETS.get(family, SEVEN)
    plain, policy = base(family), adapt(base(family), False, targets)
    assert torch.equal(logits(policy), logits(plain)) and policy.adapters_are_zero()
    logits(policy).square().sum().backward()
    graded = {name for name, p in policy.named_parameters() if p.grad is not None}
    adapters = {name for name, _ in policy.named_parameters() if ".lora_" in name}
    assert graded == adapters == {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * len(targets) * 2  # layers, A and B
    assert all(
        p.grad is not None and bool(p.grad.any()) for n, p in policy.named_parameters() if n.endswith("lora_B.weight")
    )
    assert sum(p.numel() for p in policy.parameters() if not p.requires_grad) == sum(
        p.numel() for p in plain.parameters()
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_merged_weights_give_the_logits_of_the_adapters(
    base: Loader, family: str, in_4_bits: bool, tmp_path: Path
) -> None:
    plain = dequantized(quantized(base(family), in_4_bits))
    policy = adapt(quantized(base(family), in_4_bits), targets=TARGETS.get(family, SEVEN))
    before = fingerprint(plain.weights())
    expected = logits(policy)
    assert difference(expected, logits(plain)) > 0.1
    save_model(policy, tmp_path / "merged")
    merged = load_model(str(tmp_path / "merged"), dtype=torch.float64)
    assert difference(logits(merged), expected) < 1e-10
    assert fingerprint(merged.weights()) == fingerprint(policy.weights()) != before
    with policy.adapters_off():
        assert difference(logits(policy), logits(plain)) <= (1e-12 if in_4_bits else 0.0)
        assert fingerprint(policy.weights()) == before  # merging never writes to the base
    assert torch.equal(logits(policy), expected)


def test_what_is_added_is_alpha_over_rank_times_b_a(base: Loader) -> None:
    plain, policy = dict(base().weights()), adapt(base())
    state = policy.state_dict()
    for name, weight in policy.weights():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in state:
            added = state[f"{layer}.lora_B.weight"] @ state[f"{layer}.lora_A.weight"] * (8.0 / 3)
            assert torch.allclose(weight, plain[name] + added, rtol=0, atol=1e-14)
        else:
            assert torch.equal(weight, plain[name])


def test_half_precision_is_merged_in_single(base: Loader) -> None:
    policy = adapt(base(dtype=torch.bfloat16), targets=["q_proj"])
    dtypes = {name.endswith("q_proj.weight"): weight.dtype for name, weight in policy.weights()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def test_fresh_adapters_depend_on_the_seed_alone(base: Loader) -> None:
    def fresh(seed: int) -> Tensor:
        policy = base()
        policy.add_lora(Lora(3, 8.0), seed)
        return torch.cat([p.detach().flatten() for p in policy.parameters() if p.requires_grad])

    assert torch.equal(fresh(1), fresh(1)) and not torch.equal(fresh(1), fresh(2))
    a = adapt(base(), trained=False, rank=400).state_dict()["model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert float(a.abs().max()) <= 32**-0.5 and float(a.std()) == pytest.approx((3 * 32) ** -0.5, rel=0.02)


@pytest.mark.parametrize(("family", "engine", "in_4_bits"), [("qwen2", "native", True), ("gemma", "hf", False)])
def test_engines_serve_the_merged_weights(base: Loader, family: str, engine: str, in_4_bits: bool) -> None:
    policy = adapt(quantized(base(family, torch.float32), in_4_bits))
    served = make_engine(engine, policy, device="cpu", dtype=torch.float32)
    request = Request(IDS[:9].tolist(), SamplingParams(temperature=0.0, max_new_tokens=1), seed=0)
    tokens = set()
    for version in range(1, 4):
        with torch.no_grad():
            for weight in (p for p in policy.parameters() if p.requires_grad):
                weight.mul_(1.5)
            expected = policy.unembed(policy.hidden(IDS[:9], [9])).log_softmax(-1)
        served.update_weights(policy, version)
        assert served.fingerprint() == fingerprint(policy.weights())
        ((written,),) = generate(served, [request])
        (logprobs,) = served.score([IDS[:9].tolist()])
        assert logprobs == pytest.approx(expected[:-1].gather(1, IDS[1:9, None])[:, 0].tolist(), abs=2e-4)
        assert written.token_ids == [int(expected[-1].argmax())]
        tokens.add(written.token_ids[0])
    assert len(tokens) > 1  # or the adapters would not matter


def test_all_linear_is_every_projection_but_the_head(base: Loader) -> None:
    every, seven = adapt(base(), targets=["all-linear"]), adapt(base(), targets=SEVEN)
    assert [n for n, _ in every.named_parameters()] == [n for n, _ in seven.named_parameters()]
    some = adapt(base(), targets=["self_attn.q_proj", "1.mlp.up_proj"])
    layers = {n.partition(".lora_")[0] for n, _ in some.named_parameters() if ".lora_" in n}
    assert layers == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_targets_that_cannot_be_adapted_are_named(base: Loader) -> None:
    with pytest.raises(UserError, match=r"'proj'; there are down_proj, gate_proj, k_proj"):
        adapt(base(), targets=["q_proj", "proj"])
    with pytest.raises(UserError, match="lm_head shares its weights"):
        adapt(base("llama"), targets=["lm_head"])
    adapt(base(), targets=["lm_head"])  # its weights are its own


def test_saved_adapters_come_back_to_the_last_bit(base: Loader, tmp_path: Path) -> None:
    policy = adapt(base())
    save_adapter(policy, tmp_path / "adapter")
    again = adapt(base(), trained=False)
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(policy))
    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names and len(names) == 28
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 8.0, "org/base")
    for other in (adapt(base(), rank=2), adapt(base(), targets=ATTENTION)):
        with pytest.raises(UserError, match="another rank"):
            load_adapter(other, tmp_path / "adapter")
    other = adapt(base())
    with torch.no_grad():
        dict(other.named_parameters())["model.norm.weight"][0] += 1e-6
    with pytest.raises(UserError, match="other base weights"):
        load_adapter(other, tmp_path / "adapter")


def test_adapters_of_earlier_checkpoints_name_their_base_in_the_weights(base: Loader, tmp_path: Path) -> None:
    policy = adapt(base())
    save_adapter(policy, tmp_path)
    weights, note = tmp_path / "adapter_model.safetensors", tmp_path / "base.json"
    fingerprint = json.loads(note.read_text())["fingerprint"]
    note.unlink()
    with pytest.raises(UserError, match=r"base\.json' is missing"):
        load_adapter(adapt(base()), tmp_path)
    save_file(load_file(weights), weights, {"format": "pt", "base": fingerprint})
    load_adapter(adapt(base(), trained=False), tmp_path)
    save_file(load_file(weights), weights, {"format": "pt", "base": "another"})
    with pytest.raises(UserError, match="other base weights"):
        load_adapter(adapt(base()), tmp_path)


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma"])
def test_gradients_of_adapters_are_those_on_the_dequantized_base(base: Loader, family: str) -> None:
    policy, plain = adapt(quantized(base(family))), adapt(dequantized(quantized(base(family))))
    assert len(list(quantized_layers(policy.network))) == LINEAR and not plain.quantized
    assert difference(logits(policy), logits(plain)) < 1e-12
    assert difference(logits(policy), logits(adapt(base(family)))) > 0.01  # quantization matters
    for model in (policy, plain):
        logits(model).square().sum().backward()
    ours = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() == {n for n, p in policy.named_parameters() if p.requires_grad}
    assert len(ours) == 2 * LINEAR
    for name, gradient in ours.items():
        assert torch.allclose(gradient, theirs[name], rtol=1e-9, atol=1e-9), name


def test_weights_are_counted_as_before_and_take_an_eighth_of_float32(base: Loader) -> None:
    plain, policy = base(dtype=torch.float32), quantized(base(dtype=torch.float32))
    assert policy.parameter_count == plain.parameter_count == sum(p.numel() for p in plain.parameters())
    linear = sum(m.weight.numel() for n, m in plain.named_modules() if isinstance(m, nn.Linear) and "layers" in n)
    assert plain.weight_bytes - policy.weight_bytes == linear * 4 - linear // 2 - linear // BLOCK * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_saved_for_a_base_that_is_loaded_again(base: Loader, tmp_path: Path, dtype: torch.dtype) -> None:
    """As in a resumed run: the dequantized base is saved in its dtype, loaded, and quantized again."""
    policy = adapt(quantized(base(dtype=dtype)))
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    save_adapter(policy, tmp_path / "adapter")
    with policy.adapters_off():
        save_model(policy, tmp_path / "base")
    again = adapt(quantized(load_model(str(tmp_path / "base"), dtype=dtype)), trained=False)
    load_adapter(again, tmp_path / "adapter")
    assert all(torch.equal(a, b) for a, b in zip(policy.parameters(), again.parameters(), strict=True))


@pytest.mark.peer
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("in_4_bits", [False, True])
def test_peft_computes_the_same_from_the_saved_adapter(
    base: Loader, family: str, in_4_bits: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    from transformers import AutoModelForCausalLM

    policy = adapt(quantized(base(family), in_4_bits), targets=TARGETS.get(family, SEVEN))
    save_adapter(policy, tmp_path / "adapter")
    with policy.adapters_off():
        save_model(policy, tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    # The families' own norms compute in float32, whatever the model's dtype.
    assert difference(logits(HFModel(adapted.base_model.model)), logits(policy)) < 1e-5
    assert difference(logits(base(family)), logits(policy)) > 0.1
    theirs = dict(adapted.merge_and_unload().named_parameters())
    ours = dict(policy.weights())
    assert ours.keys() == theirs.keys() and all(difference(ours[name], theirs[name]) < 1e-12 for name in ours)
