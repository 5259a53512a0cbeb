"""NF4 weights: their values, products and gradients. Models with such weights are in test_lora.py."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch
from torch import Tensor, nn

from assay.models.quantize import BLOCK, NF4, NF4Linear, dequantize, quantize, quantize_layers


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
