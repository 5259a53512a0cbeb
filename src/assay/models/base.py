"""`PolicyModel`, the interface that trainer and engines expect of a policy network."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from assay.mesh import full_tensor
from assay.models.device import autocast_dtype
from assay.models.fingerprint import digests, fingerprint
from assay.models.lora import (
    ALL,
    Lora,
    adapted_layers,
    insert_adapters,
    merged_weights,
    remove_adapters,
    targeted,
    weight_shapes,
)
from assay.models.quantize import dequantize_layers, quantize_layers, quantized_layers

__all__ = ["LoadOptions", "LoadReport", "PolicyModel", "autocast_dtype", "digests", "fingerprint"]

LoadReport = Callable[[int, int, str], object]  # receives how much of a model is loaded, of how much, and the unit


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. `report`: receives numbers of parameters, tensors or bytes."""

    device: torch.device | str
    dtype: torch.dtype
    report: LoadReport | None = None
    trust_remote_code: bool = False


class PolicyModel(nn.Module):
    """A causal language model over packed sequences: the tokens of all sequences are concatenated, without padding."""

    vocab_size: int
    max_length: int
    supports_prefix_sharing = False  # whether `hidden` computes shared prompts once
    lora: Lora | None = None  # settings of the adapters; if there are adapters, nothing else is trained

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        """Hidden states [N, D] of packed token ids [N]. `lengths`: of the sequences; their sum is N.

        `shared[i]`: number of leading tokens that sequence i has in common with the nearest earlier sequence whose
        entry is 0. A model with `supports_prefix_sharing` computes these tokens once.
        """
        raise NotImplementedError

    def head(self) -> Tensor | None:
        """The weight [vocabulary, D] that maps hidden states to logits, if logits are a plain product with it."""
        return None

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of hidden states [..., D]."""
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every full weight once, by its Hugging Face name: the input of weight sync, fingerprint and export.

        A tied head is listed once, as the embedding. Adapters are merged. Sharded weights are gathered one by one, so
        all ranks must iterate together.
        """
        return ((name, full_tensor(weight)) for name, weight in merged_weights(self.network))

    @property
    def network(self) -> nn.Module:
        """The module in which parameters have their Hugging Face names."""
        return self

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def parameter_count(self) -> int:
        """Number of weights and adapter weights; a quantized weight counts like any other."""
        adapters = sum(weight.numel() for weight in self.parameters() if weight.requires_grad) if self.lora else 0
        return adapters + sum(shape.numel() for shape in weight_shapes(self.network).values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as they are stored."""
        return sum(weight.nbytes for weight in self.parameters())

    @property
    def quantized(self) -> bool:
        return any(True for _ in quantized_layers(self.network))

    def quantize(self, device: torch.device | str) -> None:
        """Freeze all weights, store those of the layers' linear modules in 4 bits, and move the model to the device.

        Layers are moved one after the other, so that the device never holds the whole model in its original dtype.
        """
        self.requires_grad_(False)
        quantize_layers(self.network, targeted(self.network, [ALL]), device)
        self.to(device)

    def dequantize(self) -> None:
        dequantize_layers(self.network)

    def add_lora(self, lora: Lora, seed: int = 0) -> None:
        """Freeze all weights and insert adapters; only the adapters are trained."""
        self.requires_grad_(False)
        insert_adapters(self.network, lora, seed)
        self.lora = lora

    def drop_lora(self) -> None:
        """Remove the adapters without merging them."""
        remove_adapters(self.network)
        self.lora = None

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Within this context the model computes, and lists, the frozen base weights alone."""
        layers = [layer for _, layer in adapted_layers(self.network)]
        try:
            for layer in layers:
                layer.active = False
            yield
        finally:
            for layer in layers:
                layer.active = True

    def adapters_are_zero(self) -> bool:
        """Whether there are adapters, and they add nothing yet: the policy equals its base model."""
        layers = [layer for _, layer in adapted_layers(self.network)]
        return self.lora is not None and not any(full_tensor(layer.lora_B.weight).any() for layer in layers)
