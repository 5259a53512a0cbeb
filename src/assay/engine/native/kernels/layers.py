"""The operations of a decoder layer between its matrix products, each in one pass over its data."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.engine.sequence import Column, RowState
from assay.models.fp8 import LARGEST, LEAST, Quantized, Scaled

MLP_BLOCK = 1024  # elements of a row per program of gated
HEADS_BLOCK = 8  # heads per program of rope_store
STEP_BLOCK = 128  # rows per program of start_step
LANE = 256  # elements per warp: each thread loads 16 bytes of 16-bit numbers at once

TOKEN, POSITION, STORED, STATE, RUNNING = (
    tl.constexpr(int(value)) for value in (Column.TOKEN, Column.POSITION, Column.STORED, Column.STATE, RowState.RUNNING)
)


LARGEST_CODE, SMALLEST_SCALED = tl.constexpr(LARGEST), tl.constexpr(LEAST)


def warps_for(elements: int) -> int:
    """Number of warps; `elements` is a power of two."""
    return min(max(elements // LANE, 1), 16)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, y: Scaled | None = None) -> Tensor:
    """x [N, D] += y, in place; then x divided by its root mean square, times weight [D] + offset; rounded once."""
    out = torch.empty_like(x)
    _launch_norm(x, y, weight, eps, offset, out, None)
    return out


def quantized_norm(x: Tensor, y: Scaled | None, weight: Tensor | None, eps: float, offset: float = 0.0) -> Quantized:
    """x [N, D] += y, in place; then the norm of x (without `weight`, x itself), quantized."""
    out = torch.empty(x.shape, device=x.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(x), device=x.device, dtype=torch.float32)
    _launch_norm(x, y, weight, eps, offset, out, scales)
    return Quantized(out, scales)


def _launch_norm(
    x: Tensor, y: Scaled | None, weight: Tensor | None, eps: float, offset: float, out: Tensor, scales: Tensor | None
) -> None:
    assert x.is_contiguous()
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    if len(x) == 0:
        return
    _norm[(len(x),)](
        *(x, *factors(y, x), x if weight is None else weight, out, x if scales is None else scales, eps),
        ADD=y is not None,
        BY_ROW=y is not None and len(y.rows) > 1,
        BIAS=y is not None and y.bias is not None,
        NORM=weight is not None,
        QUANTIZE=scales is not None,
        OFFSET=offset,
        SIZE=size,
        BLOCK=block,
        num_warps=warps_for(block),
    )


def factors(x: Scaled | None, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, scales of rows and of parts, and bias; `unused` in place of what there is not."""
    if x is None:
        return (unused,) * 4
    assert x.values.is_contiguous() and len(x.rows) in (1, len(x.values))
    return x.values, x.rows, x.parts, unused if x.bias is None else x.bias


@triton.jit
def _norm(
    x,
    y,
    rows,
    parts,
    bias,
    weight,
    out,
    scales,
    eps,
    ADD: tl.constexpr,
    BY_ROW: tl.constexpr,  # y has a scale per row
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    QUANTIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = index * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        scale = tl.load(rows + index * BY_ROW) * tl.load(parts)
        value += _scaled(y + row + column, scale, bias + column, inside, BIAS)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + row + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    if NORM:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + OFFSET
        value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * scale
    if QUANTIZE:
        # Rounded as the activations of the trainer are, before the codes are.
        value = value.to(x.dtype.element_ty).to(tl.float32)
        scale = _scale_of(tl.max(tl.abs(value), 0))
        tl.store(scales + index, scale)
        tl.store(out + row + column, _codes(value, scale), mask=inside)
    else:
        tl.store(out + row + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(values, scale, bias, inside, BIAS: tl.constexpr):
    """A part of a `Scaled`: pointers to its values and bias, and the product of its scales."""
    value = tl.load(values, mask=inside, other=0.0).to(tl.float32) * scale
    if BIAS:
        value += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _scale_of(largest):
    return tl.div_rn(tl.maximum(largest, SMALLEST_SCALED), LARGEST_CODE)


@triton.jit
def _codes(value, scale):
    return limited(value * tl.div_rn(1.0, scale)).to(tl.float8e4nv)  # a division of each value takes twice as long


@triton.jit
def limited(value):
    """Numbers beyond the largest of 8 bits become the largest; NaN stays NaN."""
    value = tl.maximum(value, -LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, LARGEST_CODE, propagate_nan=tl.PropagateNan.ALL)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """silu(gate) * up of [N, 2I], gate first; rounded once. [N, I]. Or "gelu_tanh": GELU, approximated by tanh."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), device=gate_up.device, dtype=gate_up.dtype)
    block = min(triton.next_power_of_2(size), MLP_BLOCK)
    grid = (rows, triton.cdiv(size, block))
    gelu = activation == "gelu_tanh"
    _activation[grid](gate_up, out, GELU=gelu, SIZE=size, BLOCK=block, num_warps=warps_for(block))
    return out


@triton.jit
def _activation(gate_up, out, GELU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + 2 * row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, _gated(gate, up, GELU).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated(gate, up, GELU: tl.constexpr):
    exponent = gate
    if GELU:  # gate times the logistic function of 2 sqrt(2 / pi) (gate + 0.044715 gate^3)
        exponent = gate * (1.5957691216 + 0.0713548163 * gate * gate)
    return gate / (1.0 + tl.exp(-exponent)) * up


def quantized_activation(gate_up: Scaled, activation: str = "silu") -> Quantized:
    """`gated`, quantized."""
    rows, size = gate_up.values.shape[0], gate_up.values.shape[1] // 2
    out = torch.empty((rows, size), device=gate_up.values.device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, device=out.device, dtype=torch.float32)
    # A row is two blocks, so that few lanes are idle: sizes are often a little above a power of two.
    block = triton.next_power_of_2(size + 1) // 2
    if rows:
        _quantized_activation[(rows,)](
            *(*factors(gate_up, scales), out, scales),
            PARTS=len(gate_up.sizes),
            BIAS=gate_up.bias is not None,
            GELU=activation == "gelu_tanh",
            SIZE=size,
            BLOCK=block,
            REST=triton.next_power_of_2(max(size - block, 1)),
            num_warps=max(min(block // 512, 16), 4),
        )
    return Quantized(out, scales)


@triton.jit
def _quantized_activation(
    values,
    rows,
    parts,
    bias,
    out,
    scales,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row_scale = tl.load(rows + index)
    gate_scale = row_scale * tl.load(parts)
    up_scale = row_scale * tl.load(parts + PARTS - 1)
    start = values + 2 * index * SIZE
    first = tl.arange(0, BLOCK)
    rest = BLOCK + tl.arange(0, REST)
    value = _scaled_gated(start, gate_scale, up_scale, bias, first, BIAS, GELU, SIZE)
    other = _scaled_gated(start, gate_scale, up_scale, bias, rest, BIAS, GELU, SIZE)
    scale = _scale_of(tl.maximum(tl.max(tl.abs(value), 0), tl.max(tl.abs(other), 0)))
    tl.store(scales + index, scale)
    tl.store(out + index * SIZE + first, _codes(value, scale), mask=first < SIZE)
    tl.store(out + index * SIZE + rest, _codes(other, scale), mask=rest < SIZE)


@triton.jit
def _scaled_gated(
    values, gate_scale, up_scale, bias, column, BIAS: tl.constexpr, GELU: tl.constexpr, SIZE: tl.constexpr
):
    inside = column < SIZE
    gate = _scaled(values + column, gate_scale, bias + column, inside, BIAS)
    up = _scaled(values + SIZE + column, up_scale, bias + SIZE + column, inside, BIAS)
    return _gated(gate, up, GELU).to(values.dtype.element_ty).to(tl.float32)


def rope_store(
    qkv: Tensor | Scaled,
    positions: Tensor,
    slots: Tensor,
    rotations: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_layer: Tensor,
    *,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Rotated queries [N, H, d] of qkv [N, (H+2K)*d]; rotated keys, and values, are stored in the cache.

    `positions` [N] are rows of `rotations` [max_length, r]: cosines in the first half, sines in the second. The first r
    numbers of a head are rotated, in pairs that are r/2 apart, or neighbors if `interleaved`.
    `slots` [N] index kv_layer [2, K, blocks, block_size, d]; -1: not stored. With `q_norm` and `k_norm` [d], every head
    is normalized first; their weights are increased by `offset`.
    """
    scaled, qkv = (qkv, qkv.values) if isinstance(qkv, Scaled) else (None, qkv)
    assert qkv.is_contiguous() and positions.is_contiguous() and slots.is_contiguous()
    assert rotations.is_contiguous() and kv_layer.is_contiguous()
    _, kv_heads, blocks, block_size, size = kv_layer.shape
    rows, all_heads = qkv.shape[0], qkv.shape[1] // size
    heads = all_heads - 2 * kv_heads
    q = torch.empty((rows, heads, size), device=qkv.device, dtype=qkv.dtype)
    half = rotations.shape[1] // 2
    # Numbers that are not rotated follow; without a rest, no column is one of them.
    half_block, rest_block = triton.next_power_of_2(half), triton.next_power_of_2(max(size - 2 * half, 1))
    group = min(triton.next_power_of_2(all_heads), HEADS_BLOCK)
    _rope_store[(rows, triton.cdiv(all_heads, group))](
        *(qkv, *factors(scaled, q)[1:], positions, slots, rotations),
        q if q_norm is None else q_norm,  # without norms these are not read
        q if k_norm is None else k_norm,
        *(eps, kv_layer, q, blocks * block_size * size),
        PARTS=0 if scaled is None else len(scaled.sizes),
        BIAS=scaled is not None and scaled.bias is not None,
        NORM=q_norm is not None,
        OFFSET=offset,
        INTERLEAVED=interleaved,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        HALF=half,
        HEADS_BLOCK=group,
        HALF_BLOCK=half_block,
        REST_BLOCK=rest_block,
        num_warps=warps_for(group * half_block),
    )
    return q


@triton.jit
def _rope_store(
    qkv,
    row_scales,
    part_scales,
    bias,
    positions,
    slots,
    rotations,
    q_norm,
    k_norm,
    eps,
    kv,
    q,
    head_stride,  # elements of one head in the cache
    PARTS: tl.constexpr,  # of a product in 8 bits; else 0
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """One token and HEADS_BLOCK of its heads, which may be queries, keys and values."""
    ROTATED: tl.constexpr = 2 * HALF
    APART: tl.constexpr = 1 if INTERLEAVED else HALF  # of the two numbers of a pair
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    column = 2 * pair if INTERLEAVED else pair
    inside = (head < HEADS + 2 * KV_HEADS) & (pair < HALF)
    dtype = q.dtype.element_ty

    start = qkv + row * ((HEADS + 2 * KV_HEADS) * SIZE) + head * SIZE
    if PARTS > 0:  # rounded as the result of a product is
        part = tl.where(head < HEADS, 0, tl.where(head < HEADS + KV_HEADS, 1, 2)) * (PARTS > 1)
        factor = tl.load(row_scales + row) * tl.load(part_scales + part)
        bias += head * SIZE
        a = _scaled(start + column, factor, bias + column, inside, BIAS).to(dtype).to(tl.float32)
        b = _scaled(start + column + APART, factor, bias + column + APART, inside, BIAS).to(dtype).to(tl.float32)
    else:
        a = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(start + column + APART, mask=inside, other=0.0).to(tl.float32)
    is_value = head >= HEADS + KV_HEADS
    target = q + row * (HEADS * SIZE) + head * SIZE
    slot = tl.load(slots + row)
    # The cache has keys and values in the order in which they follow the queries.
    place = kv + (head - HEADS).to(tl.int64) * head_stride + slot * SIZE
    kept_a, kept_b = a, b
    if NORM:
        tl.static_assert(ROTATED == SIZE)
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        is_query = head < HEADS
        weight_a = tl.where(is_query, _line(q_norm, column, pair, HALF), _line(k_norm, column, pair, HALF))
        weight_b = tl.where(
            is_query, _line(q_norm + APART, column, pair, HALF), _line(k_norm + APART, column, pair, HALF)
        )
        if OFFSET != 0:
            a, b = a * scale * (weight_a + OFFSET), b * scale * (weight_b + OFFSET)
        else:  # rounded twice, as if the norm and its weight were two operations
            a, b = (a * scale).to(dtype).to(tl.float32) * weight_a, (b * scale).to(dtype).to(tl.float32) * weight_b
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)

    rotation = rotations + tl.load(positions + row) * ROTATED
    cos, sin = _line(rotation, pair, pair, HALF), _line(rotation + HALF, pair, pair, HALF)
    rotated_a = tl.where(is_value, kept_a, a * cos - b * sin).to(dtype)
    rotated_b = tl.where(is_value, kept_b, b * cos + a * sin).to(dtype)

    tl.store(target + column, rotated_a, mask=inside & (head < HEADS))
    tl.store(target + column + APART, rotated_b, mask=inside & (head < HEADS))
    stored = inside & (head >= HEADS) & (slot >= 0)
    tl.store(place + column, _as_stored(rotated_a, kv), mask=stored)
    tl.store(place + column + APART, _as_stored(rotated_b, kv), mask=stored)
    if ROTATED < SIZE:
        column = ROTATED + tl.arange(0, REST_BLOCK)[None, :]
        inside = (head < HEADS + 2 * KV_HEADS) & (column < SIZE)
        if PARTS > 0:
            rest = _scaled(start + column, factor, bias + column, inside, BIAS).to(dtype)
        else:
            rest = tl.load(start + column, mask=inside, other=0.0)
        tl.store(target + column, rest, mask=inside & (head < HEADS))
        tl.store(place + column, _as_stored(rest, kv), mask=inside & (head >= HEADS) & (slot >= 0))


@triton.jit
def _as_stored(value, kv):
    """In the dtype of the cache."""
    if kv.dtype.element_ty == tl.float8e4nv:
        value = limited(value.to(tl.float32))
    return value.to(kv.dtype.element_ty)


@triton.jit
def _line(start, column, pair, HALF: tl.constexpr):
    return tl.load(start + column, mask=pair < HALF, other=0.0).to(tl.float32)


def start_step(
    ints: Tensor,
    tables: Tensor,
    n: int,
    block_size: int,
    positions: Tensor,
    lengths: Tensor,
    slots: Tensor,
    ids: Tensor,
) -> None:
    """Inputs of the network for the first n rows, from `ints` [R, W] and `tables` [R, max_blocks] into the last four.

    A row that is not running gets position 0, length 0, slot -1, token 0. A token that is in the cache gets slot -1.
    """
    assert ints.stride(1) == 1 and tables.stride(1) == 1
    _start_step[(triton.cdiv(n, STEP_BLOCK),)](
        *(ints, ints.stride(0), tables, tables.stride(0), n, positions, lengths, slots, ids),
        BLOCK_SIZE=block_size,
        BLOCK=STEP_BLOCK,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["n"])
def _start_step(
    ints,
    ints_stride,
    tables,
    tables_stride,
    n,
    positions,
    lengths,
    slots,
    ids,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < n
    fields = ints + row.to(tl.int64) * ints_stride
    running = inside & (tl.load(fields + STATE, mask=inside, other=-1) == RUNNING)
    position = tl.load(fields + POSITION, mask=running, other=0)
    stored = tl.load(fields + STORED, mask=running, other=0)
    token = tl.load(fields + TOKEN, mask=running, other=0)
    writes = running & (position >= stored)
    entry = tables + row.to(tl.int64) * tables_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=writes, other=0).to(tl.int64)
    slot = tl.where(writes, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(positions + row, position, mask=inside)
    tl.store(lengths + row, tl.where(running, position + 1, 0).to(tl.int32), mask=inside)
    tl.store(slots + row, slot, mask=inside)
    tl.store(ids + row, token, mask=inside)
