"""`PolicyModel`, the interface that trainer and engines expect of a policy network, and `HFModel`.

`HFModel` is any causal language model of transformers. It is slower than `Decoder` (padded batches, full logits), but
exact for every architecture: learned positions, unusual heads, soft-capped logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from assay.mesh import full_tensor
from assay.models.attention import Padded
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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HFModel", "LoadOptions", "LoadReport", "PolicyModel", "autocast_dtype", "digests", "fingerprint"]

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
        adapters = self.trained_count if self.lora else 0
        return adapters + sum(shape.numel() for shape in weight_shapes(self.network).values())

    @property
    def trained_count(self) -> int:
        """Number of weights and adapter weights that are trained."""
        return sum(weight.numel() for weight in self.parameters() if weight.requires_grad)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters as they are stored."""
        return sum(weight.nbytes for weight in self.parameters())

    @property
    def quantized(self) -> bool:
        return any(True for _ in quantized_layers(self.network))

    def quantize(self, device: torch.device | str) -> None:
        """Freeze all weights, quantize the layers' linear modules to 4 bits, and move the model to the device.

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


LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
NO_LIMIT = 1 << 20  # configs of recurrent models and of relative positions have no maximum length


class HFModel(PolicyModel):
    """`hidden` returns the model's logits, and `unembed` is the identity."""

    def __init__(self, hf: PreTrainedModel) -> None:
        super().__init__()
        self.hf = hf
        config = hf.config.get_text_config()
        head = hf.get_output_embeddings()
        self.vocab_size = int(config.vocab_size if head is None else head.weight.shape[0])
        lengths = (getattr(config, key, None) for key in LENGTH_KEYS)
        self.max_length = next((int(length) for length in lengths if length), NO_LIMIT)
        self.takes_positions = "position_ids" in inspect.signature(hf.forward).parameters
        self.train()

    def train(self, mode: bool = True) -> HFModel:
        """The model itself stays in evaluation mode: with dropout, trainer and sampling policy would differ."""
        super().train(mode)
        self.hf.eval()
        return self

    def hidden(self, ids: Tensor, lengths: Sequence[int], shared: Sequence[int] | None = None) -> Tensor:
        """Logits [N, vocabulary]: sequences are right-padded, which causal attention ignores, and packed again."""
        layout = Padded(lengths, ids.device)
        shape = (layout.batch, layout.longest)
        zeros = ids.new_zeros(layout.batch * layout.longest)
        packed = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs = {key: zeros.index_copy(0, layout.slots, values).view(shape) for key, values in packed.items()}
        if self.takes_positions:
            inputs["position_ids"] = torch.arange(layout.longest, device=ids.device).expand(shape)
        output = self.hf(**inputs, use_cache=False)
        return output.logits.flatten(0, 1).index_select(0, layout.slots)

    def unembed(self, hidden: Tensor) -> Tensor:
        return hidden

    @property
    def network(self) -> nn.Module:
        return self.hf
