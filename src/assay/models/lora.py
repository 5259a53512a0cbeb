"""Low-rank adapters beside frozen linear layers (LoRA, https://arxiv.org/abs/2106.09685), under PEFT's names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from assay.mesh import full_tensor, reshard
from assay.types import UserError

if TYPE_CHECKING:
    from assay.models.base import PolicyModel

ALL = "all-linear"
IN_A_LAYER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL,)  # ends of the names of linear layers, or `ALL` in the layers of the model
    base: str = ""  # the adapted model, by name


class LoraLinear(nn.Linear):
    """base(x) + scale * B(A(x)); while `active` is off, the base alone."""

    def __init__(self, base: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)  # the weights are those of `base`, under their own names
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        kind = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(self.in_features, lora.rank, bias=False, **kind)
        self.lora_B = nn.Linear(lora.rank, self.out_features, bias=False, **kind)
        self.scale, self.active = lora.alpha / lora.rank, True

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Nothing is added at first: B is zero. A is as PEFT has it, uniform with variance 1 / (3 in_features)."""
        bound = 1 / math.sqrt(self.in_features)
        self.lora_A.weight.copy_(torch.empty(self.lora_A.weight.shape).uniform_(-bound, bound, generator=generator))
        self.lora_B.weight.zero_()

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight, self.bias)
        return out + self.scale * self.lora_B(self.lora_A(x)) if self.active else out

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The one matrix that does the same, in float32 at least."""
        if not self.active:
            return self.weight
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        return self.weight.to(dtype) + self.scale * (self.lora_B.weight.to(dtype) @ self.lora_A.weight.to(dtype))


def add_lora(policy: PolicyModel, lora: Lora, seed: int = 0) -> None:
    """Freeze the policy and put adapters beside its linear layers. Trained are the adapters alone."""
    policy.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in targeted(policy.network, lora.targets):
        adapted = LoraLinear(policy.network.get_submodule(name), lora)  # type: ignore[arg-type]
        adapted.initialise(generator)
        policy.network.set_submodule(name, adapted)
    policy.lora = lora


def drop_lora(policy: PolicyModel) -> None:
    """Plain linear layers again, as they were without adapters."""
    for name, adapted in list(adapted_layers(policy.network)):
        plain = nn.Linear(adapted.in_features, adapted.out_features, bias=adapted.bias is not None, device="meta")
        plain.weight, plain.bias = adapted.weight, adapted.bias
        policy.network.set_submodule(name, plain)
    policy.lora = None


def targeted(network: nn.Module, targets: Sequence[str]) -> list[str]:
    linear = {name: module for name, module in network.named_modules() if type(module) is nn.Linear}
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    found: set[str] = set()
    for target in targets:
        matches = {name for name in linear if fits(name, target)}
        if not matches:
            ends = sorted({name.rpartition(".")[2] for name in linear if IN_A_LAYER.search(name)})
            raise UserError(
                f"lora.targets: no linear layer is called '{target}'; there are {', '.join(ends) or 'none'}"
            )
        found |= matches
    if tied := [name for name in found if id(linear[name].weight) in embeddings]:
        raise UserError(f"lora.targets: {tied[0]} shares its weights with the embedding: leave it out")
    return [name for name in linear if name in found]


def fits(name: str, target: str) -> bool:
    return bool(IN_A_LAYER.search(name)) if target == ALL else f".{name}".endswith(f".{target}")


def adapted_layers(network: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, module) for name, module in network.named_modules() if isinstance(module, LoraLinear))


def is_adapter(name: str) -> bool:
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


@contextmanager
def adapters_off(policy: PolicyModel) -> Iterator[None]:
    """The policy is its frozen base for a while, in what it computes and in the weights it shows."""
    layers = [layer for _, layer in adapted_layers(policy.network)]
    try:
        for layer in layers:
            layer.active = False
        yield
    finally:
        for layer in layers:
            layer.active = True


def is_untrained(policy: PolicyModel) -> bool:
    """Whether the adapters are there and add nothing: the policy is its base."""
    return policy.lora is not None and not any(
        full_tensor(b.lora_B.weight).any() for _, b in adapted_layers(policy.network)
    )


def merged_weights(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, as if there were no adapters but what they add. The frozen weights are never written to."""
    return ((name, full_tensor(weight)) for name, weight in merged_parts(network))


def merged_parts(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same where weights are split over ranks: each as it lies there."""
    reshard(network)
    adapted = dict(adapted_layers(network))
    for name, weight in network.named_parameters():
        owner, _, own_name = name.rpartition(".")
        if not is_adapter(name):
            yield name, adapted[owner].merged() if owner in adapted and own_name == "weight" else weight


def merged_state(network: nn.Module) -> dict[str, Tensor]:
    """The state dict in the same way: with buffers, and tied weights under all of their names."""
    reshard(network)
    gathered: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in network.state_dict(keep_vars=True).items():
        if not is_adapter(name):
            if id(value) not in gathered:
                gathered[id(value)] = full_tensor(value.detach())
            state[name] = gathered[id(value)]
    return state | {f"{name}.weight": full_tensor(layer.merged()) for name, layer in adapted_layers(network)}
