"""Triton kernels: `scores_of` and `gradient_of` of `logprobs`, `dequantize` of `quantize`.

The first two read every logit once and store nothing else. The others read and write each number once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row that are read together
WARPS = 8
# Arguments with a number per row, at any address: one compiled kernel is enough for all.
ROW_VALUES = ("targets", "logprobs", "entropies", "partition", "grad_logprobs", "grad_entropy")


def scores_of(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    assert logits.stride(1) == 1
    rows, size = logits.shape
    logprobs, entropies, partition = torch.empty((3, rows), device=logits.device, dtype=torch.float32)
    if rows:
        _scores_of[(rows,)](
            *(logits, logits.stride(0), targets, 1.0 / temperature, logprobs, entropies, partition),
            SIZE=size,
            BLOCK=min(BLOCK, triton.next_power_of_2(size)),
            num_warps=WARPS,
        )
    return logprobs, entropies, partition


@triton.jit(do_not_specialize_on_alignment=ROW_VALUES)
def _scores_of(logits, stride, targets, scale, logprobs, entropies, partition, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    column = tl.arange(0, BLOCK)
    # One maximum, sum and weighted sum per lane; the lanes are combined once, at the end.
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, SIZE, BLOCK):
        value = tl.load(line + start + column, mask=start + column < SIZE, other=float("-inf")).to(tl.float32) * scale
        # A lane with only -inf gets a finite maximum, so that no difference is NaN.
        new = tl.maximum(tl.maximum(largest, value), -1e30)
        scale_down = tl.exp(largest - new)
        weight = tl.exp(value - new)
        total = total * scale_down + weight
        weighted = weighted * scale_down + tl.where(weight > 0, weight * value, 0.0)
        largest = new
    top = tl.max(largest, 0)
    factor = tl.exp(largest - top)
    whole = tl.sum(total * factor, 0)
    log_sum = top + tl.log(whole)
    chosen = tl.load(line + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logprobs + row, chosen - log_sum)
    tl.store(entropies + row, log_sum - tl.sum(weighted * factor, 0) / whole)
    tl.store(partition + row, log_sum)


def gradient_of(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropies: Tensor,
    partition: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Overwrites the logits."""
    rows, size = logits.shape
    block = min(BLOCK, triton.next_power_of_2(size))
    if rows:
        _gradient_of[(rows, triton.cdiv(size, block))](
            *(logits, logits.stride(0), targets, 1.0 / temperature, entropies, partition),
            *(grad_logprobs.contiguous(), grad_logprobs if grad_entropy is None else grad_entropy.contiguous()),
            SIZE=size,
            BLOCK=block,
            WITH_ENTROPY=grad_entropy is not None,
            num_warps=WARPS,
        )
    return logits


@triton.jit(do_not_specialize_on_alignment=ROW_VALUES)
def _gradient_of(
    logits,
    stride,
    targets,
    scale,
    entropies,
    partition,
    grad_logprobs,
    grad_entropy,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    address = logits + row * stride + column
    logs = tl.load(address, mask=inside, other=float("-inf")).to(tl.float32) * scale - tl.load(partition + row)
    prob = tl.exp(logs)
    grad_logprob = tl.load(grad_logprobs + row)
    factor = grad_logprob
    if WITH_ENTROPY:
        factor += tl.load(grad_entropy + row) * (tl.where(prob > 0, logs, 0.0) + tl.load(entropies + row))
    grad = tl.where(column == tl.load(targets + row), grad_logprob, 0.0) - prob * factor
    tl.store(address, (grad * scale).to(logits.dtype.element_ty), mask=inside)


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
