"""Attention over the paged KV cache in torch: for prompt chunks, and for the newest token of every row.

Blocks are first gathered into one tensor, which on a CPU costs a fraction of the attention itself. Slots behind the end
of a sequence are gathered too and get weight 0; they may contain anything, even NaN. Prompt chunks on CUDA in 16 bits
use torch's variable-length kernel.

On CUDA, rows that begin with the same blocks form groups, whose shared blocks are read once: `find_groups` finds them,
and `plan_tiles` divides them into tiles for the kernel (`kernels/attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.backends.mkl as mkl
import torch.nn.functional as F
from torch import Tensor

from assay.engine.native.scheduler import Chunk
from assay.engine.sequence import BLOCK_SIZE
from assay.models.attention import varlen_attention

MIN_GROUP = 4  # rows; smaller groups are not worth a tile
NO_GROUP = -1  # the key of a row without a group
# (queries [A, B, N, d], keys [A, C, S, d], values [A, C, S, d]) -> [A, B, N, d], where B is C or a multiple of it
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gather:
    """Gathers the same blocks of every layer, concatenated, into memory that is reused by the next layer."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self.index: Tensor | None = None
        self.out: Tensor | None = None

    def __call__(self, kv: Tensor) -> Tensor:
        """kv [2, K, blocks, block size, d] -> [2 x K x blocks chosen, block size x d]"""
        lines = kv.view(-1, kv.shape[3] * kv.shape[4])  # one line per block and head: faster than along an axis
        if self.index is None:
            heads = torch.arange(kv.shape[0] * kv.shape[1], device=kv.device)[:, None]
            self.index = (heads * kv.shape[2] + self.blocks).view(-1)
            self.out = lines.new_empty(len(self.index), lines.shape[1])
        assert self.out is not None
        return torch.index_select(lines, 0, self.index, out=self.out)


class RowAttention:
    """One query per row."""

    def __init__(self, tables: Tensor, lengths: Tensor, span: int, block_size: int, dtype: torch.dtype) -> None:
        """`tables` [B, *]: blocks of the rows; `lengths` [B]: number of keys that each row sees, at most `span`."""
        self.rows, blocks = tables.shape[0], -(-span // block_size)
        self.span, self.lengths, self.dtype = blocks * block_size, lengths, dtype
        self.gather = Gather(tables[:, :blocks].reshape(-1))
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
            places = torch.arange(self.span, device=self.lengths.device)
            unseen = places >= self.lengths[:, None]
            if window:
                unseen |= places < self.lengths[:, None] - window
            self.biases[window] = torch.zeros(unseen.shape, device=unseen.device, dtype=self.dtype)
            self.biases[window].masked_fill_(unseen, -math.inf)
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
        self.gather = Gather(torch.from_numpy(tables.reshape(-1)).to(device))
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
            last = self.last[:, 0, :, None].cpu()
            places = torch.arange(self.span)
            unseen = places > last
            if window:
                unseen |= places <= last - window
            bias = torch.zeros(unseen.shape, dtype=self.dtype).masked_fill_(unseen, -math.inf)
            self.biases[window] = bias[:, None].to(self.last.device)
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


class VarlenAttention:
    """Concatenated queries of several chunks, each over all earlier tokens of its own sequence."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, upload: Callable[[np.ndarray], Tensor]) -> None:
        queries = [0, *np.cumsum([chunk.stop - chunk.start for chunk in chunks])]
        keys = [0, *np.cumsum([chunk.stop for chunk in chunks])]
        self.most = max(chunk.stop - chunk.start for chunk in chunks), max(chunk.stop for chunk in chunks)
        slots = np.concatenate([slots_of(chunk, 0, chunk.stop, block_size) for chunk in chunks])
        host = [np.array(queries, dtype=np.int32), np.array(keys, dtype=np.int32), slots]
        self.queries, self.keys, self.slots = (upload(values) for values in host)

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        keys, values = kv.view(2, kv.shape[1], -1, kv.shape[-1]).index_select(2, self.slots).transpose(1, 2)
        return varlen_attention(q, keys, values, self.queries, self.keys, self.most, window, scale)


def slots_of(chunk: Chunk, start: int, stop: int, block_size: int) -> np.ndarray:
    """Slots of tokens start .. stop of a sequence in the cache."""
    positions = np.arange(start, stop)
    blocks = np.array(chunk.blocks, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def max_tiles(rows: int, rows_per_tile: int, min_group: int = MIN_GROUP) -> int:
    """Maximum number of tiles for this number of rows, however they are grouped.

    The worst cases are groups of the minimum size, with one tile each, and groups with one row more than a tile has.
    """
    return int(rows // min(min_group, (rows_per_tile + 1) / 2))


def find_groups(tables: np.ndarray, counts: np.ndarray, min_group: int = MIN_GROUP) -> tuple[np.ndarray, np.ndarray]:
    """Group keys and shared tokens of rows, from their block `tables` [n, width] and the `counts` of shareable blocks.

    Rows share identical blocks only, not equal tokens that were computed twice. Samples of one prompt form groups
    first. Of the other rows, those with the same first block share the blocks that all of them have in common.
    """
    width = int(counts.max(initial=0))
    if width == 0:
        return np.full(len(tables), NO_GROUP), np.zeros(len(tables), dtype=np.int64)
    chains = np.where(np.arange(width) < counts[:, None], tables[:, :width], np.int32(-1))
    leaders, shared = same_chain(chains, counts), counts.astype(np.int64)
    rest = np.flatnonzero(np.bincount(leaders)[leaders] < min_group)
    if len(rest):
        _, firsts, groups = np.unique(chains[rest, 0], return_index=True, return_inverse=True)
        leaders[rest] = rest[firsts[groups]]
        shared[rest] = common_blocks(chains[rest], chains[leaders[rest]], counts[rest], groups)
    return np.where(counts > 0, leaders, NO_GROUP), shared * BLOCK_SIZE


def same_chain(chains: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each row, the first row with the same last block if all other blocks are equal too; otherwise itself."""
    last = chains[np.arange(len(chains)), counts - 1]
    _, firsts, groups = np.unique(last, return_index=True, return_inverse=True)
    leaders = firsts[groups]
    # Earlier blocks may differ if they were computed twice: then only the last one is in the prefix index.
    return np.where((chains == chains[leaders]).all(axis=1), leaders, np.arange(len(chains)))


def common_blocks(chains: np.ndarray, leading: np.ndarray, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each row, the number of first blocks that are common to its group, given the chains of the group leaders."""
    differ = chains != leading
    alike = np.where(differ.any(axis=1), differ.argmax(axis=1), counts)
    common = np.full(groups.max() + 1, chains.shape[1])
    np.minimum.at(common, groups, alike)
    return common[groups]


def plan_tiles(
    keys: np.ndarray, tokens: np.ndarray, rows_per_tile: int, min_group: int = MIN_GROUP, rows: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles of rows with the same key (NO_GROUP: none) and number of shared tokens. `rows`: maximum number of rows.

    Returns the rows of the tiles [T, rows_per_tile] (-1: unused), the shared tokens of each tile [T] (0: unused, as all
    tiles after it) and the shared tokens of each row [rows].
    """
    rows = len(keys) if rows is None else rows
    tiles = max_tiles(rows, rows_per_tile, min_group)
    members = np.full((tiles, rows_per_tile), -1, dtype=np.int32)
    lengths, skip = np.zeros(tiles, dtype=np.int32), np.zeros(rows, dtype=np.int32)

    sharing = np.flatnonzero((keys != NO_GROUP) & (tokens > 0))
    sharing = sharing[np.argsort(keys[sharing], kind="stable")]
    starts = np.flatnonzero(np.diff(keys[sharing], prepend=NO_GROUP))  # of the groups, which are now contiguous
    sizes = np.diff(starts, append=len(sharing))
    enough = sizes >= min_group
    sharing, sizes = sharing[np.repeat(enough, sizes)], sizes[enough]

    places = np.arange(len(sharing)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within the group
    group_tiles = -(-sizes // rows_per_tile)
    tile = np.repeat(np.cumsum(group_tiles) - group_tiles, sizes) + places // rows_per_tile
    members[tile, places % rows_per_tile] = sharing
    lengths[tile] = skip[sharing] = tokens[sharing]
    return members, lengths, skip
