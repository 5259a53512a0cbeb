"""Low-rank adapters on frozen linear layers (LoRA, https://arxiv.org/abs/2106.09685), with PEFT's parameter names.

The frozen weights can be stored in 4 bits: NF4, as in QLoRA (https://arxiv.org/abs/2305.14314).
A block of 64 consecutive weights has one scale, its largest absolute value, in the dtype of the weights; each weight is
the index of the nearest of 16 fixed values times that scale. Scales of bfloat16 weights are exact in bfloat16, so a
weight takes 4.25 bits, and quantizing dequantized weights again gives the same codes and scales.

Products dequantize the weight of one layer at a time, and again in the backward pass: no copy is kept between them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from assay.mesh import full_tensor, reshard
from assay.models.device import autocast_dtype, uses_triton
from assay.types import UserError

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


ALL = "all-linear"
IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)  # suffixes of the names of linear layers; `ALL`: all in decoder layers
    base: str = ""  # name of the adapted model


class LoraLinear(nn.Linear):
    """base(x) + scale * B(A(x)); the base alone unless `active`."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)  # keeps the weights of `base` under their own names
        self.in_features, self.out_features = base.in_features, base.out_features
        kind = self._keep_weights(base)
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, **kind)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, **kind)
        self.scale, self.active = lora.alpha / lora.rank, True

    def _keep_weights(self, base: nn.Linear) -> dict[str, Any]:
        """Take over the weights of the base; returns device and dtype of the adapters."""
        self.weight, self.bias = base.weight, base.bias
        return {"device": base.weight.device, "dtype": base.weight.dtype}

    def _base_output(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """B is zero: the adapter adds nothing at first. A is uniform with variance 1 / (3 in_features), as in PEFT."""
        bound = 1 / math.sqrt(self.in_features)
        self.lora_A.weight.copy_(torch.empty(self.lora_A.weight.shape).uniform_(-bound, bound, generator=generator))
        self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out = self._base_output(x)
        return out + self.scale * self.lora_B(self.lora_A(x)) if self.active else out

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight of the equivalent plain layer, in float32 or float64."""
        if not self.active:
            return self.weight
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return self.weight.to(dtype) + self.scale * (self.lora_B.weight.to(dtype) @ self.lora_A.weight.to(dtype))


class LoraNF4Linear(LoraLinear, NF4Linear):
    """Adapters on a quantized layer. They are at least float32: 16 bits would round away the small steps of training.

    Autocast computes them in the dtype of the other products.
    """

    def _keep_weights(self, base: nn.Linear) -> dict[str, Any]:
        assert isinstance(base, NF4Linear)
        self.weight_codes, self.weight_scales, self.bias = base.weight_codes, base.weight_scales, base.bias
        dtype = torch.promote_types(base.weight_scales.dtype, torch.float32)
        return {"device": base.weight_scales.device, "dtype": dtype}

    def _base_output(self, x: Tensor) -> Tensor:
        return NF4Linear.forward(self, x)


def insert_adapters(network: nn.Module, lora: Lora, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in targeted(network, lora.targets):
        base: nn.Linear = network.get_submodule(name)  # type: ignore[assignment]
        adapted = (LoraNF4Linear if isinstance(base, NF4Linear) else LoraLinear)(base, lora)
        adapted.initialise(generator)
        network.set_submodule(name, adapted)


def remove_adapters(network: nn.Module) -> None:
    """Put layers with the base weights back; quantized ones stay quantized."""
    for name, adapted in list(adapted_layers(network)):
        if isinstance(adapted, NF4Linear):
            codes, scales = adapted.weight_codes, adapted.weight_scales
            layer: nn.Linear = NF4Linear(adapted.in_features, adapted.out_features, codes, scales, adapted.bias)
        else:
            layer = plain_linear(adapted, adapted.weight)
        network.set_submodule(name, layer)


def targeted(network: nn.Module, targets: Sequence[str]) -> list[str]:
    """Names of the linear layers that the targets select."""
    linear = {name: module for name, module in network.named_modules() if type(module) in (nn.Linear, NF4Linear)}
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    selected: set[str] = set()
    for target in targets:
        matches = {name for name in linear if fits(name, target)}
        if not matches:
            ends = sorted({name.rpartition(".")[2] for name in linear if IN_A_LAYER.search(name)})
            raise UserError(
                f"lora.targets: no linear layer is called '{target}'; there are {', '.join(ends) or 'none'}"
            )
        selected |= matches
    plain = [name for name in selected if type(linear[name]) is nn.Linear]
    if tied := [name for name in plain if id(linear[name].weight) in embeddings]:
        raise UserError(f"lora.targets: {tied[0]} shares its weights with the embedding: leave it out")
    return [name for name in linear if name in selected]


def fits(name: str, target: str) -> bool:
    return bool(IN_A_LAYER.search(name)) if target == ALL else f".{name}".endswith(f".{target}")


def adapted_layers(network: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, module) for name, module in network.named_modules() if isinstance(module, LoraLinear))


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def weight_shapes(network: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the weights in the order of `merged_weights`, without merging or dequantizing them."""
    quantized = dict(quantized_layers(network))
    shapes: dict[str, torch.Size] = {}
    for name, weight in network.named_parameters():
        owner, _, own_name = name.rpartition(".")
        if own_name == CODES:
            shapes[f"{owner}.weight"] = torch.Size((quantized[owner].out_features, quantized[owner].in_features))
        elif own_name != SCALES and not is_adapter(name):
            shapes[name] = weight.shape
    return shapes


def merged_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, dequantized and with adapters merged; sharded weights stay sharded. The frozen weights are not
    written to.
    """
    reshard(network)
    adapted, quantized = dict(adapted_layers(network)), dict(quantized_layers(network))
    for name, weight in network.named_parameters():
        owner, _, own_name = name.rpartition(".")
        if own_name == SCALES or is_adapter(name):
            continue
        if owner in adapted and own_name in ("weight", CODES):
            yield f"{owner}.weight", adapted[owner].merged()
        elif own_name == CODES:
            yield f"{owner}.weight", quantized[owner].weight
        else:
            yield name, weight


def merged_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict with adapters merged, dequantized, full tensors: also buffers, and tied weights by all names."""
    reshard(network)
    gathered: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in network.state_dict(keep_vars=True).items():
        if not is_adapter(name) and name.rpartition(".")[2] not in (CODES, SCALES):
            if id(value) not in gathered:
                gathered[id(value)] = full_tensor(value.detach())
            state[name] = gathered[id(value)]
    state |= {f"{name}.weight": layer.weight for name, layer in quantized_layers(network)}
    return state | {f"{name}.weight": full_tensor(layer.merged()) for name, layer in adapted_layers(network)}
