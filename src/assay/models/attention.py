"""Causal attention over packed sequences, for training and scoring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.varlen import has_varlen, varlen_attention


class PackedCausal:
    """Each token sees the earlier tokens of its own sequence.

    On CUDA at 16 bits they stay as they are. Elsewhere sequences are laid out as a right-padded batch for the fused
    kernel, and taken back out of it: padding sits behind every real token, where causal attention never looks, so no
    mask is needed. Everything outside attention stays free of padding.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        sizes = torch.tensor(list(lengths), dtype=torch.int64)
        self.batch, self.longest = len(lengths), int(sizes.max())
        starts = sizes.cumsum(0) - sizes
        row = torch.repeat_interleave(torch.arange(self.batch), sizes)
        positions = torch.arange(int(sizes.sum())) - starts[row]
        self.even = bool((sizes == self.longest).all())
        self.positions = positions.to(device)
        self.slots = (row * self.longest + positions).to(device)  # where each token sits in the padded batch
        self.starts = torch.cat((starts, sizes.sum()[None])).to(device, torch.int32)

    def pad(self, x: Tensor) -> Tensor:
        """[N, H, d] -> [B, H, T, d]"""
        if not self.even:
            x = x.new_zeros(self.batch * self.longest, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.unflatten(0, (self.batch, self.longest)).transpose(1, 2)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if has_varlen(q.device, q.dtype):
            return varlen_attention(q, k, v, self.starts, self.starts, (self.longest, self.longest))
        shared = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(self.pad(q), self.pad(k), self.pad(v), is_causal=True, enable_gqa=shared)
        out = out.transpose(1, 2).flatten(0, 1)
        return out if self.even else out.index_select(0, self.slots)
