"""The operations of a layer between its matrix products: in torch for any device, in Triton for CUDA.

The C version for CPUs is in `compiled`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.spec import ModelSpec


@dataclass(slots=True)
class TokenPositions:
    """Positions of tokens in their sequences, and their slots in the KV cache (-1: not to be stored)."""

    positions: Tensor  # [N]
    slots: Tensor  # [N]
    cos: Tensor | None = None  # [N, 1, d], only for `TorchOperations`
    sin: Tensor | None = None


class Operations(Protocol):
    def token_positions(self, positions: Tensor, slots: Tensor) -> TokenPositions: ...
    def norm(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def activate(self, gate_up: Tensor) -> Tensor: ...
    def rotate_and_store(
        self, qkv: Tensor, at: TokenPositions, q_norm: Tensor | None, k_norm: Tensor | None, kv: Tensor
    ) -> Tensor:
        """Rotated queries [N, H, d]; keys and values are stored in a layer's cache [2, K, blocks, block size, d]."""
        ...


class TorchOperations:
    def __init__(self, spec: ModelSpec, angles: Tensor, dtype: torch.dtype) -> None:
        self.spec = spec
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1)[:, None].to(dtype)
        self.sin = torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def token_positions(self, positions: Tensor, slots: Tensor) -> TokenPositions:
        return TokenPositions(positions, slots, self.cos[positions], self.sin[positions])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate_and_store(
        self, qkv: Tensor, at: TokenPositions, q_norm: Tensor | None, k_norm: Tensor | None, kv: Tensor
    ) -> Tensor:
        heads, kv_heads, size = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv = qkv.view(-1, heads + 2 * kv_heads, size)
        rotated = qkv[:, : heads + kv_heads]
        if q_norm is not None and k_norm is not None:
            scales = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
            rotated = F.rms_norm(rotated, (size,), None, self.spec.norm_eps) * scales
        assert at.cos is not None and at.sin is not None
        rotated = torch.addcmul(rotated * at.cos, rotated.roll(size // 2, dims=-1), at.sin)
        # A slot of -1 is the last one of the cache, in a block that no sequence uses.
        slots = kv.view(2, kv_heads, -1, size)
        slots[0].index_copy_(1, at.slots % slots.shape[2], rotated[:, heads:].transpose(0, 1))
        slots[1].index_copy_(1, at.slots % slots.shape[2], qkv[:, heads + kv_heads :].transpose(0, 1))
        return rotated[:, :heads]


class TritonOperations:
    def __init__(self, spec: ModelSpec, rotations: Tensor) -> None:
        from assay.engine.native.kernels import layers

        self.spec, self.rotations, self.kernels = spec, rotations, layers

    def token_positions(self, positions: Tensor, slots: Tensor) -> TokenPositions:
        return TokenPositions(positions, slots)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.spec.norm_eps)

    def activate(self, gate_up: Tensor) -> Tensor:
        return self.kernels.silu_mul(gate_up)

    def rotate_and_store(
        self, qkv: Tensor, at: TokenPositions, q_norm: Tensor | None, k_norm: Tensor | None, kv: Tensor
    ) -> Tensor:
        return self.kernels.rope_store(
            qkv, at.positions, at.slots, self.rotations, q_norm, k_norm, self.spec.norm_eps, kv
        )
