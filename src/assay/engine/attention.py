"""The two attentions that an engine passes to the network: over whole prompts, and of one new token over the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.engine.cache import SlotCache
from assay.models.attention import PackedCausal


class PrefillAttention:
    """Causal attention over packed prompts that keeps their keys and values."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.packed = PackedCausal(lengths, device)
        self.kept: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept.append(torch.stack((k, v)))
        return self.packed(layer, q, k, v)

    def prefixes(self) -> list[Tensor]:
        """Of each prompt [layers, 2, length, kv_heads, head_dim]: views of one tensor."""
        return list(torch.stack(self.kept).split(self.lengths, dim=2))


class DecodeAttention:
    """One new token for each of the first slots: store its key and value, then look at all that its slot holds."""

    def __init__(self, cache: SlotCache, lengths: Tensor, longest: int) -> None:
        """`lengths` [B]: tokens stored for each slot before this step; `longest` is at least their maximum."""
        self.cache = cache
        self.batch, self.span = lengths.shape[0], longest + 1
        self.index = (cache.starts[: self.batch] + lengths[:, None]).flatten()
        unseen = torch.arange(self.span, device=lengths.device) > lengths[:, None]
        self.bias = torch.zeros(unseen.shape, device=lengths.device, dtype=cache.dtype).masked_fill_(unseen, -math.inf)
        # On CPU at 32 bits two batched products beat the fused kernel; at 16 bits its 32-bit inside is needed.
        self.plain = cache.dtype == torch.float32 and cache.device.type == "cpu"
        self.wide_bias: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, head_dim = k.shape[1:]
        keys, values = self.cache.data[layer]
        keys.view(-1, head_dim).index_copy_(0, self.index, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self.index, v.reshape(-1, head_dim))
        keys, values = keys[: self.batch, :, : self.span], values[: self.batch, :, : self.span]
        # Query heads that share a key head stand where a sequence of queries usually does: no key is repeated.
        queries = q.reshape(self.batch, heads, -1, head_dim)
        if self.plain:
            out = self._products(queries.flatten(0, 1), keys.flatten(0, 1), values.flatten(0, 1))
        else:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self.bias[:, None, None])
        return out.reshape(q.shape)

    def _products(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.wide_bias is None:  # the same for every layer
            rows, shared = queries.shape[:2]
            wide = self.bias[:, None, None].expand(-1, rows // self.batch, shared, -1)
            self.wide_bias = wide.reshape(rows, shared, self.span)
        scale = 1 / math.sqrt(queries.shape[-1])
        scores = torch.baddbmm(self.wide_bias, queries, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), values)
