"""Attention of one new token per sequence over the paged KV cache.

Each program processes one sequence and one key-value head with all query heads that share it, so that every key is read
once. With few sequences, each is split into ranges for different programs; the last one to finish merges the results.
If many sequences begin with the same blocks, another kernel runs first: it reads these blocks once for the queries of
many rows, and each row continues from its partial result. `find_groups` finds such rows, and `plan_tiles` divides them
into tiles for the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.engine.native.kernels.layers import limited
from assay.engine.sequence import BLOCK_SIZE as BLOCK_TOKENS

# By padded head size. Queries per tile: rows times query heads per key-value head.
TUNING = {64: (32, 1, 3), 128: (32, 1, 4), 256: (32, 2, 2)}  # keys per tile, warps, stages
SHARED_TUNING = {64: (64, 128, 4, 2), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)}  # queries, keys, warps, stages
MAX_TILE_ROWS = 16
MAX_SPLITS = 16
PROGRAMS = 1024  # enough to keep an H200 busy: eight per multiprocessor
MIN_RANGE, LONG_RANGE = 64, 1024  # minimum tokens per range, with few and with enough programs
MIN_DOT = 16  # minimum size of a product on tensor cores
MIN_GROUP = 4  # rows; smaller groups are not worth a tile
NO_GROUP = -1  # the key of a row without a group
INTERPRETED: bool = triton.knobs.runtime.interpret


def tuned_size(d: int) -> int:
    return min(max(triton.next_power_of_2(d), min(TUNING)), max(TUNING))


def tuning(d: int) -> tuple[int, int, int]:
    """(keys per tile, warps, stages) for a head size."""
    return TUNING[tuned_size(d)]


def tile_rows(group: int, d: int) -> int:
    """Rows per tile of a prefix group, for `group` query heads per key-value head."""
    queries = SHARED_TUNING[tuned_size(d)][0]
    return min(max(queries // triton.next_power_of_2(group), 1), MAX_TILE_ROWS)


def default_splits(n: int, kv_heads: int, span: int) -> int:
    """Number of ranges per sequence of up to `span` tokens, a power of two.

    Few rows leave multiprocessors idle. Among many rows, a single very long one would finish last.
    """
    enough = PROGRAMS // max(n * kv_heads, 1)
    wanted = min(max(enough, span // LONG_RANGE, 1), MAX_SPLITS)
    return 1 << wanted.bit_length() - 1


def min_range(n: int, kv_heads: int) -> int:
    """Minimum number of tokens per range."""
    return MIN_RANGE if n * kv_heads < PROGRAMS else LONG_RANGE


@dataclass(slots=True)
class SharedPrefixes:
    """Tiles of rows with shared prefixes, from `plan_tiles`, and buffers for their partial results."""

    ints: Tensor  # storage of the next three
    rows: Tensor  # [T, rows per tile] int32; -1: unused
    tokens: Tensor  # [T] int32: a multiple of the block size; 0: unused tile
    skip: Tensor  # [R] int32: shared tokens of a row; 0: it is in no tile
    maxima: Tensor  # [R, H] float32: maximum exponent
    sums: Tensor  # [R, H] float32: sums of weights
    partials: Tensor  # [R, H, d] float32: not yet divided by the sum

    @classmethod
    def new(cls, rows: int, heads: int, kv_heads: int, d: int, device: torch.device | str) -> SharedPrefixes:
        """For this number of rows, without groups."""
        height = tile_rows(heads // kv_heads, d)
        tiles = max_tiles(rows, height)
        ints = torch.zeros(tiles * (height + 1) + rows, dtype=torch.int32, device=device)
        members, tokens, skip = ints.split([tiles * height, tiles, rows])
        maxima, sums = torch.empty((2, rows, heads), device=device)
        partials = torch.empty((rows, heads, d), device=device)
        return cls(ints, members.view(tiles, height), tokens, skip, maxima, sums, partials)

    def write(self, plan: tuple[np.ndarray, np.ndarray, np.ndarray], upload: Callable[[np.ndarray], Tensor]) -> None:
        self.ints.copy_(upload(np.concatenate([part.ravel() for part in plan])))


def decode_attention(
    q: Tensor,
    kv_layer: Tensor,
    tables: Tensor,
    lengths: Tensor,
    out: Tensor | None = None,
    splits: int | None = None,
    *,
    counters: Tensor | None = None,
    order: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    block_n: int | None = None,
    window: int = 0,
    scale: float | None = None,
    out_scale: Tensor | None = None,
    overlapped: bool = False,
) -> Tensor:
    """q [N, H, d] over the first lengths [N] tokens of each row of `tables`, in kv_layer [2, K, blocks, block_size, d].

    A row of length 0 gives zeros. `shared`: shared prefixes, which are read once.
    `window`: each row attends only to its last `window` tokens (0: all); not with `shared`.
    `scale`: factor of the scores; None: 1 / sqrt(d).
    `out_scale` [1]: the result is divided by this scale; then `out` may have 8 bits.
    `counters` [N, K] int32 are zeros before and after the call; they are allocated if needed and not given.
    `overlapped`: it may start before the kernel before it has ended (Hopper or later; not with `shared`).
    `order` [N] int32: rows in the order in which their programs start; longest first avoids a long row at the end.
    """
    assert q.is_contiguous() and kv_layer.is_contiguous() and lengths.is_contiguous() and tables.stride(1) == 1
    rows, heads, size = q.shape
    _, kv_heads, blocks, block_size, _ = kv_layer.shape
    if out is None:
        out = torch.empty_like(q)
    if splits is None:
        splits = default_splits(rows, kv_heads, tables.shape[1] * block_size)
    assert shared is None or not (window or overlapped)
    tile, warps, stages = tuning(size)
    if shared is not None:
        attend_shared(q, kv_layer, tables, shared, scale)
    partial, stats = out, out
    if splits > 1:
        if counters is None:
            counters = torch.zeros((rows, kv_heads), device=q.device, dtype=torch.int32)
        partial = torch.empty((rows, heads, splits, size), device=q.device, dtype=torch.float32)
        stats = torch.empty((rows, heads, splits, 2), device=q.device, dtype=torch.float32)
    _attend[(kv_heads, rows, splits)](
        *(q, kv_layer, tables, tables.stride(0), lengths, out, partial, stats),
        out if counters is None else counters,
        lengths if order is None else order,
        lengths if out_scale is None else out_scale,
        *((shared.skip, shared.maxima, shared.sums, shared.partials) if shared else [out] * 4),
        *(blocks * block_size * size, min_range(rows, kv_heads)),
        **constants(q, kv_layer, tile, MIN_DOT, scale) | ({"TILE": block_n} if block_n else {}),
        WINDOW=window,
        SPLITS=splits,
        ORDERED=order is not None,
        SHARED=shared is not None,
        SCALED=out_scale is not None,
        OVERLAPPED=overlapped,
        num_warps=warps,
        num_stages=stages,
        **({"launch_pdl": True} if overlapped else {}),
    )
    return out


def constants(q: Tensor, kv_layer: Tensor, tile: int, min_group: int, scale: float | None) -> dict[str, Any]:
    """Constants of both kernels. `tile`: keys per tile in 16 bits; `min_group`: of query heads per key-value head."""
    _, heads, size = q.shape
    group = heads // kv_layer.shape[1]
    return {
        "SCALE": math.log2(math.e) * (scale or 1 / math.sqrt(size)),  # exponents are to base 2
        "HEADS": heads,
        "GROUP": group,
        "GROUP_BLOCK": max(triton.next_power_of_2(group), min_group),
        "SIZE": size,
        "SIZE_BLOCK": max(triton.next_power_of_2(size), MIN_DOT),
        "BLOCK_SIZE": kv_layer.shape[3],
        "TILE": tile if q.element_size() == 2 else tile // 2,
        "WIDE": INTERPRETED and q.dtype == torch.bfloat16,
    }


def attend_shared(
    q: Tensor, kv_layer: Tensor, tables: Tensor, shared: SharedPrefixes, scale: float | None = None
) -> None:
    """Partial results of the shared prefixes, which `_attend` continues from."""
    _, kv_heads, blocks, block_size, size = kv_layer.shape
    tiles, height = shared.rows.shape
    _, tile, warps, stages = SHARED_TUNING[tuned_size(size)]
    _attend_shared[(kv_heads, tiles)](
        *(q, kv_layer, tables, tables.stride(0), shared.rows, shared.tokens),
        *(shared.maxima, shared.sums, shared.partials, len(q), blocks * block_size * size),
        # A tile has at least as many queries as a product on tensor cores has rows.
        **constants(q, kv_layer, tile, triton.cdiv(MIN_DOT, height), scale),
        ROWS=height,
        num_warps=warps,
        num_stages=stages,
    )


@triton.jit
def _attend(
    q,
    kv,
    tables,
    tables_stride,
    lengths,
    out,
    partial,  # with SPLITS > 1 [N, H, splits, d]: results of ranges, not yet divided by the sum of weights
    stats,  # with SPLITS > 1 [N, H, splits, 2]: maximum exponent, sum of weights
    counters,  # with SPLITS > 1 [N, K]: number of finished ranges
    order,  # with ORDERED
    out_scale,  # with SCALED [1]: the scale of the result
    skip,  # this and the next three: see SharedPrefixes
    maxima,
    sums,
    partials,
    head_stride,  # elements of one head in the cache
    least,  # tokens of a range
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ORDERED: tl.constexpr,
    SHARED: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    WIDE: tl.constexpr,
):
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if ORDERED:
        row = tl.load(order + row).to(tl.int64)
    length = tl.load(lengths + row)
    if OVERLAPPED:  # queries, keys and values come from the kernel before this one, all else from earlier ones
        tl.extra.cuda.gdc_wait()
    first, last, ranges = 0, length, 1
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begun = False
    if SHARED:
        first = tl.minimum(tl.load(skip + row), length)  # nothing is read for a row that is not running
        begun = (first > 0) & (tl.program_id(2) == 0)
    if SPLITS > 1:
        seen = length - first
        share = tl.maximum(tl.cdiv(tl.cdiv(seen, TILE), SPLITS) * TILE, least)
        ranges = tl.maximum(tl.cdiv(seen, share), 1)
        if tl.program_id(2) >= ranges:
            return
        first += tl.program_id(2) * share
        last = tl.minimum(first + share, length)

    member = tl.arange(0, GROUP_BLOCK)
    column = tl.arange(0, SIZE_BLOCK)
    head = row * HEADS + kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (column < SIZE)[None, :]
    query = tl.load(q + head[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
    keys = kv + kv_head.to(tl.int64) * head_stride
    values = keys + tl.num_programs(0).to(tl.int64) * head_stride
    table = tables + row * tables_stride

    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    result = tl.zeros([GROUP_BLOCK, SIZE_BLOCK], tl.float32)
    if SHARED:
        largest = tl.load(maxima + head, mask=(member < GROUP) & begun, other=float("-inf"))
        total = tl.load(sums + head, mask=(member < GROUP) & begun, other=0.0)
        result = tl.load(partials + head[:, None] * SIZE + column[None, :], mask=inside & begun, other=0.0)
    largest, total, result = _accumulate(
        query, keys, values, table, first, last, largest, total, result, SCALE, SIZE, BLOCK_SIZE, TILE, WIDE
    )

    complete = True
    if SPLITS > 1:  # known at compile time, so a separate condition  # noqa: SIM102
        if ranges > 1:
            part = head * SPLITS + tl.program_id(2)
            tl.store(stats + part * 2, largest, mask=member < GROUP)
            tl.store(stats + part * 2 + 1, total, mask=member < GROUP)
            tl.store(partial + part[:, None] * SIZE + column[None, :], result, mask=inside)
            tl.debug_barrier()  # all results of this program are stored before it is counted
            counter = counters + row * tl.num_programs(0) + kv_head
            complete = tl.atomic_add(counter, 1, sem="acq_rel") == ranges - 1
            if complete:
                tl.store(counter, 0)
                total, result = _merge(partial, stats, head, member < GROUP, inside, ranges, SIZE, SPLITS)
    if complete:
        total = tl.where(total == 0.0, 1.0, total)
        if SCALED:
            total *= tl.load(out_scale)
        result = result / total[:, None]
        if out.dtype.element_ty == tl.float8e4nv:
            result = limited(result)
        tl.store(out + head[:, None] * SIZE + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n"])
def _attend_shared(
    q,
    kv,
    tables,
    tables_stride,
    tile_rows,
    tile_tokens,
    maxima,
    sums,
    partials,
    n,  # rows of q
    head_stride,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile of rows, for one key head."""
    kv_head = tl.program_id(0)
    tile = tl.program_id(1)
    length = tl.load(tile_tokens + tile)
    if length == 0:
        return

    query_index = tl.arange(0, ROWS * GROUP_BLOCK)
    column = tl.arange(0, SIZE_BLOCK)
    member = query_index % GROUP_BLOCK
    row = tl.load(tile_rows + tile * ROWS + query_index // GROUP_BLOCK)
    asked = (row >= 0) & (row < n) & (member < GROUP)
    head = row.to(tl.int64) * HEADS + kv_head * GROUP + member
    inside = asked[:, None] & (column < SIZE)[None, :]
    query = tl.load(q + head[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
    keys = kv + kv_head.to(tl.int64) * head_stride
    values = keys + tl.num_programs(0).to(tl.int64) * head_stride
    table = tables + tl.load(tile_rows + tile * ROWS).to(tl.int64) * tables_stride

    largest = tl.full([ROWS * GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS * GROUP_BLOCK], tl.float32)
    result = tl.zeros([ROWS * GROUP_BLOCK, SIZE_BLOCK], tl.float32)
    largest, total, result = _accumulate(
        query, keys, values, table, 0, length, largest, total, result, SCALE, SIZE, BLOCK_SIZE, TILE, WIDE
    )

    tl.store(maxima + head, largest, mask=asked)
    tl.store(sums + head, total, mask=asked)
    tl.store(partials + head[:, None] * SIZE + column[None, :], result, mask=inside)


@triton.jit
def _accumulate(
    query,  # [queries, d]
    keys,
    values,
    table,
    first,
    last,
    largest,  # maximum exponent so far, to base 2
    total,  # sum of weights
    result,  # not yet divided by the total
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,  # the interpreter cannot multiply bfloat16
):
    """Process tokens first .. last of a block table; returns the updated `largest`, `total` and `result`."""
    token = tl.arange(0, TILE)
    column = tl.arange(0, result.shape[1])
    for start in range(first, last, TILE):
        position = start + token
        known = position < last
        block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        place = slot[:, None] * SIZE + column[None, :]
        # Slots beyond the length may contain anything, even NaN, which a weight of 0 would not remove.
        readable = known[:, None] & (column < SIZE)[None, :]
        key = tl.load(keys + place, mask=readable, other=0.0)
        value = tl.load(values + place, mask=readable, other=0.0)
        if WIDE:
            key, value = key.to(tl.float32), value.to(tl.float32)
        elif key.dtype == tl.float8e4nv:  # which half precision holds exactly
            key, value = key.to(tl.float16), value.to(tl.float16)
        exponent = tl.dot(query.to(key.dtype), tl.trans(key), input_precision="ieee") * SCALE
        exponent = tl.where(known[None, :], exponent, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(exponent, 1))
        weight = tl.exp2(exponent - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, 1)
        weight = weight.to(query.dtype).to(value.dtype)
        result = tl.dot(weight, value, result * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return largest, total, result


@triton.jit
def _merge(partial, stats, head, asked, inside, ranges, SIZE: tl.constexpr, SPLITS: tl.constexpr):
    """Sum of weights and undivided result of all ranges, always merged in the same order."""
    column = tl.arange(0, inside.shape[1])
    largest = tl.full([inside.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([inside.shape[0]], tl.float32)
    result = tl.zeros([inside.shape[0], inside.shape[1]], tl.float32)
    for index in tl.static_range(SPLITS):  # unrolled, so that all loads are issued at once
        part = head * SPLITS + index
        there = asked & (index < ranges)
        # Written by other programs, so they are read from the L2 cache.
        other_largest = tl.load(stats + part * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        other_total = tl.load(stats + part * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        place = partial + part[:, None] * SIZE + column[None, :]
        other = tl.load(place, mask=inside & (index < ranges), other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(tl.maximum(largest, other_largest), -1e30)  # finite, so that no difference is NaN
        shrink, other_shrink = tl.exp2(largest - new_largest), tl.exp2(other_largest - new_largest)
        total = total * shrink + other_total * other_shrink
        result = result * shrink[:, None] + other * other_shrink[:, None]
        largest = new_largest
    return total, result


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
    return np.where(counts > 0, leaders, NO_GROUP), shared * BLOCK_TOKENS


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
