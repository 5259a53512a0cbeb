"""Tensor parallelism: what one rank of a group holds of a model, and how the ranks put their parts together.

The rule is that of `assay.models.parallel`: heads and MLP are split by output on the way in and by input on the way
out, the vocabulary into runs of tokens of which the last may be shorter. So a layer needs two sums over the ranks, the
embedding one more, and logits are gathered. (A whole embedding on every rank would save its sum, and cost the memory of
all ranks but one; where the head is tied to it, it would have to be split anyway.)

Filling an engine's own weights, in place and by name.

The small operations of a layer, between its products: in torch for any device, in Triton for CUDA, in C for CPUs.

The decoder as the engine runs it: the function of `assay.models.decoder.Decoder`, in fewer and larger operations.

Queries, keys and values come from one product, gate and up from another. The canonical weights, by their Hugging Face
names, are views of rows of the fused ones: filling the views fills the network, and the fingerprint reads what is
really served. With a tensor-parallel group all of this is one rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from assay.models.decoder import rope_frequencies
from assay.models.device import uses_triton
from assay.models.parallel import check_sizes, own_rows
from assay.models.spec import ModelSpec
from assay.types import UserError

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # weights and biases
BY_INPUT = ("o_proj", "down_proj")  # weights; each rank has all of the bias, which is added once, after the sum


def split_along(name: str) -> int | None:
    """The dimension along which a weight is split, by its Hugging Face name; None: every rank holds all of it."""
    layer, kind = name.split(".")[-2:]
    if name in VOCABULARY or layer in BY_OUTPUT:
        return 0
    return 1 if layer in BY_INPUT and kind == "weight" else None


class Shares:
    """Of a whole model's `spec` and weights, those of this rank."""

    def __init__(self, spec: ModelSpec, group: dist.ProcessGroup) -> None:
        check_sizes(spec, group.size())
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.vocabulary = spec.vocab_size
        most = -(-spec.vocab_size // self.ranks)
        self.first_token = most * self.rank
        self.tokens = min(most, spec.vocab_size - self.first_token)
        self.spec = replace(
            spec,
            heads=spec.heads // self.ranks,
            kv_heads=spec.kv_heads // self.ranks,
            intermediate=spec.intermediate // self.ranks,
        )

    def take(self, name: str, weight: Tensor) -> Tensor:
        """This rank's part of a whole weight."""
        dim = split_along(name)
        return weight if dim is None else weight.chunk(self.ranks, dim)[self.rank]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The weight of which this is a part. All ranks must ask for it together."""
        dim = split_along(name)
        return part if dim is None else self.gather(part, dim, self.whole_shape(name, part)[dim])

    def whole_shape(self, name: str, part: Tensor) -> Sequence[int]:
        shape, dim = list(part.shape), split_along(name)
        if dim is not None:
            shape[dim] = self.vocabulary if name in VOCABULARY else shape[dim] * self.ranks
        return shape

    def sum_(self, x: Tensor) -> Tensor:
        """Adds up over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, part: Tensor, dim: int, size: int) -> Tensor:
        """What lies on all ranks, `size` along `dim`: the very same bits on each of them."""
        most = -(-size // self.ranks)
        missing = most - part.shape[dim]
        if missing:  # ranks have to send equally much
            part = F.pad(part, [0, 0] * (part.dim() - 1 - dim) + [0, missing])
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        parts[-1] = parts[-1].narrow(dim, 0, size - most * (self.ranks - 1))
        return torch.cat(parts, dim)


@torch.inference_mode(False)  # a source may do more than read tensors, e.g. gather shards
@torch.no_grad()
def copy_weights(
    targets: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], shares: Shares | None = None
) -> None:
    """Copy every weight onto the target of its name, casting as needed; names and shapes have to match exactly.

    With `shares` targets are this rank's parts of the whole weights that come.
    """
    missing = set(targets)
    for name, weight in weights:
        target = targets.get(name)
        if target is None:
            raise UserError(f"the engine's model has no weight '{name}': is this another model's checkpoint?")
        shape = tuple(target.shape if shares is None else shares.whole_shape(name, target))
        if shape != weight.shape:
            raise UserError(f"weight '{name}' has shape {tuple(weight.shape)}, the engine's model has {shape}")
        target.copy_(weight if shares is None else shares.take(name, weight))
        missing.discard(name)
    if missing:
        raise UserError(f"weight '{min(missing)}' was not given to the engine ({len(missing)} missing in all)")


@dataclass(slots=True)
class Places:
    """Where tokens stand: position in their sequence, and slot in the cache (-1: it is there already)."""

    positions: Tensor  # [N]
    slots: Tensor  # [N]
    cos: Tensor | None = None  # [N, 1, d], where torch does the rotation
    sin: Tensor | None = None


class Operations(Protocol):
    def places(self, positions: Tensor, slots: Tensor) -> Places: ...
    def norm(self, x: Tensor, weight: Tensor) -> Tensor: ...
    def activate(self, gate_up: Tensor) -> Tensor: ...
    def rotate_and_store(
        self, qkv: Tensor, places: Places, q_norm: Tensor | None, k_norm: Tensor | None, kv: Tensor
    ) -> Tensor:
        """Queries [N, H, d], rotated; keys and values go into a layer's cache [2, K, blocks, block size, d]."""
        ...


def operations(spec: ModelSpec, max_length: int, device: torch.device, dtype: torch.dtype) -> Operations:
    angles = torch.arange(max_length, device=device)[:, None].float() * rope_frequencies(spec).to(device)
    if uses_triton(device):
        return TritonOperations(spec, torch.cat((angles.cos(), angles.sin()), dim=-1))
    from assay.engine.native.compiled import CompiledOperations, library_for

    if found := library_for(device, dtype):
        return CompiledOperations(spec, angles, found)
    return TorchOperations(spec, angles, dtype)


class TorchOperations:
    def __init__(self, spec: ModelSpec, angles: Tensor, dtype: torch.dtype) -> None:
        self.spec = spec
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1)[:, None].to(dtype)
        self.sin = torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def places(self, positions: Tensor, slots: Tensor) -> Places:
        return Places(positions, slots, self.cos[positions], self.sin[positions])

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.spec.norm_eps)

    def activate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotate_and_store(
        self, qkv: Tensor, places: Places, q_norm: Tensor | None, k_norm: Tensor | None, kv: Tensor
    ) -> Tensor:
        heads, kv_heads, size = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv = qkv.view(-1, heads + 2 * kv_heads, size)
        turned = qkv[:, : heads + kv_heads]
        if q_norm is not None and k_norm is not None:
            scales = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
            turned = F.rms_norm(turned, (size,), None, self.spec.norm_eps) * scales
        assert places.cos is not None and places.sin is not None
        turned = torch.addcmul(turned * places.cos, turned.roll(size // 2, dims=-1), places.sin)
        # A slot of -1 is the cache's very last, in a block that is nobody's.
        slots = kv.view(2, kv_heads, -1, size)
        slots[0].index_copy_(1, places.slots % slots.shape[2], turned[:, heads:].transpose(0, 1))
        slots[1].index_copy_(1, places.slots % slots.shape[2], qkv[:, heads + kv_heads :].transpose(0, 1))
        return turned[:, :heads]


class TritonOperations:
    def __init__(self, spec: ModelSpec, rotations: Tensor) -> None:
        from assay.engine.native.kernels import layers

        self.spec, self.rotations, self.kernels = spec, rotations, layers

    def places(self, positions: Tensor, slots: Tensor) -> Places:
        return Places(positions, slots)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.spec.norm_eps)

    def activate(self, gate_up: Tensor) -> Tensor:
        return self.kernels.silu_mul(gate_up)

    def rotate_and_store(
        self, qkv: Tensor, places: Places, q_norm: Tensor | None, k_norm: Tensor | None, kv: Tensor
    ) -> Tensor:
        return self.kernels.rope_store(
            qkv, places.positions, places.slots, self.rotations, q_norm, k_norm, self.spec.norm_eps, kv
        )


SMALL = 2**18  # numbers, which the cache of one core holds

# (a layer's cache [2, K, blocks, block size, d], queries [N, H, d]) -> [N, H, d]
Attend = Callable[[Tensor, Tensor], Tensor]


class FusedLayer:
    def __init__(
        self, spec: ModelSpec, index: int, device: torch.device, dtype: torch.dtype, shares: Shares | None
    ) -> None:
        new = partial(new_weight, device=device, dtype=dtype)
        self.spec, self.index, self.shares = spec, index, shares
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
        """Views under their Hugging Face names."""
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

    def forward(self, x: Tensor, places: Places, ops: Operations, kv: Tensor, attend: Attend) -> Tensor:
        q = self.store(x, places, ops, kv)
        x = residual(x, attend(kv, q).flatten(1), self.out, self.out_bias, self.shares)
        gate_up = F.linear(ops.norm(x, self.mlp_norm), self.gate_up, self.gate_up_bias)
        return residual(x, ops.activate(gate_up), self.down, self.down_bias, self.shares)

    def store(self, x: Tensor, places: Places, ops: Operations, kv: Tensor) -> Tensor:
        """Queries; keys and values go into the cache."""
        qkv = F.linear(ops.norm(x, self.input_norm), self.qkv, self.qkv_bias)
        return ops.rotate_and_store(qkv, places, self.q_norm, self.k_norm, kv)


class FusedDecoder:
    def __init__(
        self,
        spec: ModelSpec,
        max_length: int,
        device: torch.device,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`spec` is that of the whole model; `self.spec` has this rank's heads and MLP, and all of the vocabulary."""
        self.shares = None if group is None else Shares(spec, group)
        self.spec = spec = spec if self.shares is None else self.shares.spec
        tokens = spec.vocab_size if self.shares is None else self.shares.tokens
        self.ops = operations(spec, max_length, device, dtype)
        self.embedding = new_weight(tokens, spec.hidden, device=device, dtype=dtype)
        self.head = self.embedding if spec.tied else torch.zeros_like(self.embedding)
        self.norm = torch.zeros(spec.hidden, device=device, dtype=dtype)
        self.layers = [FusedLayer(spec, index, device, dtype, self.shares) for index in range(spec.layers)]

    def canonical(self) -> dict[str, Tensor]:
        """Every weight once, under its Hugging Face name, as a view of what is served."""
        names = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.spec.tied:
            names["lm_head.weight"] = self.head
        for layer in self.layers:
            names |= layer.canonical()
        return names

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, one at a time; of a group all ranks must ask together."""
        for name, weight in self.canonical().items():
            yield name, weight if self.shares is None else self.shares.whole(name, weight)

    def forward(self, ids: Tensor, places: Places, kv: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, D] for token ids [N]; their keys and values are left in the cache."""
        x = self.embed(ids)
        for layer, cache in zip(self.layers, kv, strict=True):
            x = layer.forward(x, places, self.ops, cache, attend)
        return self.ops.norm(x, self.norm)

    def fill(self, ids: Tensor, places: Places, kv: Tensor, attend: Attend) -> None:
        """Keys and values alone: nothing behind those of the last layer is computed."""
        x = self.embed(ids)
        for layer, cache in zip(self.layers[:-1], kv, strict=False):
            x = layer.forward(x, places, self.ops, cache, attend)
        self.layers[-1].store(x, places, self.ops, kv[-1])

    def embed(self, ids: Tensor) -> Tensor:
        if self.shares is None:
            return F.embedding(ids, self.embedding)
        rows, here = own_rows(ids, self.shares.first_token, self.shares.tokens)
        return self.shares.sum_(F.embedding(rows, self.embedding).masked_fill_(~here[:, None], 0.0))

    def unembed(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden, self.head)
        return logits if self.shares is None else self.shares.gather(logits, 1, self.spec.vocab_size)


def new_weight(*shape: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros. Small matrices lie by columns on a CPU: our own products want that, and OpenBLAS would turn them round in
    every product. (Large ones lie by rows, as the product with a single row wants it.)
    """
    if device.type == "cpu" and dtype == torch.float32 and len(shape) == 2 and math.prod(shape) <= SMALL:
        return torch.zeros(shape[::-1], device=device, dtype=dtype).t()
    return torch.zeros(shape, device=device, dtype=dtype)


def residual(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, shares: Shares | None) -> Tensor:
    """x + y @ weight.T (+ bias), in place: in one operation where there is no bias, and one rank."""
    if shares is not None:
        x.add_(shares.sum_(F.linear(y, weight)))
        return x if bias is None else x.add_(bias)
    if bias is None:
        return x.addmm_(y, weight.t())
    return x.add_(F.linear(y, weight, bias))
