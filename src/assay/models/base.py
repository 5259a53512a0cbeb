"""`PolicyModel`, the interface that trainer and engines expect of a policy network, and the fingerprint of weights."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor, nn

from assay.mesh import full_tensor
from assay.models.lora import Lora, adapted_layers, insert_adapters, merged_weights, remove_adapters

LoadReport = Callable[[int, int, str], object]  # receives how much of a model is loaded, of how much, and the unit
# Eight bytes are viewed as two words: products wrap at 64 bits, where the top bit of a 64-bit word could get lost.
INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
CHUNK = 1 << 20  # words per sum; small enough for the caches of a CPU
AT_ONCE = 16  # chunks per operation on a GPU, where launching an operation is expensive


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


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with `x`: that of autocast if it is enabled, else the dtype of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def fingerprint(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """The fingerprint of named weights, after a cast to `dtype` if given.

    Fingerprints are equal if and only if (except for collisions) every bit of every weight is equal. They use integer
    arithmetic in one pass, so they do not depend on device, thread count or order of summation.
    """
    by_name = digests(weights, dtype)
    text = "".join(f"{by_name[name]};" for name in sorted(by_name))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """For each weight a text of its name, shape, dtype and a hash of its bits."""
    headings: dict[str, str] = {}
    sums: dict[str, Tensor] = {}
    for name, weight in weights:  # one at a time: sharded weights are gathered for this
        value = weight.detach()
        if dtype is not None:
            value = value.to(dtype)
        headings[name] = f"{name}:{tuple(value.shape)}:{value.dtype}"
        sums[name] = chunk_sums(value, 1 if value.device.type == "cpu" else AT_ONCE)
    # Synchronizes once per device: optimizer state may be on several.
    by_device: dict[torch.device, list[str]] = defaultdict(list)
    for name, values in sums.items():
        by_device[values.device].append(name)
    texts: dict[str, str] = {}
    for names in by_device.values():
        numbers = iter(torch.cat([sums[name] for name in names]).tolist())
        texts |= {name: f"{headings[name]}:{combined(islice(numbers, len(sums[name])))}" for name in names}
    return texts


def chunk_sums(value: Tensor, at_once: int) -> Tensor:
    """For each chunk the sum of its words, each multiplied by an odd number that depends on its position."""
    bits = value.contiguous().flatten().view(INTEGER_VIEWS[value.element_size()])
    factors = multipliers(bits.device)
    whole = bits.numel() // CHUNK * CHUNK
    parts = list(bits[:whole].view(-1, CHUNK).split(at_once))
    if whole < bits.numel() or not whole:
        parts.append(bits[whole:][None])
    return torch.cat([(part.to(torch.int64) * factors[: part.shape[1]]).sum(1) for part in parts])


def combined(sums: Iterable[int]) -> int:
    """The hash of the chunk sums of one weight, modulo 2**64."""
    total = 0
    for one in sums:
        total = (total * 0x5851F42D4C957F2D + one + 0x14057B7EF767814F) % 2**64
    return total


@lru_cache(maxsize=8)
def multipliers(device: torch.device) -> Tensor:
    position = torch.arange(1, CHUNK + 1, device=device) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01
    return (position ^ (position >> 29)) | 1
