"""`low_memory.update` as a Triton kernel: every number is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from assay.training.learner import low_memory

BLOCK = tl.constexpr(low_memory.BLOCK)
DROPPED = tl.constexpr(low_memory.DROPPED)
LOW = tl.constexpr((1 << low_memory.DROPPED) - 1)  # mask of the dropped bits
STEP = tl.constexpr(2.0**-low_memory.DROPPED)
ONE = tl.constexpr(low_memory.ONE)
SIGNED, UNSIGNED = tl.constexpr(low_memory.TOP_SIGNED), tl.constexpr(low_memory.TOP_UNSIGNED)
LEAST_SCALE = tl.constexpr(low_memory.LEAST_SCALE)
ROWS = 8  # blocks per program


def update(
    weight: Tensor,
    remainder: Tensor | None,
    grad: Tensor,
    first_codes: Tensor,
    first_scales: Tensor,
    second_codes: Tensor,
    second_scales: Tensor,
    seed: int,
    *,
    beta1: float,
    beta2: float,
    rate: float,
    scale: float,
    eps: float,
    keep: float,
) -> None:
    rest = weight if remainder is None else remainder
    _update[(triton.cdiv(len(first_scales), ROWS),)](
        *(weight, rest, grad.contiguous(), first_codes, first_scales, second_codes, second_scales),
        *(weight.numel(), len(first_scales), seed - (seed >> 31 << 32)),
        *(beta1, 1 - beta1, beta2, 1 - beta2, rate, scale, eps, keep),
        HAS_REMAINDER=remainder is not None,
        ROWS=ROWS,
        num_warps=8,
    )


@triton.jit
def _hashed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _value(codes, TOP: tl.constexpr):
    return ((codes + (ONE - TOP)) << DROPPED).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(codes, scales, TOP: tl.constexpr):
    magnitude = codes.to(tl.int32) & TOP
    values = tl.where(magnitude > 0, _value(magnitude, TOP), 0.0)
    if TOP == SIGNED:
        values = tl.where(codes > TOP, -values, values)
    return values * scales


@triton.jit
def _encoded(values, random_bits, TOP: tl.constexpr):
    magnitudes = tl.abs(values)
    scales = tl.max(magnitudes, axis=1)[:, None]
    inverse = tl.where(scales > LEAST_SCALE, 1.0 / scales, 0.0)
    relative = tl.minimum(magnitudes * inverse, 1.0)
    low = (random_bits & LOW).to(tl.int32)
    codes = ((relative.to(tl.int32, bitcast=True) + low) >> DROPPED) - (ONE - TOP)
    smallest = _value(tl.full(values.shape, 1, tl.int32), TOP)
    if TOP == SIGNED:
        up = low.to(tl.float32) * STEP * smallest < relative
    else:
        up = relative > 0
    codes = tl.where(relative < smallest, up.to(tl.int32), codes)
    if TOP == SIGNED:
        codes = codes | tl.where(values < 0, 128, 0)
    return codes.to(tl.uint8), scales


@triton.jit(do_not_specialize=["seed"])
def _update(
    weight,
    remainder,
    grad,
    first_codes,
    first_scales,
    second_codes,
    second_scales,
    size,
    blocks,
    seed,
    beta1,
    rest1,
    beta2,
    rest2,
    rate,
    scale,
    eps,
    keep,
    HAS_REMAINDER: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = rows * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, known = at < size, rows < blocks
    high = tl.load(weight + at, mask=inside, other=0.0)
    slope = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    old_first = tl.load(first_codes + at, mask=inside, other=0)
    old_second = tl.load(second_codes + at, mask=inside, other=0)
    first = _decoded(old_first, tl.load(first_scales + rows, mask=known, other=0.0), SIGNED)
    second = _decoded(old_second, tl.load(second_scales + rows, mask=known, other=0.0), UNSIGNED)
    exact = high.to(tl.float32)
    if HAS_REMAINDER:
        rest = tl.load(remainder + at, mask=inside, other=0).to(tl.int32)
        exact = ((high.to(tl.int16, bitcast=True).to(tl.int32) << 16) + rest).to(tl.float32, bitcast=True)
    first = beta1 * first + rest1 * slope
    second = beta2 * second + rest2 * slope * slope
    new = keep * exact - rate * first / (tl.sqrt(second) * scale + eps)
    bits1 = _hashed(at.to(tl.uint32) ^ seed.to(tl.uint32))
    bits2 = _hashed(bits1 + 0x9E3779B9)
    first_new, first_scale = _encoded(first, bits1, SIGNED)
    second_new, second_scale = _encoded(second, bits2, UNSIGNED)
    bits = new.to(tl.int32, bitcast=True)
    if HAS_REMAINDER:
        top = (bits + 0x8000) >> 16
        tl.store(remainder + at, (bits - (top << 16)).to(tl.int16), mask=inside)
    else:
        top = (bits + (((bits1 >> DROPPED) | ((bits2 >> DROPPED) << 12)) & 0xFFFF).to(tl.int32)) >> 16
    tl.store(weight + at, top.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
    tl.store(first_codes + at, first_new, mask=inside)
    tl.store(second_codes + at, second_new, mask=inside)
    tl.store(first_scales + rows, first_scale, mask=known)
    tl.store(second_scales + rows, second_scale, mask=known)
