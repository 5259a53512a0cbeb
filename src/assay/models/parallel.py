"""Tensor parallelism of our decoder: each rank holds some of the heads, of the MLP and of the vocabulary.

Heads and MLP are split by output on the way in and by input on the way out, so that a block needs one exchange forward
and one backward (Shoeybi et al. 2019, arXiv:1909.08053). Ranks see the same tokens, and what is not split is computed
by each of them alike.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from assay.mesh import Mesh
from assay.models.collectives import copy_to, local, reduce_from
from assay.models.decoder import Decoder, Norm
from assay.models.spec import ModelSpec
from assay.models.vocab_parallel import VocabularyEmbedding, VocabularyHead
from assay.types import UserError


class Part(nn.Module):
    """A linear layer or norm of which this rank holds the slice along `dim` of the weight, or all of it (None)."""

    dim: int | None = None
    bias_dim: int | None = None

    def __init__(self, whole: nn.Linear | Norm, mesh: Mesh) -> None:
        super().__init__()
        assert mesh.tp_group is not None
        self.group = mesh.tp_group
        self.weight = split(whole.weight, mesh, self.dim)
        bias = getattr(whole, "bias", None)
        self.bias = None if bias is None else split(bias, mesh, self.bias_dim)
        self.eps = getattr(whole, "eps", 0.0)


class ColumnLinear(Part):
    """Gives this rank's outputs."""

    dim = bias_dim = 0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


class RowLinear(Part):
    """Takes this rank's inputs; the outputs are summed, and the bias is added once."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        out = reduce_from(F.linear(x, local(self.weight)), self.group)
        return out if self.bias is None else out + local(self.bias).to(out.dtype)


class WholeNorm(Part):
    """A norm that every rank computes alike."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), local(self.weight).to(x.dtype), self.eps)


class EntryNorm(WholeNorm):
    """The norm before a split block. One exchange here serves all projections that read from it."""

    def forward(self, x: Tensor) -> Tensor:
        return copy_to(super().forward(x), self.group)


class HeadNorm(Part):
    """One weight for all heads, of which each rank sees its own only."""

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to(local(self.weight), self.group)
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), self.eps)


def shard_decoder(decoder: Decoder, mesh: Mesh) -> None:
    """Leave this rank its part of the decoder. All ranks must hold the same weights; names stay as they are."""
    check_sizes(decoder.spec, mesh.tp_size)
    for layer in decoder.model.layers:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            swap(layer, norm, EntryNorm, mesh)
        for projection in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            swap(layer, projection, ColumnLinear, mesh)
        for projection in ("self_attn.o_proj", "mlp.down_proj"):
            swap(layer, projection, RowLinear, mesh)
        if decoder.spec.qk_norm:
            swap(layer, "self_attn.q_norm", HeadNorm, mesh)
            swap(layer, "self_attn.k_norm", HeadNorm, mesh)
    swap(decoder, "model.norm", WholeNorm, mesh)
    table = split(decoder.model.embed_tokens.weight, mesh, 0)
    head = table if decoder.spec.tied else split(decoder.lm_head.weight, mesh, 0)
    assert mesh.tp_group is not None
    setattr(decoder.model, "embed_tokens", VocabularyEmbedding(table, mesh.tp_rank, mesh.tp_group))  # noqa: B010
    setattr(decoder, "lm_head", VocabularyHead(head, mesh.tp_rank, mesh.tp_group))  # noqa: B010


def swap(module: nn.Module, name: str, kind: type[Part], mesh: Mesh) -> None:
    owner, _, last = name.rpartition(".")
    parent = module.get_submodule(owner)
    setattr(parent, last, kind(getattr(parent, last), mesh))


def split(weight: Tensor, mesh: Mesh, dim: int | None) -> nn.Parameter:
    """The weight as a DTensor: each rank keeps a copy of its slice along `dim`, so that the whole can be freed."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert mesh.device_mesh is not None
    whole = weight.detach()
    placement = Replicate() if dim is None else Shard(dim)
    mine = whole if dim is None else whole.chunk(mesh.tp_size, dim)[mesh.tp_rank].clone()
    parts = DTensor.from_local(
        mine, mesh.device_mesh["tp"], [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return nn.Parameter(parts, requires_grad=weight.requires_grad)


def check_sizes(spec: ModelSpec, tp: int) -> None:
    """Heads and MLP must divide evenly. The vocabulary need not, as long as every rank gets some of it."""
    sizes = {"attention heads": spec.heads, "key-value heads": spec.kv_heads, "MLP units": spec.intermediate}
    most = math.gcd(*sizes.values())
    fitting = [str(size) for size in range(1, most + 1) if most % size == 0]
    for what, size in sizes.items():
        if size % tp:
            raise UserError(
                f"parallel.tp = {tp} does not divide the {size} {what} of this model: choose {' or '.join(fitting)}"
            )
    if -(-spec.vocab_size // tp) * (tp - 1) >= spec.vocab_size:
        raise UserError(f"parallel.tp = {tp} is too much for a vocabulary of {spec.vocab_size} tokens: lower it")
