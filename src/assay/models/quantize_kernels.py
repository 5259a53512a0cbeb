"""`dequantize` of `quantize` in Triton: each code is read once, and each weight is written once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BYTES = 1024  # codes per program


def dequantize(codes: Tensor, scales: Tensor, shape: Sequence[int], values: Tensor) -> Tensor:
    """`values`: the 16 values of codes, in float32."""
    out = torch.empty(tuple(shape), device=codes.device, dtype=scales.dtype)
    size = math.prod(shape)
    if size:
        _dequantize[(triton.cdiv(codes.numel(), BYTES),)](
            codes, scales, values, out, size, codes.numel(), BYTES=BYTES, PER_SCALE=codes.numel() // scales.numel()
        )
    return out


@triton.jit
def _dequantize(codes, scales, values, out, size, code_bytes, BYTES: tl.constexpr, PER_SCALE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < code_bytes
    code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + at // PER_SCALE, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(values + (code >> 4)) * scale
    second = tl.load(values + (code & 15)) * scale
    place = tl.program_id(0).to(tl.int64) * (2 * BYTES) + tl.arange(0, 2 * BYTES)
    tl.store(out + place, tl.interleave(first, second).to(out.dtype.element_ty), mask=place < size)
