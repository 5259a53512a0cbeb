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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.decoder import GATES, embedding_scale, rms_norm
from assay.models.fp8 import (
    EMBEDDING,
    HEAD,
    LARGEST,
    LEAST,
    Fp8Head,
    Fp8Matrix,
    Quantized,
    Scaled,
    as_bytes,
    named,
    quantize,
    to_fp8,
)
from assay.models.parallel import TPShard, own_rows
from assay.models.spec import ModelSpec

Matrix = Tensor | Fp8Matrix | Fp8Head
QKNorms = tuple[Tensor, Tensor] | None  # weights of the norms of queries and of keys
SMALL_MATRIX = 2**18  # elements that fit into the cache of one core
# (a layer's cache [2, K, blocks, block size, d], queries [N, H, d], window, scale) -> [N, H, d]
Attend = Callable[[Tensor, Tensor, int, float | None], Tensor]


@runtime_checkable
class QuantizingAttend(Protocol):
    """An `Attend` that can also return codes with the given scale [1]."""

    def quantized(self, kv: Tensor, q: Tensor, window: int, scale: float | None, out_scale: Tensor) -> Quantized: ...


@dataclass(slots=True)
class TokenPositions:
    """Positions of tokens in their sequences, and their slots in the KV cache (-1: not to be stored)."""

    positions: Tensor  # [N]
    slots: Tensor  # [N]
    cos: Tensor | None = None  # [tables, N, 1, rotated], only for `TorchOperations`
    sin: Tensor | None = None


@dataclass(slots=True)
class Stream:
    """Hidden states [N, D] between layers, and what the next norm adds to them."""

    x: Tensor
    added: Scaled | None = None

    def sum(self) -> Tensor:
        return self.x if self.added is None else self.x.add_(self.added.tensor())


class Operations(Protocol):
    def token_positions(self, positions: Tensor, slots: Tensor) -> TokenPositions: ...
    def norm(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def activate(self, gate_up: Tensor) -> Tensor: ...
    def rotate_and_store(self, qkv: Tensor, at: TokenPositions, norms: QKNorms, kv: Tensor, table: int) -> Tensor:
        """Rotated queries [N, H, d]; keys and values are stored in a layer's cache [2, K, blocks, block size, d].

        `table`: of the model's rotary tables (`decoder.rope_tables`), the one of this layer.
        """


class Fp8Operations(Operations, Protocol):
    """Operations around products in 8 bits: those after a product apply its scales, those before one quantize."""

    def quantized_norm(self, x: Tensor, y: Scaled | None, weight: Tensor | None) -> Quantized:
        """x += y, in place; then the norm of x (without `weight`, x itself)."""

    def norm_of_sum(self, x: Tensor, y: Scaled, weight: Tensor) -> Tensor: ...
    def quantized_activation(self, gate_up: Scaled) -> Quantized: ...
    def rotate_and_store(
        self, qkv: Tensor | Scaled, at: TokenPositions, norms: QKNorms, kv: Tensor, table: int
    ) -> Tensor: ...


class TorchOperations:
    def __init__(self, spec: ModelSpec, angles: Tensor, dtype: torch.dtype) -> None:
        """`angles` [tables, max_length, rotated / 2]"""
        self.spec = spec
        cos, sin = angles.cos(), angles.sin()
        # The second of each pair of numbers has a positive sine, the first a negative one.
        join = partial(torch.stack, dim=-1) if spec.design.interleaved_rope else partial(torch.cat, dim=-1)
        shape = (*angles.shape[:2], 1, spec.rotated)
        self.cos, self.sin = join((cos, cos)).view(shape).to(dtype), join((-sin, sin)).view(shape).to(dtype)

    def token_positions(self, positions: Tensor, slots: Tensor) -> TokenPositions:
        return TokenPositions(positions, slots, self.cos[:, positions], self.sin[:, positions])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.spec.norm_eps, self.spec.design.norm_offset)

    def quantized_norm(self, x: Tensor, y: Scaled | None, weight: Tensor | None) -> Quantized:
        x = Stream(x, y).sum()
        return quantize(x if weight is None else self.norm(x, weight))

    def norm_of_sum(self, x: Tensor, y: Scaled, weight: Tensor) -> Tensor:
        return self.norm(Stream(x, y).sum(), weight)

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return GATES[self.spec.design.activation](gate).mul_(up)

    def quantized_activation(self, gate_up: Scaled) -> Quantized:
        return quantize(self.activate(gate_up.tensor()))

    def rotate_and_store(
        self, qkv: Tensor | Scaled, at: TokenPositions, norms: QKNorms, kv: Tensor, table: int
    ) -> Tensor:
        heads, kv_heads, size = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv = qkv.tensor() if isinstance(qkv, Scaled) else qkv
        qkv = qkv.view(-1, heads + 2 * kv_heads, size)
        rotated = qkv[:, : heads + kv_heads]
        if norms is not None:
            scales = torch.cat([norm.expand(count, -1) for norm, count in zip(norms, (heads, kv_heads), strict=True)])
            if offset := self.spec.design.norm_offset:
                wide = torch.promote_types(qkv.dtype, torch.float32)
                normed = F.rms_norm(rotated.to(wide), (size,), None, self.spec.norm_eps)
                rotated = (normed * (scales.to(wide) + offset)).to(qkv.dtype)
            else:
                rotated = F.rms_norm(rotated, (size,), None, self.spec.norm_eps) * scales
        rotated = self.rotate(rotated, at, table)
        # A slot of -1 is the last one of the cache, in a block that no sequence uses.
        slots = as_bytes(kv).view(2, kv_heads, -1, size)
        for part, new in zip(slots, (rotated[:, heads:], qkv[:, heads + kv_heads :]), strict=True):
            new = new if new.dtype == kv.dtype else as_bytes(to_fp8(new))
            part.index_copy_(1, at.slots % slots.shape[2], new.transpose(0, 1))
        return rotated[:, :heads]

    def rotate(self, x: Tensor, at: TokenPositions, table: int) -> Tensor:
        assert at.cos is not None and at.sin is not None
        size = self.spec.rotated
        part = x[..., :size]
        if self.spec.design.interleaved_rope:
            swapped = part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = part.roll(size // 2, dims=-1)
        part = torch.addcmul(part * at.cos[table], swapped, at.sin[table])
        return part if size == x.shape[-1] else torch.cat((part, x[..., size:]), dim=-1)


class TritonOperations:
    def __init__(self, spec: ModelSpec, rotations: Tensor) -> None:
        """`rotations` [tables, max_length, rotated]: cosines, then sines"""
        from assay.engine.native.kernels import layers

        self.spec, self.rotations, self.kernels = spec, rotations, layers

    def token_positions(self, positions: Tensor, slots: Tensor) -> TokenPositions:
        return TokenPositions(positions, slots)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.spec.norm_eps, self.spec.design.norm_offset)

    def quantized_norm(self, x: Tensor, y: Scaled | None, weight: Tensor | None) -> Quantized:
        return self.kernels.quantized_norm(x, y, weight, self.spec.norm_eps, self.spec.design.norm_offset)

    def norm_of_sum(self, x: Tensor, y: Scaled, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.spec.norm_eps, self.spec.design.norm_offset, y)

    def activate(self, gate_up: Tensor) -> Tensor:
        return self.kernels.gated(gate_up, self.spec.design.activation)

    def quantized_activation(self, gate_up: Scaled) -> Quantized:
        return self.kernels.quantized_activation(gate_up, self.spec.design.activation)

    def rotate_and_store(
        self, qkv: Tensor | Scaled, at: TokenPositions, norms: QKNorms, kv: Tensor, table: int
    ) -> Tensor:
        design = self.spec.design
        return self.kernels.rope_store(
            *(qkv, at.positions, at.slots, self.rotations[table], *(norms or (None, None)), self.spec.norm_eps, kv),
            offset=design.norm_offset,
            interleaved=design.interleaved_rope,
        )


def new_weight(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros. On a CPU, small matrices are stored by columns: the C kernels need that, and OpenBLAS would transpose them
    in every product. (Large ones are stored by rows, which is faster for products with a single row.)
    """
    if device.type == "cpu" and dtype == torch.float32 and len(shape) == 2 and math.prod(shape) <= SMALL_MATRIX:
        return torch.zeros(shape[::-1], device=device, dtype=dtype).t()
    return torch.zeros(shape, device=device, dtype=dtype)


def new_matrix(sizes: Sequence[int], inputs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights of linear layers with the same inputs, one below the other."""
    return new_weight(sum(sizes), inputs, device=device, dtype=dtype)


class FusedLayer:
    matrix: Callable[..., Any] = staticmethod(new_matrix)

    def __init__(
        self, spec: ModelSpec, index: int, device: torch.device, dtype: torch.dtype, shard: TPShard | None
    ) -> None:
        new = partial(new_weight, device=device, dtype=dtype)
        matrix = partial(self.matrix, device=device, dtype=dtype)
        self.spec, self.index, self.shard = spec, index, shard
        self.window, self.scale, self.rope_table = spec.window(index), spec.attention_scale, spec.rope_table(index)
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.sizes, inner = [queries, keys, keys], [spec.intermediate] * 2
        self.qkv = matrix([sum(self.sizes)] if spec.design.fused_qkv else self.sizes, spec.hidden)
        self.out, self.down = matrix([spec.hidden], queries), matrix([spec.hidden], spec.intermediate)
        self.gate_up = matrix([sum(inner)] if spec.design.fused_gate_up else inner, spec.hidden)
        self.qkv_bias = new(queries + 2 * keys) if spec.qkv_bias else None
        self.out_bias = new(spec.hidden) if spec.out_bias else None
        self.gate_up_bias = new(2 * spec.intermediate) if spec.mlp_bias else None
        self.down_bias = new(spec.hidden) if spec.mlp_bias else None
        self.norms = [new(spec.hidden) if name else None for name in spec.design.norms]
        widths = (queries, keys) if spec.design.qk_norm_over_heads else (spec.head_dim, spec.head_dim)
        self.qk_norms: QKNorms = (new(widths[0]), new(widths[1])) if spec.qk_norm else None

    def canonical(self) -> dict[str, Matrix]:
        """Views of the weights under their Hugging Face names."""
        design, prefix = self.spec.design, f"model.layers.{self.index}."
        q_norm, k_norm = self.qk_norms or (None, None)
        names: dict[str, Matrix | None] = {
            **{f"{name}.weight": norm for name, norm in zip(design.norms, self.norms, strict=True)},
            "self_attn.q_norm.weight": q_norm,
            "self_attn.k_norm.weight": k_norm,
            "self_attn.o_proj.weight": self.out,
            "self_attn.o_proj.bias": self.out_bias,
            "mlp.down_proj.weight": self.down,
            "mlp.down_proj.bias": self.down_bias,
        }
        for kind, qkv, gate_up in (("weight", self.qkv, self.gate_up), ("bias", self.qkv_bias, self.gate_up_bias)):
            if qkv is not None and design.fused_qkv:
                names[f"self_attn.qkv_proj.{kind}"] = qkv
            elif qkv is not None:
                parts = qkv.split(self.sizes)
                names |= {f"self_attn.{n}_proj.{kind}": part for n, part in zip("qkv", parts, strict=True)}
            if gate_up is not None and design.fused_gate_up:
                names[f"mlp.gate_up_proj.{kind}"] = gate_up
            elif gate_up is not None:
                gate, up = gate_up.split([self.spec.intermediate] * 2)
                names |= {f"mlp.gate_proj.{kind}": gate, f"mlp.up_proj.{kind}": up}
        return {prefix + name: value for name, value in names.items() if value is not None}

    def forward(self, stream: Stream, at: TokenPositions, ops: Operations, kv: Tensor, attend: Attend) -> None:
        x, q = stream.x, self.store(stream, at, ops, kv)
        attended = attend(kv, q, self.window, self.scale).flatten(1)
        self.add(x, attended, self.out, self.out_bias, self.norms[1], ops)
        gate_up = F.linear(self.normed(x, 2, ops), self.gate_up, self.gate_up_bias)
        self.add(x, ops.activate(gate_up), self.down, self.down_bias, self.norms[3], ops)

    def store(self, stream: Stream, at: TokenPositions, ops: Operations, kv: Tensor) -> Tensor:
        """Return the queries; keys and values are stored in the cache."""
        return self.rotated(F.linear(self.normed(stream.x, 0, ops), self.qkv, self.qkv_bias), at, ops, kv)

    def rotated(self, qkv: Tensor, at: TokenPositions, ops: Operations, kv: Tensor) -> Tensor:
        norms = self.qk_norms
        if self.spec.design.qk_norm_over_heads:
            for part, weight in zip(qkv.split(self.sizes, dim=1), norms or (), strict=False):
                part.copy_(ops.norm(part.contiguous(), weight))
            norms = None
        return ops.rotate_and_store(qkv, at, norms, kv, self.rope_table)

    def normed(self, x: Tensor, place: int, ops: Operations) -> Tensor:
        """`x` after the norm at one of the four places of `BlockDesign.norms`, if there is one."""
        weight = self.norms[place]
        return x if weight is None else ops.norm(x, weight)

    def add(
        self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, ops: Operations
    ) -> None:
        """x += norm(y @ weight.T + bias)"""
        if norm is None:
            return add_product(x, y, weight, bias, self.shard)
        y = F.linear(y, weight)
        if self.shard is not None:
            y = self.shard.sum_(y)
        x.add_(ops.norm(y if bias is None else y.add_(bias), norm))


class Fp8Layer(FusedLayer):
    """With products in 8 bits."""

    matrix = staticmethod(Fp8Matrix.zeros)
    qkv: Fp8Matrix
    out: Fp8Matrix
    gate_up: Fp8Matrix
    down: Fp8Matrix

    def __init__(self, spec: ModelSpec, index: int, device: torch.device, *rest: Any) -> None:
        super().__init__(spec, index, device, *rest)
        self.value_scale = torch.zeros(1, device=device) if self.norms[0] is not None else None

    def weights_changed(self) -> None:
        """Compute the scale of the values and of their means."""
        norm = self.norms[0]
        if self.value_scale is None or norm is None:
            return
        bias = None if self.qkv_bias is None else self.qkv_bias[-self.sizes[2] :]
        largest = self.qkv.largest_output(self.sizes[2], norm + self.spec.design.norm_offset, bias)
        self.value_scale.copy_(largest.clamp(min=LEAST) / LARGEST)

    def forward(self, stream: Stream, at: TokenPositions, ops: Fp8Operations, kv: Tensor, attend: Attend) -> None:  # type: ignore[override]
        q = self.store(stream, at, ops, kv)
        if self.value_scale is not None and isinstance(attend, QuantizingAttend):
            attended = attend.quantized(kv, q, self.window, self.scale, self.value_scale)
        else:
            attended = ops.quantized_norm(attend(kv, q, self.window, self.scale).flatten(1), None, None)
        self.add(stream, self.out.product(attended, self.out_bias), self.norms[1], ops)
        gate_up = self.gate_up.product(self.quantized(stream, 2, ops), self.gate_up_bias)
        down = self.down.product(ops.quantized_activation(gate_up), self.down_bias)
        self.add(stream, down, self.norms[3], ops)

    def store(self, stream: Stream, at: TokenPositions, ops: Fp8Operations, kv: Tensor) -> Tensor:  # type: ignore[override]
        qkv = self.qkv.product(self.quantized(stream, 0, ops), self.qkv_bias)
        if self.spec.design.qk_norm_over_heads:
            return self.rotated(qkv.tensor(), at, ops, kv)
        return ops.rotate_and_store(qkv, at, self.qk_norms, kv, self.rope_table)

    def quantized(self, stream: Stream, place: int, ops: Fp8Operations) -> Quantized:
        added, stream.added = stream.added, None
        return ops.quantized_norm(stream.x, added, self.norms[place])

    def add(self, stream: Stream, y: Scaled, norm: Tensor | None, ops: Fp8Operations) -> None:  # type: ignore[override]
        if norm is None:
            stream.added = y
        else:
            stream.x.add_(ops.norm(y.tensor(), norm))


class RunsLayers(Protocol):
    def forward(self, layer: FusedLayer, x: Tensor, at: TokenPositions, kv: Tensor, attend: Attend) -> None:
        """`FusedLayer.forward`, in other kernels."""


class FusedDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        ops: Operations,
        device: torch.device,
        dtype: torch.dtype,
        shard: TPShard | None = None,
        quantize: str = "",
    ) -> None:
        """With `shard`, `spec` has the heads and MLP of this rank, and the whole vocabulary. `quantize`: see
        `EngineOptions`.
        """
        self.spec, self.ops, self.shard = spec, ops, shard
        tokens = spec.vocab_size if self.shard is None else self.shard.tokens
        self.embedding = new_weight(tokens, spec.hidden, device=device, dtype=dtype)
        self.head: Tensor | Fp8Head = self.embedding
        if quantize == "fp8_head":
            self.head = Fp8Head(tokens, spec.hidden, device)
        elif not spec.tied:
            self.head = torch.zeros_like(self.embedding)
        self.norm = torch.zeros(spec.hidden, device=device, dtype=dtype)
        self.scale = embedding_scale(spec, dtype) if spec.design.scaled_embedding else None
        layer = Fp8Layer if quantize else FusedLayer
        self.layers = [layer(spec, index, device, dtype, shard) for index in range(spec.layers)]

    def canonical(self) -> dict[str, Matrix]:
        """Every weight once, under its Hugging Face name, as a view of the served weights."""
        names: dict[str, Matrix] = {EMBEDDING: self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tied:
            names[HEAD] = self.head
        for layer in self.layers:
            names |= layer.canonical()
        return names

    def weights_changed(self) -> None:
        """To be called after the weights were copied."""
        if self.spec.tied and isinstance(self.head, Fp8Head):
            self.head.copy_(self.embedding)
        for layer in self.layers:
            if isinstance(layer, Fp8Layer):
                layer.weights_changed()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every full weight, one at a time, quantized ones with their scales. All ranks of a group must iterate
        together.
        """
        served = self.canonical() | ({HEAD: self.head} if isinstance(self.head, Fp8Head) else {})
        for name, weight in served.items():
            if isinstance(weight, Tensor):
                yield name, weight if self.shard is None else self.shard.full(name, weight)
            else:
                yield from named(name, weight.codes, weight.scales)

    def forward(
        self, ids: Tensor, at: TokenPositions, kv: Tensor, attend: Attend, runner: RunsLayers | None = None
    ) -> Tensor:
        """Hidden states [N, D] of token ids [N]; their keys and values are stored in the cache.

        `runner`: runs the layers instead of themselves.
        """
        stream = Stream(self.embed(ids))
        for layer, cache in zip(self.layers, kv, strict=True):
            if runner is None:
                layer.forward(stream, at, self.ops, cache, attend)
            else:
                runner.forward(layer, stream.x, at, cache, attend)
        if stream.added is None:
            return self.ops.norm(stream.x, self.norm)
        return cast(Fp8Operations, self.ops).norm_of_sum(stream.x, stream.added, self.norm)

    def fill(self, ids: Tensor, at: TokenPositions, kv: Tensor, attend: Attend) -> None:
        """Only store keys and values: the rest of the last layer is not computed."""
        stream = Stream(self.embed(ids))
        for layer, cache in zip(self.layers[:-1], kv, strict=False):
            layer.forward(stream, at, self.ops, cache, attend)
        self.layers[-1].store(stream, at, self.ops, kv[-1])

    def embed(self, ids: Tensor) -> Tensor:
        if self.shard is None:
            x = F.embedding(ids, self.embedding)
        else:
            rows, here = own_rows(ids, self.shard.first_token, self.shard.tokens)
            x = self.shard.sum_(F.embedding(rows, self.embedding).masked_fill_(~here[:, None], 0.0))
        return x if self.scale is None else x.mul_(self.scale)

    def unembed(self, hidden: Tensor) -> Tensor:
        if isinstance(self.head, Fp8Head):
            return self.head.logits(cast(Fp8Operations, self.ops).quantized_norm(hidden, None, None))
        logits = F.linear(hidden, self.head)
        return logits if self.shard is None else self.shard.gather(logits, 1, self.spec.vocab_size)


def add_product(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, shard: TPShard | None) -> None:
    """x += y @ weight.T (+ bias): one operation if there is no bias and a single rank."""
    if shard is not None:
        x.add_(shard.sum_(F.linear(y, weight)))
        if bias is not None:
            x.add_(bias)
    elif bias is None:
        x.addmm_(y, weight.t())
    else:
        x.add_(F.linear(y, weight, bias))
