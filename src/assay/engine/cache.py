"""Keys and values of running sequences, one slot each, in a single tensor that grows as it is needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from assay.models.spec import ModelSpec

GRAIN = 32  # capacity in tokens comes in multiples of this


class SlotCache:
    """`data` is [layers, keys/values, slots, kv_heads, capacity, head_dim].

    What lies beyond a sequence's length is never read into a result, but it is multiplied by 0: it has to be finite.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_length: int) -> None:
        self.spec, self.max_length = spec, max_length
        self.device, self.dtype = device, dtype
        self.clear()

    def clear(self) -> None:
        """Give the memory back."""
        self._allocate(0, 0)

    @property
    def slots(self) -> int:
        return self.data.shape[2]

    @property
    def capacity(self) -> int:
        return self.data.shape[4]

    def reserve(self, slots: int, length: int) -> None:
        """Room for `slots` sequences of `length` tokens; what is stored stays."""
        if slots <= self.slots and length <= self.capacity:
            return
        old = self.data
        capacity = self.capacity
        if length > capacity:
            capacity = min(max(length, capacity * 3 // 2), max(self.max_length, length))
            capacity = -(-capacity // GRAIN) * GRAIN
        self._allocate(max(slots, self.slots), capacity)
        self.data[:, :, : old.shape[2], :, : old.shape[4]] = old

    def fill(self, start: int, count: int, prefix: Tensor) -> None:
        """Put one prefix [layers, 2, length, kv_heads, head_dim] at the beginning of `count` slots from `start` on."""
        self.data[:, :, start : start + count, :, : prefix.shape[2]] = prefix.transpose(2, 3)[:, :, None]

    def move(self, moves: Sequence[tuple[int, int]], length: int) -> None:
        """Copy the first `length` tokens of slots to other slots; no slot is both a source and a destination."""
        sources, destinations = (torch.tensor(side, device=self.device) for side in zip(*moves, strict=True))
        used = self.data[:, :, :, :, :length]
        used.index_copy_(2, destinations, used.index_select(2, sources))

    def _allocate(self, slots: int, capacity: int) -> None:
        heads, head_dim = self.spec.kv_heads, self.spec.head_dim
        shape = (self.spec.layers, 2, slots, heads, capacity, head_dim)
        self.data = torch.zeros(shape, device=self.device, dtype=self.dtype)
        # Where each head of each slot begins in the flattened keys (or values) of a layer.
        self.starts = torch.arange(slots * heads, device=self.device).view(slots, heads) * capacity
