"""NF4 weights: their values, products and gradients, adapters on them, export, and the engines that serve them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assay.models import Lora, PolicyModel, load_adapter, load_model, save_adapter, save_model
from assay.models.quantize import BLOCK, NF4, NF4Linear, dequantize, quantize, quantize_layers, quantized_layers

IDS, LENGTHS = torch.randint(61, (30,), generator=torch.Generator().manual_seed(0)), [11, 4, 15]
FAMILIES = {"qwen2": {}, "llama": {"tie_word_embeddings": True}, "gemma": {"head_dim": 8}}  # the last is a fallback
LINEAR = 7 * 2  # linear layers of the two decoder layers

Loader = Callable[..., PolicyModel]


@pytest.fixture
def base(make_hf: Callable[..., Any], tmp_path: Path) -> Loader:
    def load(family: str = "qwen2", dtype: torch.dtype = torch.float64) -> PolicyModel:
        folder = tmp_path / family
        if not folder.exists():
            make_hf(family, **FAMILIES[family]).save_pretrained(folder)
        return load_model(str(folder), dtype=dtype)

    return load


def adapt(policy: PolicyModel, trained: bool = True, targets: tuple[str, ...] = ("all-linear",)) -> PolicyModel:
    policy.add_lora(Lora(3, 8.0, targets, base="org/base"), seed=5)
    if trained:
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for weight in (p for p in policy.parameters() if p.requires_grad):
                weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return policy


def quantized(policy: PolicyModel) -> PolicyModel:
    policy.quantize("cpu")
    return policy


def rounded(policy: PolicyModel) -> PolicyModel:
    """A plain model whose linear layers have the values of quantized ones."""
    policy.quantize("cpu")
    policy.dequantize()
    return policy


def logits(policy: PolicyModel) -> Tensor:
    return policy.unembed(policy.hidden(IDS, LENGTHS))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def nearest(weight: Tensor) -> Tensor:
    """The quantized weight by brute force: each block's scale times the nearest of the 16 values."""
    values, flat = torch.tensor(NF4, dtype=torch.float64), weight.double().flatten()
    out = []
    for block in flat.split(BLOCK):
        scale = block.abs().max()
        choices = (scale * values)[None].expand(len(block), -1)
        out.append(choices.gather(1, (choices - block[:, None]).abs().argmin(1, keepdim=True))[:, 0])
    return torch.cat(out).view(weight.shape)


def test_the_values_are_quantiles_of_the_normal_distribution() -> None:
    """Dettmers et al. 2023, appendix E: half quantiles up to 1 - (1/30 + 1/32) / 2, eight above and seven below 0."""
    last, normal = 1 - (1 / 30 + 1 / 32) / 2, NormalDist()
    above = [normal.inv_cdf(last + (0.5 - last) * step / 8) for step in range(8)]
    below = [-normal.inv_cdf(last + (0.5 - last) * step / 7) for step in range(7)]
    expected = [value / above[0] for value in sorted([*below, 0.0, *above])]
    assert list(NF4) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("shape", [(8, 64), (5, 37), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_become_the_nearest_value_of_their_block(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    codes, scales = quantize(weight)
    assert codes.dtype == torch.uint8 and scales.dtype == dtype
    restored = dequantize(codes, scales, shape)
    assert restored.dtype == dtype and restored.shape == weight.shape
    assert (
        torch.equal(restored, nearest(weight).to(dtype))
        if dtype != torch.float32
        else torch.allclose(restored.double(), nearest(weight), rtol=1e-7, atol=0)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_quantizing_dequantized_weights_again_changes_nothing(dtype: torch.dtype) -> None:
    """A resumed run quantizes the saved base again."""
    weight = torch.randn(256, 130, generator=torch.Generator().manual_seed(4)).to(dtype)
    weight[3] = 0.0  # blocks of zeros
    weight[5] *= 1e-20
    codes, scales = quantize(weight)
    again = quantize(dequantize(codes, scales, weight.shape))
    assert torch.equal(codes, again[0]) and torch.equal(scales, again[1])
    assert not dequantize(codes, scales, weight.shape)[3].any()


@pytest.mark.peer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_has_the_same_codes_and_values(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="the package bitsandbytes is not installed")
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(5)).to(dtype)
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    codes, scales = quantize(weight)
    assert torch.equal(state.code, torch.tensor(NF4))
    assert torch.equal(state.absmax, scales.float())
    assert torch.equal(theirs.flatten(), codes)
    assert torch.equal(functional.dequantize_4bit(theirs, state), dequantize(codes, scales, weight.shape))


@pytest.mark.parametrize("bias", [True, False])
def test_product_and_gradient_are_those_of_the_dequantized_weight(bias: bool) -> None:
    plain = nn.Linear(50, 24, bias=bias, dtype=torch.float64)
    network = nn.ModuleDict({"layer": plain})
    quantize_layers(network, ["layer"], "cpu")
    layer = network["layer"]
    assert isinstance(layer, NF4Linear)
    x = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)
    expected = nn.functional.linear(x, layer.weight, plain.bias)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = layer(x)
    assert torch.equal(out, expected)
    assert max(tensor.nbytes for tensor in saved) < 24 * 50  # no dequantized copy is kept
    (got,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.allclose(got, wanted, rtol=0, atol=1e-14)


def test_products_follow_autocast() -> None:
    network = nn.ModuleDict({"layer": nn.Linear(64, 32, dtype=torch.bfloat16)})
    quantize_layers(network, ["layer"], "cpu")
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = network["layer"](x)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_are_those_on_the_dequantized_base(base: Loader, family: str) -> None:
    policy, plain = adapt(quantized(base(family))), adapt(rounded(base(family)))
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


def test_layers_without_adapters_are_quantized_too(base: Loader, tmp_path: Path) -> None:
    policy = adapt(quantized(base()), targets=("q_proj",))
    assert len(list(quantized_layers(policy.network))) == LINEAR
    assert sum(p.requires_grad for p in policy.parameters()) == 2 * 2
    save_model(policy, tmp_path / "merged")
    assert difference(logits(load_model(str(tmp_path / "merged"), dtype=torch.float64)), logits(policy)) < 1e-10


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
