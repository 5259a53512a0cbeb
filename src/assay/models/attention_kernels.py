"""Triton kernels for the attention of training on packed sequences, forward and backward.

A tile of queries sees the tokens of a shared prefix, if it has one, followed by those of its own segment: the kernels
treat both as one sequence. The forward kernel and the one for the gradients of queries have a program per tile of
queries and query head. The kernel for the gradients of keys and values has a program per tile of keys and key-value
head, which sums over the query heads. All tokens that see a tile of keys follow it in one run, which is divided if it
is long; then partial sums are stored and added in a fixed order. No kernel uses atomics: results are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.models.device import upload


class Tuning(NamedTuple):
    queries: int  # of a tile
    keys: int
    warps: int
    stages: int


class Tunings(NamedTuple):
    forward: Tuning
    queries: Tuning  # for their gradients
    keys: Tuning


# By padded head size, measured on an H200 (but 256).
TUNINGS = {
    64: Tunings(Tuning(64, 64, 4, 3), Tuning(64, 64, 4, 3), Tuning(64, 64, 4, 2)),
    128: Tunings(Tuning(128, 64, 8, 3), Tuning(128, 64, 8, 3), Tuning(64, 64, 4, 2)),
    256: Tunings(Tuning(64, 32, 4, 2), Tuning(128, 32, 8, 2), Tuning(32, 64, 8, 2)),
}
SMALL_TUNINGS = {  # for GPUs other than Hopper and Blackwell: at most 99 KiB of shared memory
    64: Tunings(Tuning(64, 64, 4, 2), Tuning(64, 64, 4, 2), Tuning(32, 64, 4, 2)),
    128: Tunings(Tuning(64, 32, 4, 2), Tuning(64, 32, 4, 2), Tuning(32, 64, 4, 2)),
    256: Tunings(Tuning(32, 32, 4, 2), Tuning(32, 32, 4, 2), Tuning(16, 32, 8, 2)),
}
MAX_SIZE = 256  # of a head
MIN_DOT = 16  # minimum size of a product on tensor cores
PROGRAMS = 1024  # wanted number of programs for the gradients of keys: eight per multiprocessor of an H200
CHUNK = 256  # queries: a run of queries that see a tile of keys is divided into multiples of this
SUMMED_ROWS = 8  # keys whose partial sums a program adds
FIELDS = tl.constexpr(8)  # of a row of a table, which then begins at a multiple of 16 bytes, as kernels expect
LOWEST = tl.constexpr(-1e30)  # a finite maximum of no exponents, so that no difference is NaN
LOG2E = tl.constexpr(math.log2(math.e))


def padded_size(size: int) -> int:
    return max(triton.next_power_of_2(size), MIN_DOT)


@cache
def tunings_for(size: int, device: torch.device) -> Tunings:
    is_small = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10)
    table = SMALL_TUNINGS if is_small else TUNINGS
    return table[max(padded_size(size), min(table))]


@dataclass(frozen=True)
class AttentionPlan:
    """The work of the kernels on packed segments: tables [rows, FIELDS] int32, each with the most work first."""

    tunings: Tunings
    forward: Tensor  # tiles of queries: first, end, start of their segment, start and length of its prefix, seen tokens
    queries: Tensor  # the same for the gradients of queries, in tiles of another size
    keys: Tensor  # tiles of keys: first, end, first and end of the queries that see them, index of a partial sum or -1
    sums: Tensor  # keys with partial sums: first, end, first partial sum, their number, 1: added to what is there
    partial_sums: int
    positions: Tensor  # of all tokens, within their sequences
    window: int
    begun: bool  # of some segments only the part of the prefix is computed here, and added to the rest

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        prefixes: Sequence[int],
        positions: Tensor,
        size: int,
        kv_heads: int,
        window: int = 0,
        long: int | None = None,
    ) -> AttentionPlan:
        """`lengths` of the segments; `prefixes`: for each the index of the segment that it follows, or -1.

        Those that follow a segment come right after it. `size`: of a head. Of segments of `long` tokens or more, what
        their tokens see of each other is computed elsewhere, before; not with a `window`.
        """
        segments = Segmentation.of(lengths, prefixes, long)
        tunings = tunings_for(size, positions.device)
        forward = segments.query_tiles(tunings.forward.queries, window)
        queries = segments.query_tiles(tunings.queries.queries, window)
        keys, sums, partial_sums = segments.key_tiles(tunings.keys.keys, window, kv_heads)
        tables = [forward, queries, keys, sums]
        rows = upload(torch.from_numpy(np.concatenate(tables)), positions.device)
        forward_rows, query_rows, key_rows, sum_rows = rows.split([len(table) for table in tables])
        begun = bool(segments.is_long.any())
        return cls(tunings, forward_rows, query_rows, key_rows, sum_rows, partial_sums, positions, window, begun)


@dataclass(frozen=True)
class Segmentation:
    """Bounds of packed segments."""

    starts: np.ndarray
    ends: np.ndarray
    prefix_starts: np.ndarray
    prefix_lengths: np.ndarray
    seen_until: np.ndarray  # end of the tokens that see a segment
    is_long: np.ndarray

    @classmethod
    def of(cls, lengths: Sequence[int], prefixes: Sequence[int], long: int | None) -> Segmentation:
        sizes, prefix = np.asarray(lengths), np.asarray(prefixes)
        ends = np.cumsum(sizes)
        follows = prefix >= 0
        seen_until = ends.copy()
        np.maximum.at(seen_until, prefix[follows], ends[follows])
        prefix_starts = np.where(follows, (ends - sizes)[prefix], 0)
        is_long = sizes >= long if long is not None else np.zeros(len(sizes), dtype=bool)
        return cls(ends - sizes, ends, prefix_starts, np.where(follows, sizes[prefix], 0), seen_until, is_long)

    def tiles(self, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Segment, first token and end of each tile of at most `size` tokens."""
        counts = -(-(self.ends - self.starts) // size)
        segment = np.repeat(np.arange(len(counts)), counts)
        first = self.starts[segment] + size * (np.arange(len(segment)) - np.repeat(np.cumsum(counts) - counts, counts))
        return segment, first, np.minimum(first + size, self.ends[segment])

    def query_tiles(self, size: int, window: int) -> np.ndarray:
        segment, first, end = self.tiles(size)
        start, prefix_length = self.starts[segment], self.prefix_lengths[segment]
        seen = prefix_length + np.where(self.is_long[segment], 0, end - start)
        rows = table(first, end, start, self.prefix_starts[segment], prefix_length, seen)
        work = np.minimum(seen, window + size) if window else seen
        order = np.argsort(-work, kind="stable")
        return rows[order[seen[order] > 0]]

    def key_tiles(self, size: int, window: int, kv_heads: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Tiles of keys, keys with partial sums, and the number of partial sums."""
        segment, first, end = self.tiles(size)
        is_long, seen_until = self.is_long[segment], self.seen_until[segment]
        begin = np.where(is_long, self.ends[segment], first)  # of the queries
        if window:
            has_followers = seen_until > self.ends[segment]
            seen_until = np.where(has_followers, seen_until, np.minimum(seen_until, end + window - 1))
        seen = seen_until > begin
        first, end, begin, seen_until, is_long = (x[seen] for x in (first, end, begin, seen_until, is_long))

        queries = seen_until - begin
        chunk = CHUNK * -(-int(queries.sum()) * kv_heads // (PROGRAMS * CHUNK))
        counts = -(-queries // chunk)
        tile = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(tile)) - np.repeat(np.cumsum(counts) - counts, counts)
        chunk_begin = begin[tile] + chunk * within
        chunk_end = np.minimum(chunk_begin + chunk, seen_until[tile])

        is_summed = (counts > 1) | is_long
        sum_counts = np.where(is_summed, counts, 0)
        first_sum = np.cumsum(sum_counts) - sum_counts
        index = np.where(is_summed[tile], first_sum[tile] + within, -1)
        rows = table(first[tile], end[tile], chunk_begin, chunk_end, index)
        rows = rows[np.argsort(chunk_begin - chunk_end, kind="stable")]
        sums = table(*(x[is_summed] for x in (first, end, first_sum, counts, is_long)))
        return rows, sums, int(sum_counts.sum())


def table(*fields: np.ndarray) -> np.ndarray:
    rows = np.zeros((len(fields[0]), FIELDS.value), dtype=np.int32)
    rows[:, : len(fields)] = np.stack(fields, axis=1)
    return rows


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, plan: AttentionPlan, scale: float | None = None
) -> None:
    """Writes the result [N, H, d] and log-partition sums [H, N] float32, of all tokens in tiles of the plan."""
    tokens, heads, _ = q.shape
    if len(plan.forward):
        _attention_forward[(heads * len(plan.forward),)](
            *(q, k, v, out, sums, plan.forward, q.stride(0), k.stride(0), v.stride(0), tokens),
            **constants(q, k, plan, plan.tunings.forward, scale),
        )


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    grads: tuple[Tensor, ...],
    plan: AttentionPlan,
    scale: float | None = None,
) -> None:
    """Writes the gradients of q, k and v into `grads`, which are contiguous."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    deltas = torch.empty_like(sums)  # sum of result x gradient of each token and head
    strides = q.stride(0), k.stride(0), v.stride(0)
    if len(plan.queries):
        _attention_query_gradients[(heads * len(plan.queries),)](
            *(q, k, v, out, grad, sums, deltas, grads[0], plan.queries, *strides, tokens),
            **constants(q, k, plan, plan.tunings.queries, scale),
        )
    if len(plan.keys):
        tuning = plan.tunings.keys
        partial = q.new_empty((plan.partial_sums, kv_heads, 2, tuning.keys, size), dtype=torch.float32)
        more = constants(q, k, plan, tuning, scale)
        del more["CONTINUED"]
        _attention_key_gradients[(kv_heads * len(plan.keys),)](
            *(q, k, v, grad, sums, deltas, *grads[1:], partial, plan.keys, plan.positions, *strides, tokens), **more
        )
        if plan.partial_sums:
            _attention_add_partial_sums[(len(plan.sums), tuning.keys // SUMMED_ROWS, 2 * kv_heads)](
                *(partial, *grads[1:], plan.sums, kv_heads),
                SIZE=size,
                SIZE_BLOCK=padded_size(size),
                KEYS=tuning.keys,
                ROWS=SUMMED_ROWS,
            )


def constants(q: Tensor, k: Tensor, plan: AttentionPlan, tuning: Tuning, scale: float | None) -> dict[str, Any]:
    _, heads, size = q.shape
    return {
        "SCALE": 1 / math.sqrt(size) if scale is None else scale,
        "HEADS": heads,
        "GROUP": heads // k.shape[1],
        "SIZE": size,
        "SIZE_BLOCK": padded_size(size),
        "QUERIES": tuning.queries,
        "KEYS": tuning.keys,
        "WINDOW": plan.window,
        "CONTINUED": plan.begun,
        "num_warps": tuning.warps,
        "num_stages": tuning.stages,
    }


@triton.jit(do_not_specialize=["tokens"])
def _attention_forward(
    q,  # [N, H, d]; heads are contiguous, tokens need not be
    k,  # [N, K, d]
    v,
    out,  # contiguous
    sums,  # [H, N]
    tiles,  # AttentionPlan.forward
    q_stride,
    k_stride,
    v_stride,
    tokens,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTINUED: tl.constexpr,
):
    head = tl.program_id(0) % HEADS  # heads of a tile are neighbors: they read the same keys
    first, end, start, prefix, shared, seen = _tile(tiles, HEADS)
    row = first + tl.arange(0, QUERIES)
    asked = row < end
    position = row - start + shared
    query = _rows(q + head * SIZE, row, q_stride, asked, SIZE, SIZE_BLOCK, True)
    keys = k + head // GROUP * SIZE
    values = v + head // GROUP * SIZE

    largest = tl.full([QUERIES], LOWEST, tl.float32)  # exponent so far, to base 2
    total = tl.zeros([QUERIES], tl.float32)  # of the weights
    result = tl.zeros([QUERIES, SIZE_BLOCK], tl.float32)  # not yet divided by the total
    sum_place = sums + head.to(tl.int64) * tokens + row
    if CONTINUED:
        begun = asked & (seen == shared)
        largest = tl.where(begun, tl.load(sum_place, mask=begun, other=0.0) * LOG2E, LOWEST)
        total = tl.where(begun, 1.0, 0.0)
        result = _rows(out + head * SIZE, row, HEADS * SIZE, begun, SIZE, SIZE_BLOCK, True).to(tl.float32)

    low, full, rest = _ranges(first, end, start, shared, seen, KEYS, WINDOW)
    if WINDOW > 0:
        largest, total, result = _accumulate(
            *(query, keys, values, k_stride, v_stride, position, start, prefix, shared, seen, low, full),
            *(largest, total, result, SCALE, SIZE, SIZE_BLOCK, KEYS, WINDOW, True),
        )
    largest, total, result = _accumulate(
        *(query, keys, values, k_stride, v_stride, position, start, prefix, shared, seen, full, rest),
        *(largest, total, result, SCALE, SIZE, SIZE_BLOCK, KEYS, WINDOW, False),
    )
    largest, total, result = _accumulate(
        *(query, keys, values, k_stride, v_stride, position, start, prefix, shared, seen, rest, seen),
        *(largest, total, result, SCALE, SIZE, SIZE_BLOCK, KEYS, WINDOW, True),
    )
    total = tl.where(asked, total, 1.0)
    tl.store(sum_place, (largest + tl.log2(total)) / LOG2E, mask=asked)
    _store_rows(out + head * SIZE, row, HEADS * SIZE, asked, result / total[:, None], SIZE, SIZE_BLOCK)


@triton.jit
def _accumulate(
    query,
    keys,
    values,
    k_stride,
    v_stride,
    position,
    start,
    prefix,
    shared,
    seen,
    low,
    high,
    largest,
    total,
    result,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys `low` .. `high` of those that the tile sees; returns the updated `largest`, `total`, `result`."""
    for at in range(low, high, KEYS):
        index = at + tl.arange(0, KEYS)
        token = tl.where(index < shared, prefix, start - shared) + index
        key = _rows(keys, token, k_stride, index < seen, SIZE, SIZE_BLOCK, MASKED)
        exponent = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            exponent = tl.where(_visible(position, index, seen, WINDOW), exponent, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(exponent, 1) * (SCALE * LOG2E))
        weight = tl.exp2(exponent * (SCALE * LOG2E) - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weight, 1)
        value = _rows(values, token, v_stride, index < seen, SIZE, SIZE_BLOCK, MASKED)
        result = tl.dot(weight.to(value.dtype), value, result * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return largest, total, result


@triton.jit(do_not_specialize=["tokens"])
def _attention_query_gradients(
    q,
    k,
    v,
    out,
    grad,  # of the result; contiguous
    sums,
    deltas,  # [H, N]: written here
    q_grad,
    tiles,  # AttentionPlan.queries
    q_stride,
    k_stride,
    v_stride,
    tokens,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    CONTINUED: tl.constexpr,
):
    head = tl.program_id(0) % HEADS  # heads of a tile are neighbors: they read the same keys
    first, end, start, prefix, shared, seen = _tile(tiles, HEADS)
    row = first + tl.arange(0, QUERIES)
    asked = row < end
    position = row - start + shared
    place = head.to(tl.int64) * tokens + row
    up = _rows(grad + head * SIZE, row, HEADS * SIZE, asked, SIZE, SIZE_BLOCK, True)
    found = _rows(out + head * SIZE, row, HEADS * SIZE, asked, SIZE, SIZE_BLOCK, True)
    delta = tl.sum(up.to(tl.float32) * found.to(tl.float32), 1)
    tl.store(deltas + place, delta, mask=asked)
    query = _rows(q + head * SIZE, row, q_stride, asked, SIZE, SIZE_BLOCK, True)
    log_sum = tl.load(sums + place, mask=asked, other=float("inf")) * LOG2E  # so rows that are not asked get no weight
    keys = k + head // GROUP * SIZE
    values = v + head // GROUP * SIZE

    result = tl.zeros([QUERIES, SIZE_BLOCK], tl.float32)
    low, full, rest = _ranges(first, end, start, shared, seen, KEYS, WINDOW)
    if WINDOW > 0:
        result = _accumulate_gradient(
            *(query, up, log_sum, delta, keys, values, k_stride, v_stride, position, start, prefix, shared, seen),
            *(low, full, result, SCALE, SIZE, SIZE_BLOCK, KEYS, WINDOW, True),
        )
    result = _accumulate_gradient(
        *(query, up, log_sum, delta, keys, values, k_stride, v_stride, position, start, prefix, shared, seen),
        *(full, rest, result, SCALE, SIZE, SIZE_BLOCK, KEYS, WINDOW, False),
    )
    result = _accumulate_gradient(
        *(query, up, log_sum, delta, keys, values, k_stride, v_stride, position, start, prefix, shared, seen),
        *(rest, seen, result, SCALE, SIZE, SIZE_BLOCK, KEYS, WINDOW, True),
    )
    result *= SCALE
    if CONTINUED:
        begun = asked & (seen == shared)
        result += _rows(q_grad + head * SIZE, row, HEADS * SIZE, begun, SIZE, SIZE_BLOCK, True).to(tl.float32)
    _store_rows(q_grad + head * SIZE, row, HEADS * SIZE, asked, result, SIZE, SIZE_BLOCK)


@triton.jit
def _accumulate_gradient(
    query,
    up,
    log_sum,
    delta,
    keys,
    values,
    k_stride,
    v_stride,
    position,
    start,
    prefix,
    shared,
    seen,
    low,
    high,
    result,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    for at in range(low, high, KEYS):
        index = at + tl.arange(0, KEYS)
        token = tl.where(index < shared, prefix, start - shared) + index
        key = _rows(keys, token, k_stride, index < seen, SIZE, SIZE_BLOCK, MASKED)
        value = _rows(values, token, v_stride, index < seen, SIZE, SIZE_BLOCK, MASKED)
        exponent = tl.dot(query, tl.trans(key), input_precision="ieee")
        if MASKED:
            exponent = tl.where(_visible(position, index, seen, WINDOW), exponent, float("-inf"))
        weight = tl.exp2(exponent * (SCALE * LOG2E) - log_sum[:, None])
        weight_grad = tl.dot(up, tl.trans(value), input_precision="ieee")
        exponent_grad = weight * (weight_grad - delta[:, None])
        result = tl.dot(exponent_grad.to(key.dtype), key, result, input_precision="ieee")
    return result


@triton.jit(do_not_specialize=["tokens"])
def _attention_key_gradients(
    q,
    k,
    v,
    grad,
    sums,
    deltas,
    k_grad,
    v_grad,
    partial,  # [partial sums, K, 2, KEYS, d]
    tiles,  # AttentionPlan.keys
    positions,  # with WINDOW
    q_stride,
    k_stride,
    v_stride,
    tokens,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    kv_heads: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0) % kv_heads
    fields = tiles + tl.program_id(0) // kv_heads * FIELDS
    first, end, begin = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    until, index = tl.load(fields + 3), tl.load(fields + 4)
    row = first + tl.arange(0, KEYS)
    known = row < end
    key = _rows(k + kv_head * SIZE, row, k_stride, known, SIZE, SIZE_BLOCK, True)
    value = _rows(v + kv_head * SIZE, row, v_stride, known, SIZE, SIZE_BLOCK, True)
    position = row
    if WINDOW > 0:
        position = tl.load(positions + row, mask=known, other=0).to(tl.int32)

    key_grad = tl.zeros([KEYS, SIZE_BLOCK], tl.float32)
    value_grad = tl.zeros([KEYS, SIZE_BLOCK], tl.float32)
    if WINDOW > 0:
        middle = until
    else:  # queries from here on come after all keys
        middle = tl.minimum(begin + tl.cdiv(tl.maximum(end - begin, 0), QUERIES) * QUERIES, until)
    key_grad, value_grad = _accumulate_key_gradients(
        *(q, grad, sums, deltas, positions, q_stride, tokens, kv_head, key, value, row, position, begin, middle),
        *(key_grad, value_grad, SCALE, HEADS, GROUP, SIZE, SIZE_BLOCK, QUERIES, WINDOW, True),
    )
    if WINDOW == 0:
        key_grad, value_grad = _accumulate_key_gradients(
            *(q, grad, sums, deltas, positions, q_stride, tokens, kv_head, key, value, row, position, middle, until),
            *(key_grad, value_grad, SCALE, HEADS, GROUP, SIZE, SIZE_BLOCK, QUERIES, WINDOW, False),
        )
    key_grad *= SCALE
    if index < 0:
        _store_rows(k_grad + kv_head * SIZE, row, kv_heads * SIZE, known, key_grad, SIZE, SIZE_BLOCK)
        _store_rows(v_grad + kv_head * SIZE, row, kv_heads * SIZE, known, value_grad, SIZE, SIZE_BLOCK)
    else:
        place = partial + (index.to(tl.int64) * kv_heads + kv_head) * (2 * KEYS * SIZE)
        _store_rows(place, row - first, SIZE, known, key_grad, SIZE, SIZE_BLOCK)
        _store_rows(place + KEYS * SIZE, row - first, SIZE, known, value_grad, SIZE, SIZE_BLOCK)


@triton.jit
def _accumulate_key_gradients(
    q,
    grad,
    sums,
    deltas,
    positions,
    q_stride,
    tokens,
    kv_head,
    key,
    value,
    key_row,
    key_position,
    begin,
    until,
    key_grad,
    value_grad,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the queries `begin` .. `until` of all heads. One loop, so that loads of a head overlap with the last one."""
    count = tl.cdiv(until - begin, QUERIES)
    for step in range(0, count * GROUP):
        head = kv_head * GROUP + step // count
        row = begin + step % count * QUERIES + tl.arange(0, QUERIES)
        asked = row < until
        query = _rows(q + head * SIZE, row, q_stride, asked, SIZE, SIZE_BLOCK, True)
        up = _rows(grad + head * SIZE, row, HEADS * SIZE, asked, SIZE, SIZE_BLOCK, True)
        place = head.to(tl.int64) * tokens + row
        log_sum = tl.load(sums + place, mask=asked, other=float("inf")) * LOG2E
        delta = tl.load(deltas + place, mask=asked, other=0.0)
        exponent = tl.dot(key, tl.trans(query), input_precision="ieee")  # [keys, queries]
        if MASKED:
            visible = key_row[:, None] <= row[None, :]
            if WINDOW > 0:
                position = tl.load(positions + row, mask=asked, other=0).to(tl.int32)
                visible &= position[None, :] - key_position[:, None] < WINDOW
            exponent = tl.where(visible, exponent, float("-inf"))
        weight = tl.exp2(exponent * (SCALE * LOG2E) - log_sum[None, :])
        value_grad = tl.dot(weight.to(up.dtype), up, value_grad, input_precision="ieee")
        weight_grad = tl.dot(value, tl.trans(up), input_precision="ieee")
        exponent_grad = weight * (weight_grad - delta[None, :])
        key_grad = tl.dot(exponent_grad.to(query.dtype), query, key_grad, input_precision="ieee")
    return key_grad, value_grad


@triton.jit
def _attention_add_partial_sums(
    partial,
    k_grad,
    v_grad,
    tiles,  # AttentionPlan.sums
    kv_heads,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    fields = tiles + tl.program_id(0) * FIELDS
    first, end, index = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2).to(tl.int64)
    count, begun = tl.load(fields + 3), tl.load(fields + 4)
    kv_head = tl.program_id(2) % kv_heads
    kind = tl.program_id(2) // kv_heads
    within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = first + within
    known = row < end
    grad = (v_grad if kind else k_grad) + kv_head * SIZE
    total = _rows(grad, row, kv_heads * SIZE, known & (begun > 0), SIZE, SIZE_BLOCK, True).to(tl.float32)
    for part in range(count):
        place = partial + (((index + part) * kv_heads + kv_head) * 2 + kind) * (KEYS * SIZE)
        total += _rows(place, within, SIZE, known, SIZE, SIZE_BLOCK, True)
    _store_rows(grad, row, kv_heads * SIZE, known, total, SIZE, SIZE_BLOCK)


@triton.jit
def _tile(tiles, HEADS: tl.constexpr):
    """Fields of this program's tile of queries."""
    fields = tiles + tl.program_id(0) // HEADS * FIELDS
    first, end, start = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    return first, end, start, tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)


@triton.jit
def _ranges(first, end, start, shared, seen, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Three bounds within what a tile of queries sees. All queries see all tokens from the second to the third; some
    see tokens from the first on, and some those after the third."""
    position = first - start + shared
    low = 0
    full = 0
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
        hidden = tl.maximum(end - first + position - WINDOW - low, 0)  # from the last query
        full = tl.minimum(low + tl.cdiv(hidden, KEYS) * KEYS, seen)
    rest = full + tl.maximum(tl.minimum(position + 1, seen) - full, 0) // KEYS * KEYS
    return low, full, rest


@triton.jit
def _visible(position, index, seen, WINDOW: tl.constexpr):
    """Which tokens [keys] of those that a tile sees each of its queries sees."""
    visible = index[None, :] <= tl.minimum(position, seen - 1)[:, None]
    if WINDOW > 0:
        visible &= index[None, :] > (position - WINDOW)[:, None]
    return visible


@triton.jit
def _rows(base, row, stride, readable, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows of `SIZE` numbers; zeros in place of rows that are not readable. Without MASKED, all are."""
    column = tl.arange(0, SIZE_BLOCK)
    place = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    if SIZE < SIZE_BLOCK:
        if MASKED:
            values = tl.load(place, mask=readable[:, None] & (column < SIZE)[None, :], other=0.0)
        else:
            values = tl.load(place, mask=(column < SIZE)[None, :], other=0.0)
    elif MASKED:
        values = tl.load(place, mask=readable[:, None], other=0.0)
    else:
        values = tl.load(place)
    return values


@triton.jit
def _store_rows(base, row, stride, known, values, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr):
    column = tl.arange(0, SIZE_BLOCK)
    place = base + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(place, values.to(base.dtype.element_ty), mask=known[:, None] & (column < SIZE)[None, :])
