"""The decoder as the native engine runs it: the function of `assay.models.decoder.Decoder` in fewer, larger operations.

Queries, keys and values come from one matrix product, gate and up from another. The canonical weights, by their Hugging
Face names, are views of the fused ones: copying into the views updates the network, and the fingerprint is computed
over the weights that are served.

With a `TPShard`, each rank holds its slice of every weight (`assay.models.parallel`). A layer needs two sums over the
ranks and the embedding one; logits are gathered. (A replicated embedding would save its sum at the cost of memory; if
it is tied to the output head, it has to be split anyway.)

The operations of a layer between its matrix products (`Operations`) are here in torch for any device, and in Triton for
CUDA; `compiled` has them in C for CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.parallel import TPShard, own_rows
from assay.models.spec import ModelSpec

SMALL_MATRIX = 2**18  # elements that fit into the cache of one core
# (a layer's cache [2, K, blocks, block size, d], queries [N, H, d]) -> [N, H, d]
Attend = Callable[[Tensor, Tensor], Tensor]


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


class FusedLayer:
    def __init__(
        self, spec: ModelSpec, index: int, device: torch.device, dtype: torch.dtype, shard: TPShard | None
    ) -> None:
        new = partial(new_weight, device=device, dtype=dtype)
        self.spec, self.index, self.shard = spec, index, shard
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv, self.out = new(queries + 2 * keys, spec.hidden), new(spec.hidden, queries)
        self.qkv_bias = new(queries + 2 * keys) if spec.qkv_bias else None
        self.out_bias = new(spec.hidden) if spec.out_bias else None
        self.gate_up, self.down = new(2 * spec.intermediate, spec.hidden), new(spec.hidden, spec.intermediate)
        self.gate_up_bias = new(2 * spec.intermediate) if spec.mlp_bias else None
        self.down_bias = new(spec.hidden) if spec.mlp_bias else None
        self.input_norm, self.mlp_norm = new(spec.hidden), new(spec.hidden)
        self.q_norm = new(spec.head_dim) if spec.qk_norm else None
        self.k_norm = new(spec.head_dim) if spec.qk_norm else None

    def canonical(self) -> dict[str, Tensor]:
        """Views of the weights under their Hugging Face names."""
        spec, prefix = self.spec, f"model.layers.{self.index}."
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        split = [queries, keys, keys]
        names: dict[str, Tensor | None] = {
            "input_layernorm.weight": self.input_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            "self_attn.q_norm.weight": self.q_norm,
            "self_attn.k_norm.weight": self.k_norm,
            "self_attn.o_proj.weight": self.out,
            "self_attn.o_proj.bias": self.out_bias,
            "mlp.down_proj.weight": self.down,
            "mlp.down_proj.bias": self.down_bias,
        }
        for kind, qkv, gate_up in (("weight", self.qkv, self.gate_up), ("bias", self.qkv_bias, self.gate_up_bias)):
            if qkv is not None:
                parts = qkv.split(split)
                names |= {f"self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
            if gate_up is not None:
                gate, up = gate_up.chunk(2)
                names |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
        return {prefix + name: value for name, value in names.items() if value is not None}

    def forward(self, x: Tensor, at: TokenPositions, ops: Operations, kv: Tensor, attend: Attend) -> Tensor:
        q = self.store(x, at, ops, kv)
        x = residual(x, attend(kv, q).flatten(1), self.out, self.out_bias, self.shard)
        gate_up = F.linear(ops.norm(x, self.mlp_norm), self.gate_up, self.gate_up_bias)
        return residual(x, ops.activate(gate_up), self.down, self.down_bias, self.shard)

    def store(self, x: Tensor, at: TokenPositions, ops: Operations, kv: Tensor) -> Tensor:
        """Return the queries; keys and values are stored in the cache."""
        qkv = F.linear(ops.norm(x, self.input_norm), self.qkv, self.qkv_bias)
        return ops.rotate_and_store(qkv, at, self.q_norm, self.k_norm, kv)


class FusedDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        ops: Operations,
        device: torch.device,
        dtype: torch.dtype,
        shard: TPShard | None = None,
    ) -> None:
        """With `shard`, `spec` has the heads and MLP of this rank, and the whole vocabulary."""
        self.spec, self.ops, self.shard = spec, ops, shard
        tokens = spec.vocab_size if self.shard is None else self.shard.tokens
        self.embedding = new_weight(tokens, spec.hidden, device=device, dtype=dtype)
        self.head = self.embedding if spec.tied else torch.zeros_like(self.embedding)
        self.norm = torch.zeros(spec.hidden, device=device, dtype=dtype)
        self.layers = [FusedLayer(spec, index, device, dtype, self.shard) for index in range(spec.layers)]

    def canonical(self) -> dict[str, Tensor]:
        """Every weight once, under its Hugging Face name, as a view of the served weights."""
        names = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tied:
            names["lm_head.weight"] = self.head
        for layer in self.layers:
            names |= layer.canonical()
        return names

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every full weight, one at a time. All ranks of a group must iterate together."""
        for name, weight in self.canonical().items():
            yield name, weight if self.shard is None else self.shard.full(name, weight)

    def forward(self, ids: Tensor, at: TokenPositions, kv: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, D] of token ids [N]; their keys and values are stored in the cache."""
        x = self.embed(ids)
        for layer, cache in zip(self.layers, kv, strict=True):
            x = layer.forward(x, at, self.ops, cache, attend)
        return self.ops.norm(x, self.norm)

    def fill(self, ids: Tensor, at: TokenPositions, kv: Tensor, attend: Attend) -> None:
        """Only store keys and values: the rest of the last layer is not computed."""
        x = self.embed(ids)
        for layer, cache in zip(self.layers[:-1], kv, strict=False):
            x = layer.forward(x, at, self.ops, cache, attend)
        self.layers[-1].store(x, at, self.ops, kv[-1])

    def embed(self, ids: Tensor) -> Tensor:
        if self.shard is None:
            return F.embedding(ids, self.embedding)
        rows, here = own_rows(ids, self.shard.first_token, self.shard.tokens)
        return self.shard.sum_(F.embedding(rows, self.embedding).masked_fill_(~here[:, None], 0.0))

    def unembed(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.head)
        return logits if self.shard is None else self.shard.gather(logits, 1, self.spec.vocab_size)


def new_weight(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros. On a CPU, small matrices are stored by columns: the C kernels need that, and OpenBLAS would transpose them
    in every product. (Large ones are stored by rows, which is faster for products with a single row.)
    """
    if device.type == "cpu" and dtype == torch.float32 and len(shape) == 2 and math.prod(shape) <= SMALL_MATRIX:
        return torch.zeros(shape[::-1], device=device, dtype=dtype).t()
    return torch.zeros(shape, device=device, dtype=dtype)


def residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, shard: TPShard | None) -> Tensor:
    """x + y @ weight.T (+ bias), in place: one operation if there is no bias and a single rank."""
    if shard is not None:
        x.add_(shard.sum_(F.linear(y, weight)))
        return x if bias is None else x.add_(bias)
    if bias is None:
        return x.addmm_(y, weight.t())
    return x.add_(F.linear(y, weight, bias))
