"""Attention over the paged KV cache in torch: for prompt chunks, and for the newest token of every row.

Blocks are first gathered into one tensor, which on a CPU costs a fraction of the attention itself. Slots behind the end
of a sequence are gathered too and get weight 0; they may contain anything, even NaN. Prompt chunks on CUDA in 16 bits
use torch's variable-length kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
import torch
import torch.backends.mkl as mkl
import torch.nn.functional as F
from torch import Tensor

from assay.engine.native.scheduler import Chunk
from assay.models.fp8 import as_bytes

# (queries [A, B, N, d], keys [A, C, S, d], values [A, C, S, d]) -> [A, B, N, d], where B is C or a multiple of it
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gather:
    """Gathers the same blocks of every layer, concatenated, into memory that is reused by the next layer."""

    def __init__(self, blocks: Tensor, dtype: torch.dtype) -> None:
        """`dtype`: of what a cache in 8 bits is read as."""
        self.blocks, self.dtype = blocks, dtype
        self.index: Tensor | None = None
        self.out: Tensor | None = None

    def __call__(self, kv: Tensor) -> Tensor:
        """kv [2, K, blocks, block size, d] -> [2 x K x blocks chosen, block size x d]"""
        # One line per block and head: faster than along an axis.
        lines = as_bytes(kv).view(-1, kv.shape[3] * kv.shape[4])
        if self.index is None:
            heads = torch.arange(kv.shape[0] * kv.shape[1], device=kv.device)[:, None]
            self.index = (heads * kv.shape[2] + self.blocks).view(-1)
            self.out = lines.new_empty(len(self.index), lines.shape[1])
        assert self.out is not None
        found = torch.index_select(lines, 0, self.index, out=self.out)
        return found if found.dtype == kv.dtype else found.view(kv.dtype).to(self.dtype)


class RowAttention:
    """One query per row."""

    def __init__(self, tables: Tensor, lengths: Tensor, span: int, block_size: int, dtype: torch.dtype) -> None:
        """`tables` [B, *]: blocks of the rows; `lengths` [B]: number of keys that each row sees, at most `span`."""
        self.rows, blocks = tables.shape[0], -(-span // block_size)
        self.span, self.dtype = blocks * block_size, dtype
        self.gather = Gather(tables[:, :blocks].reshape(-1), dtype)
        self.last = lengths[:, None] - 1
        # In float32 with MKL, two batched products are faster than the fused kernel. In bfloat16 the fused kernel is
        # needed for its float32 accumulation. Libraries without batched products need one call per row and head.
        self.plain = dtype != torch.bfloat16 and tables.device.type == "cpu" and mkl.is_available()
        self.biases: dict[int, Tensor] = {}  # by window, the same for all layers with this window
        self.wide_biases: dict[int, Tensor] = {}

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        """`window`: number of last tokens that each query sees; 0: all. `scale`: see `PackedCausal`."""
        window = 0 if window >= self.span else window
        kv_heads, head_dim = kv.shape[1], kv.shape[-1]
        keys, values = self.gather(kv).view(2, kv_heads, self.rows, self.span, head_dim)
        # Query heads that share a key-value head take the place of the query sequence, so that no key is repeated.
        queries = q.view(self.rows, kv_heads, -1, head_dim).transpose(0, 1)
        attend = partial(self._attend, window, scale)
        out = attend_without_unseen(attend, queries, keys, values, self.last)
        return out.transpose(0, 1).reshape(q.shape)

    def _attend(self, window: int, scale: float | None, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.plain:
            flat = (x.flatten(0, 1) for x in (queries, keys, values))
            return self._products(window, scale or 1 / math.sqrt(queries.shape[-1]), *flat).view(queries.shape)
        # Rows first: with heads first, the mask makes it slow.
        q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))
        bias = self._bias(window)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(0, 1)

    def _bias(self, window: int) -> Tensor:
        if window not in self.biases:
            self.biases[window] = unseen_bias(self.last, self.span, window, self.dtype)
        return self.biases[window]

    def _products(self, window: int, scale: float, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if window not in self.wide_biases:
            copies, shared = queries.shape[0] // self.rows, queries.shape[1]
            wide = self._bias(window)[None, :, None].expand(copies, -1, shared, -1)
            self.wide_biases[window] = wide.reshape(-1, shared, self.span)
        scores = torch.baddbmm(self.wide_biases[window], queries, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), values)


class ChunkAttention:
    """Concatenated queries of several prompt chunks, each over all earlier tokens of its own sequence."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        starts, stops = (np.array([getattr(chunk, side) for chunk in chunks]) for side in ("start", "stop"))
        sizes, blocks = stops - starts, -(-stops // block_size)
        self.count, self.longest, self.span = len(chunks), int(sizes.max()), int(blocks.max()) * block_size
        tables = np.zeros((self.count, int(blocks.max())), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            tables[row, : blocks[row]] = chunk.blocks[: blocks[row]]
        self.gather = Gather(torch.from_numpy(tables.reshape(-1)).to(device), dtype)
        is_query = np.arange(self.longest) < sizes[:, None]
        self.even = bool(is_query.all())
        self.query_index = torch.from_numpy(np.flatnonzero(is_query)).to(device)  # of queries in the padded batch
        last = starts[:, None] + np.arange(self.longest)
        self.last = torch.from_numpy(last).to(device)[:, None]
        self.dtype = dtype
        self.biases: dict[int, Tensor] = {}  # by window
        self.causal = not starts.any()

    def _bias(self, window: int) -> Tensor | None:
        if self.causal and not window:
            return None
        if window not in self.biases:
            bias = unseen_bias(self.last[..., None].cpu(), self.span, window, self.dtype)
            self.biases[window] = bias.to(self.last.device)
        return self.biases[window]

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        """`window`, `scale`: see `RowAttention`."""
        window = 0 if window >= self.span else window
        kv_heads, head_dim = kv.shape[1], kv.shape[-1]
        keys, values = self.gather(kv).view(2, kv_heads, self.count, self.span, head_dim)
        padded = q
        if not self.even:
            padded = q.new_zeros(self.count * self.longest, *q.shape[1:]).index_copy_(0, self.query_index, q)
        queries = padded.view(self.count, self.longest, *q.shape[1:]).transpose(1, 2)
        attend = partial(self._attend, window, scale)
        out = attend_without_unseen(attend, queries, keys.transpose(0, 1), values.transpose(0, 1), self.last)
        out = out.transpose(1, 2).flatten(0, 1)
        return out if self.even else out.index_select(0, self.query_index)

    def _attend(self, window: int, scale: float | None, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        bias = self._bias(window)
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=bias,
            is_causal=bias is None,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )


def unseen_bias(last: Tensor, span: int, window: int, dtype: torch.dtype) -> Tensor:
    """[..., span]: -inf for keys that a query does not see. `last` [..., 1]: index of the last key that it sees."""
    places = torch.arange(span, device=last.device)
    unseen = places > last
    if window:
        unseen |= places <= last - window
    return torch.zeros(unseen.shape, device=last.device, dtype=dtype).masked_fill_(unseen, -math.inf)


def attend_without_unseen(attend: Attend, queries: Tensor, keys: Tensor, values: Tensor, last: Tensor) -> Tensor:
    """Attention in which only queries that see a NaN key or value get NaN.

    `last`: index of the last key that a query sees. NaN times a weight of 0 is NaN, so one broken sequence would
    otherwise break sequences that share its blocks or use them after it.
    """
    out = attend(queries, keys, values)
    if not bool(out.sum().isnan()):
        return out
    sound = (keys.isfinite() & values.isfinite()).all(-1, keepdim=True)
    out = attend(queries, keys.where(sound, 0.0), values.where(sound, 0.0))
    places = torch.arange(keys.shape[2], device=keys.device)
    broken = torch.where(sound[..., 0], keys.shape[2], places).amin(-1)  # index of the first broken key
    broken = broken.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)[..., None]
    return out.masked_fill((broken <= last)[..., None], math.nan)


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention over sequences of different lengths is available."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _has_flash(device)


@cache
def _has_flash(device: torch.device) -> bool:
    """Some builds of torch lack it, and GPUs before compute capability 8.0 do not support it."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


class VarlenAttention:
    """Concatenated queries of several chunks, each over all earlier tokens of its own sequence, by flash attention."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, upload: Callable[[np.ndarray], Tensor]) -> None:
        queries = [0, *np.cumsum([chunk.stop - chunk.start for chunk in chunks])]
        keys = [0, *np.cumsum([chunk.stop for chunk in chunks])]
        self.most = max(chunk.stop - chunk.start for chunk in chunks), max(chunk.stop for chunk in chunks)
        slots = np.concatenate([slots_of(chunk, 0, chunk.stop, block_size) for chunk in chunks])
        host = [np.array(queries, dtype=np.int32), np.array(keys, dtype=np.int32), slots]
        # Bounds of the sequences among queries and keys, and slots of the keys.
        self.queries, self.keys, self.slots = (upload(values) for values in host)

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        tokens = as_bytes(kv).view(2, kv.shape[1], -1, kv.shape[-1]).index_select(2, self.slots)
        keys, values = tokens.view(kv.dtype).to(q.dtype).transpose(1, 2)
        # Torch's operator takes the number of earlier tokens, without the token itself.
        limits = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
        forward = torch.ops.aten._flash_attention_forward
        bounds = self.queries, self.keys, *self.most
        return forward(q, keys, values, *bounds, 0.0, True, False, scale=scale, **limits)[0]


def slots_of(chunk: Chunk, start: int, stop: int, block_size: int) -> np.ndarray:
    """Slots of tokens start .. stop of a sequence in the cache."""
    positions = np.arange(start, stop)
    blocks = np.array(chunk.blocks, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size
