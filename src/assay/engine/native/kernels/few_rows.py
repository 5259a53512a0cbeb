"""Layers for decoding steps with at most 16 rows: five kernels each (`few_rows.cu`) instead of nine, and the weights of
one are read while the kernel before it ends. With small models, such steps are bound by the time between kernels.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assay.engine.native.kernels import cuda
from assay.engine.native.network import Attend, FusedDecoder, FusedLayer, TokenPositions, TritonOperations

SOURCE = Path(__file__).parent / "few_rows.cu"
MAX_ROWS = 16
MAX_LAYER_BYTES = 256 * 2**20  # layers with larger weights are bound by memory, with any kernel
STORE, ADD, SILU, GELU, ROTATE = range(5)  # what happens to a result; as in the source
GATES = {"silu": SILU, "gelu_tanh": GELU}


class Shape(NamedTuple):
    """How a program divides its work; see the source."""

    groups: int
    warps: int
    depth: int


class Rotation(NamedTuple):
    """What `ROTATE` needs; in the order of the kernel's parameters."""

    positions: Tensor | None = None
    slots: Tensor | None = None
    angles: Tensor | None = None
    kv: Tensor | None = None
    head_stride: ctypes.c_int64 = ctypes.c_int64(0)
    heads: int = 0
    kv_heads: int = 0
    half: int = 8


NO_ROTATION = Rotation()


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    mode: int = STORE,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
    rotation: Rotation = NO_ROTATION,
    shape: Shape | None = None,
) -> Tensor:
    """x [N, in] @ weight.T + bias, after the norm of x with the weights `norm` + `offset`; then what `mode` says.

    STORE: to `out`. ADD: added to `out`. SILU, GELU: the first half of the features, activated, times the second half.
    ROTATE: queries go to `out`, keys and values to the cache.
    """
    (rows, inputs), all_features = x.shape, len(weight)
    assert rows <= MAX_ROWS and all(part.is_contiguous() for part in (x, weight, out)) and inputs % 8 == 0
    groups, warps, depth = shape or shape_for(rows, all_features, inputs, norm is not None, mode)
    assert groups > 1 or mode in (STORE, ADD)  # other results combine groups
    features = all_features // 2 if mode in (SILU, GELU) else all_features
    kernel(groups, 1 if rows <= 8 else 2, warps, depth, norm is not None, x.device.index or 0)(
        *(-(-all_features // (8 * groups)), 32 * warps, x, norm, weight, bias, out, rows, inputs, features, mode),
        *(eps, offset, *rotation),
    )
    return out


def shape_for(rows: int, features: int, inputs: int, norm: bool, mode: int) -> Shape:
    """The fastest of those that were measured on an H200."""
    if mode in (SILU, GELU) or features >= 4 * inputs:  # enough programs for all multiprocessors
        return Shape(4, 4, 4 if rows <= 8 else 2)
    if norm or mode == ROTATE:
        return Shape(4, 8, 4)
    if inputs <= 1024:
        return Shape(2, 8, 4)
    return Shape(1 if features <= 1024 else 2, 16, 4)


@cache
def kernel(groups: int, halves: int, warps: int, depth: int, norm: bool, device: int) -> cuda.Kernel:
    sizes = {"GROUPS": groups, "HALVES": halves, "WARPS": warps, "DEPTH": depth, "NORM": int(norm)}
    defines = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
    return cuda.Kernel(defines + SOURCE.read_text("utf-8"), "few_rows")


class FewRows:
    """Runs the layers of a network."""

    def __init__(self, ops: TritonOperations) -> None:
        self.ops, self.eps, self.offset = ops, ops.spec.norm_eps, ops.spec.design.norm_offset

    @staticmethod
    def supports(network: FusedDecoder) -> bool:
        layer = network.layers[0]
        matrices = [layer.qkv, layer.out, layer.gate_up, layer.down]
        return (
            isinstance(network.ops, TritonOperations)
            and network.shard is None
            and all(isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 for weight in matrices)
            and all(size % 8 == 0 for weight in matrices for size in weight.shape)
            and sum(weight.numel() * weight.element_size() for weight in matrices if isinstance(weight, Tensor))
            <= MAX_LAYER_BYTES
            and cuda.is_available(network.norm.device)
        )

    def forward(self, layer: FusedLayer, x: Tensor, at: TokenPositions, kv: Tensor, attend: Attend) -> None:
        """`FusedLayer.forward`"""
        q = self.store(layer, x, at, kv)
        attended = attend(kv, q, layer.window, layer.scale).flatten(1)
        self.add(x, attended, layer.out, layer.out_bias, layer.norms[1])
        gated = x.new_empty(len(x), self.ops.spec.intermediate)
        gate = GATES[self.ops.spec.design.activation]
        self.product(x, layer.gate_up, gated, gate, bias=layer.gate_up_bias, norm=layer.norms[2])
        self.add(x, gated, layer.down, layer.down_bias, layer.norms[3])

    def store(self, layer: FusedLayer, x: Tensor, at: TokenPositions, kv: Tensor) -> Tensor:
        """Return the queries; keys and values are stored in the cache."""
        spec, angles = self.ops.spec, self.ops.rotations[layer.rope_table]
        rotated = angles.shape[1]
        product = partial(self.product, bias=layer.qkv_bias, norm=layer.norms[0])
        plain = layer.qk_norms is None and not spec.design.interleaved_rope and kv.dtype == x.dtype
        if not plain or rotated != spec.head_dim or rotated % 16:
            qkv = product(x, layer.qkv, x.new_empty(len(x), len(layer.qkv)))
            return layer.rotated(qkv, at, self.ops, kv)
        q = x.new_empty(len(x), spec.heads, spec.head_dim)
        stride = ctypes.c_int64(kv.stride(1))
        rotation = Rotation(at.positions, at.slots, angles, kv, stride, spec.heads, spec.kv_heads, rotated // 2)
        return product(x, layer.qkv, q, ROTATE, rotation=rotation)

    def add(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> None:
        """x += norm(y @ weight.T + bias)"""
        if norm is None:
            product(y, weight, x, ADD, bias=bias)
        else:
            x.add_(self.ops.norm(product(y, weight, torch.empty_like(x), bias=bias), norm))

    def product(self, *arguments: Any, **options: Any) -> Tensor:
        return product(*arguments, **options, eps=self.eps, offset=self.offset)
