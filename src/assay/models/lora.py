"""Low-rank adapters on frozen linear layers (LoRA, https://arxiv.org/abs/2106.09685), with PEFT's parameter names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.mesh import full_tensor, reshard
from assay.models.quantize import CODES, SCALES, NF4Linear, plain_linear, quantized_layers
from assay.types import UserError

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
