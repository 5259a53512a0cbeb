"""Products for few rows, each in one kernel with the norm before it, and the activation or addition after it.

A decoding step of few rows waits for the start and end of small kernels and for the weights, not for the tensor cores:
fewer kernels are faster there. For more rows, libraries are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.engine.native.kernels.layers import _gated

MAX_ROWS = 16
MIN_DOT = 16  # minimum size of a product on tensor cores
PROGRAMS = 256  # enough to read weights at full speed: two per multiprocessor of an H200
INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Tiling:
    outputs: int = 16
    inputs: int = 256
    warps: int = 4
    stages: int = 4
    max_splits: int = 8


TILING = Tiling()


def new_counters(outputs: int, device: torch.device) -> Tensor:
    """`counters` for products with up to this number of outputs."""
    return torch.zeros(triton.cdiv(outputs, MIN_DOT), device=device, dtype=torch.int32)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    activation: str = "",
    add_to: Tensor | None = None,
    counters: Tensor | None = None,
    tiling: Tiling = TILING,
) -> Tensor:
    """x [N, D] @ weight.T + bias, for up to `MAX_ROWS` rows.

    With `norm` [D], x is normalized first, as by `layers.rms_norm`. With `activation`, the result is that of
    `layers.gated`. With `add_to`, the result is added to that, in place.
    `counters`: from `new_counters`, zeros before and after the call. With them, several programs share long sums.
    """
    rows, inputs = x.shape
    outputs = weight.shape[0] // 2 if activation else weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and rows <= MAX_ROWS
    out = torch.empty((rows, outputs), device=x.device, dtype=x.dtype) if add_to is None else add_to
    blocks = triton.cdiv(outputs, tiling.outputs)
    splits = 1
    if norm is None and not activation and counters is not None:
        assert blocks <= len(counters)
        steps = triton.cdiv(inputs, tiling.inputs)
        splits = max(min(PROGRAMS // blocks, steps // 2, tiling.max_splits), 1)
    height = max(triton.next_power_of_2(rows), MIN_DOT)
    sums = out if splits == 1 else torch.empty((blocks, splits, height, tiling.outputs), device=x.device)
    _product[(blocks, splits)](
        *(x, weight, out if bias is None else bias, out if norm is None else norm, out),
        *(sums, out if counters is None else counters, rows, eps),
        INPUTS=inputs,
        OUTPUTS=outputs,
        BIAS=bias is not None,
        NORM=norm is not None,
        OFFSET=offset,
        GATED=bool(activation),
        GELU=activation == "gelu_tanh",
        ADD=add_to is not None,
        SPLITS=splits,
        SHARE=triton.cdiv(triton.cdiv(inputs, tiling.inputs), splits) * tiling.inputs,
        ROWS=height,
        OUT=tiling.outputs,
        IN=tiling.inputs,
        WIDE=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    norm,
    out,
    sums,  # [blocks, splits, rows, outputs of a block]
    counters,  # [blocks]: finished splits; zeros before and after
    rows,
    eps,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARE: tl.constexpr,  # inputs of a split
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    WIDE: tl.constexpr,  # the interpreter cannot multiply bfloat16
):
    block = tl.program_id(0)
    row = tl.arange(0, ROWS)
    column = block * OUT + tl.arange(0, OUT)
    known = (row < rows)[:, None]
    wanted = (column < OUTPUTS)[None, :]
    result = tl.zeros([ROWS, OUT], tl.float32)
    other = tl.zeros([ROWS, OUT], tl.float32)
    squares = tl.zeros([ROWS, IN], tl.float32)
    first = tl.program_id(1) * SHARE
    for start in range(first, min(first + SHARE, INPUTS), IN):
        place = start + tl.arange(0, IN)
        inside = place < INPUTS
        value = tl.load(x + row[:, None] * INPUTS + place[None, :], mask=known & inside[None, :], other=0.0)
        if NORM:
            exact = value.to(tl.float32)
            squares += exact * exact
            scale = tl.load(norm + place, mask=inside, other=0.0).to(tl.float32) + OFFSET
            value = (exact * scale[None, :]).to(value.dtype)
        at = column.to(tl.int64)[None, :] * INPUTS + place[:, None]
        part = tl.load(weight + at, mask=wanted & inside[:, None], other=0.0)
        if WIDE:
            value, part = value.to(tl.float32), part.to(tl.float32)
        result = tl.dot(value, part, result)
        if GATED:
            part = tl.load(weight + OUTPUTS * INPUTS + at, mask=wanted & inside[:, None], other=0.0)
            if WIDE:
                part = part.to(tl.float32)
            other = tl.dot(value, part, other)

    complete = True
    if SPLITS > 1:
        inner = row[:, None] * OUT + tl.arange(0, OUT)[None, :]
        buffer = sums + block * SPLITS * ROWS * OUT
        tl.store(buffer + tl.program_id(1) * ROWS * OUT + inner, result)
        tl.debug_barrier()  # all results of this program are stored before it is counted
        complete = tl.atomic_add(counters + block, 1, sem="acq_rel") == SPLITS - 1
        if complete:
            tl.store(counters + block, 0)
            result = tl.zeros([ROWS, OUT], tl.float32)
            for split in range(SPLITS):  # in a fixed order
                result += tl.load(buffer + split * ROWS * OUT + inner, cache_modifier=".cg")
    if complete:
        if NORM:
            factor = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)[:, None]
            result, other = result * factor, other * factor
        if BIAS:
            result += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
            if GATED:
                other += tl.load(bias + OUTPUTS + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
        if GATED:
            result = _gated(result, other, GELU)
        target = out + row[:, None] * OUTPUTS + column[None, :]
        if ADD:
            result += tl.load(target, mask=known & wanted, other=0.0).to(tl.float32)
        tl.store(target, result.to(out.dtype.element_ty), mask=known & wanted)
