"""Frozen linear layers whose weights are stored in 4 bits: NF4, as in QLoRA (https://arxiv.org/abs/2305.14314).

A block of 64 consecutive weights has one scale, its largest absolute value, in the dtype of the weights; each weight is
the index of the nearest of 16 fixed values times that scale. Scales of bfloat16 weights are exact in bfloat16, so a
weight takes 4.25 bits, and quantizing dequantized weights again gives the same codes and scales.

Products dequantize the weight of one layer at a time, and again in the backward pass: no copy is kept between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from assay.models.device import autocast_dtype, uses_triton

# Quantiles of the normal distribution, scaled to [-1, 1]: eight steps above 0, seven below, and 0 itself.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK = 64  # weights per scale
CODES, SCALES = "weight_codes", "weight_scales"  # names of the parameters that replace `weight`


@torch.no_grad()
def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, two per byte with the first in the upper half, and scales. The last block is filled up with zeros."""
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    exact = torch.promote_types(weight.dtype, torch.float32)
    relative = blocks.to(exact) / scales.where(scales > 0, 1.0).to(exact)[:, None]
    values = torch.tensor(NF4, dtype=exact, device=weight.device)
    codes = torch.bucketize(relative, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8).flatten()
    return codes[0::2] << 4 | codes[1::2], scales


@torch.no_grad()
def dequantize(codes: Tensor, scales: Tensor, shape: Sequence[int]) -> Tensor:
    """The weight in the dtype of its scales."""
    if uses_triton(codes.device) and scales.dtype in (torch.bfloat16, torch.float32):
        from assay.models import kernels

        return kernels.dequantize(codes, scales, shape, value_table(codes.device, torch.float32)[0])
    exact = torch.promote_types(scales.dtype, torch.float32)
    pairs = F.embedding(codes.int(), value_table(codes.device, exact)[1])
    blocks = pairs.view(-1, BLOCK) * scales.to(exact)[:, None]
    return blocks.to(scales.dtype).flatten()[: math.prod(shape)].view(*shape)


@lru_cache(maxsize=16)
def value_table(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 16 values of codes, and the 256 pairs of values of bytes."""
    values = torch.tensor(NF4, dtype=dtype, device=device)
    return values, torch.cartesian_prod(values, values)


class _Product(torch.autograd.Function):
    """x @ weight.T + bias for a frozen weight, of which only codes and scales are saved."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, shape: tuple[int, int]
    ) -> Tensor:
        dtype = autocast_dtype(x)
        ctx.save_for_backward(codes, scales)
        ctx.shape, ctx.dtype, ctx.input_dtype = shape, dtype, x.dtype
        weight = dequantize(codes, scales, shape).to(dtype)
        return F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales = ctx.saved_tensors
        weight = dequantize(codes, scales, ctx.shape).to(ctx.dtype)
        return (grad.to(ctx.dtype) @ weight).to(ctx.input_dtype), None, None, None, None


class NF4Linear(nn.Linear):
    """A frozen linear layer; `weight` is dequantized at each access."""

    substitute: Tensor | None = None  # a weight that is used in place of the quantized one, if set

    def __init__(self, in_features: int, out_features: int, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.weight_codes = nn.Parameter(codes, requires_grad=False)
        self.weight_scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        if self.substitute is not None:
            return self.substitute
        return dequantize(self.weight_codes, self.weight_scales, (self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        if self.substitute is not None:
            return F.linear(x, self.substitute, self.bias)
        shape = (self.out_features, self.in_features)
        return _Product.apply(x, self.weight_codes, self.weight_scales, self.bias, shape)


@torch.no_grad()
def quantize_layers(network: nn.Module, names: Sequence[str], device: torch.device | str) -> None:
    """Replace linear layers of the network, one after the other, by quantized ones on the device."""
    for name in names:
        layer = network.get_submodule(name)
        assert type(layer) is nn.Linear
        bias = None if layer.bias is None else layer.bias.to(device)
        codes, scales = quantize(layer.weight.to(device))
        network.set_submodule(name, NF4Linear(layer.in_features, layer.out_features, codes, scales, bias))


def dequantize_layers(network: nn.Module) -> None:
    """Put plain linear layers back, with the dequantized weights."""
    for name, layer in list(quantized_layers(network)):
        network.set_submodule(name, plain_linear(layer, nn.Parameter(layer.weight, requires_grad=False)))


def plain_linear(layer: nn.Linear, weight: Tensor) -> nn.Linear:
    """A plain layer with this weight, and the bias of `layer`."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    plain.weight, plain.bias = weight, layer.bias
    return plain


def quantized_layers(network: nn.Module) -> Iterator[tuple[str, NF4Linear]]:
    return ((name, module) for name, module in network.named_modules() if isinstance(module, NF4Linear))
