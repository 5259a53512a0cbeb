"""Tensor parallelism: which part of each weight a rank holds, and the decoder's layers for training with such parts.

Experimental: tested with several processes on CPUs (gloo), never on two GPUs.

Projections into attention and the MLP are split by output, projections out of them by input, so that each block needs
one all-reduce forward and one backward (Shoeybi et al. 2019, arXiv:1909.08053). The vocabulary is split into ranges of
consecutive tokens; the last range may be shorter. All ranks process the same tokens and compute unsplit weights
identically. `split_dim` is the only table of these rules: training and the native engine (`TPShard`) both use it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from assay.mesh import Mesh, copy_to, local_tensor, reduce_from
from assay.models.base import autocast_dtype
from assay.models.decoder import Decoder, Norm, rms_norm
from assay.models.logprobs import at_least_float32, gradient_of
from assay.models.spec import ModelSpec
from assay.types import UserError

VOCAB_PARALLEL = ("embed_tokens", "lm_head")
COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # split by output, weights and biases
ROW_PARALLEL = ("o_proj", "down_proj")  # weights split by input; the bias is replicated and added after the sum


def split_dim(name: str) -> int | None:
    """The dimension along which the weight of this Hugging Face name is split; None if every rank holds all of it."""
    module, kind = name.split(".")[-2:]
    if module in VOCAB_PARALLEL or module in COLUMN_PARALLEL:
        return 0
    return 1 if module in ROW_PARALLEL and kind == "weight" else None


def vocab_range(vocab_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """First token of a rank's part of the vocabulary, and the size of all parts but the last, which may be smaller."""
    size = -(-vocab_size // ranks)
    return size * rank, size


class TPShard:
    """One rank's part of a model for inference: its spec, its slices of weights, and the collectives to join parts."""

    def __init__(self, spec: ModelSpec, group: dist.ProcessGroup) -> None:
        check_sizes(spec, group.size())
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.first_token, most = vocab_range(spec.vocab_size, self.rank, self.ranks)
        self.tokens = min(most, spec.vocab_size - self.first_token)
        self.vocab_size = spec.vocab_size
        self.spec = replace(
            spec,
            heads=spec.heads // self.ranks,
            kv_heads=spec.kv_heads // self.ranks,
            intermediate=spec.intermediate // self.ranks,
        )

    def take(self, name: str, weight: Tensor) -> Tensor:
        """This rank's slice of a full weight."""
        dim = split_dim(name)
        return weight if dim is None else weight.chunk(self.ranks, dim)[self.rank]

    def full(self, name: str, part: Tensor) -> Tensor:
        """The full weight, gathered from the slices of all ranks. All ranks must call this together."""
        dim = split_dim(name)
        return part if dim is None else self.gather(part, dim, self.full_shape(name, part)[dim])

    def full_shape(self, name: str, part: Tensor) -> tuple[int, ...]:
        shape, dim = list(part.shape), split_dim(name)
        if dim is not None:
            shape[dim] = self.vocab_size if name.split(".")[-2] in VOCAB_PARALLEL else shape[dim] * self.ranks
        return tuple(shape)

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(x, group=self.group)
        return x

    def gather(self, part: Tensor, dim: int, size: int) -> Tensor:
        """The parts of all ranks, concatenated to `size` along `dim`: bitwise identical on all ranks."""
        most = -(-size // self.ranks)
        missing = most - part.shape[dim]
        if missing:  # all ranks must send the same size
            part = F.pad(part, [0, 0] * (part.dim() - 1 - dim) + [0, missing])
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        parts[-1] = parts[-1].narrow(dim, 0, size - most * (self.ranks - 1))
        return torch.cat(parts, dim)


class VocabularyPart(nn.Module):
    def __init__(self, weight: nn.Parameter, rank: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.group = weight, group
        self.first, self.most = vocab_range(weight.shape[0], rank, group.size())  # first token, tokens per rank


class VocabularyEmbedding(VocabularyPart):
    def forward(self, ids: Tensor) -> Tensor:
        table = local_tensor(self.weight)
        rows, here = own_rows(ids, self.first, len(table))
        return reduce_from(F.embedding(rows, table) * here[:, None].to(table.dtype), self.group)


class VocabularyHead(VocabularyPart):
    def forward(self, hidden: Tensor) -> Tensor:
        """Logits over the whole vocabulary, gathered from all ranks; `scores` needs no gathering."""
        logits = F.linear(copy_to(hidden, self.group), local_tensor(self.weight))
        before, after = self.first, self.weight.shape[0] - self.first - logits.shape[-1]
        return reduce_from(F.pad(logits, (before, after)), self.group)

    def scores(self, hidden: Tensor, targets: Tensor, temperature: float, logits_at_once: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [M] of `targets` [M] after `hidden` [M, D], a slice of them at a time."""
        table = local_tensor(self.weight)
        dtype = autocast_dtype(hidden)
        size = max(logits_at_once // self.most, 1)  # the same on all ranks
        hidden = copy_to(hidden, self.group)
        return _Scores.apply(hidden, table, targets, self.first, temperature, size, dtype, self.group)


class _Scores(torch.autograd.Function):
    """Logits are recomputed in the backward pass: only one slice of this rank's logits is ever in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        table: Tensor,
        targets: Tensor,
        first: int,
        temperature: float,
        size: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        weight = table.to(dtype)
        slices = [
            torch.stack(gathered_scores(F.linear(part.to(dtype), weight), target, temperature, first, group))
            for part, target in zip(hidden.split(size), targets.split(size), strict=True)
            if len(part)
        ]
        full = torch.float64 if dtype == torch.float64 else torch.float32
        logprobs, entropies, partition = torch.cat(slices, 1) if slices else hidden.new_zeros(3, 0, dtype=full)
        ctx.save_for_backward(hidden, table, targets, entropies, partition)
        ctx.first, ctx.temperature, ctx.size, ctx.dtype = first, temperature, size, dtype
        return logprobs.clone(), entropies.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, table, targets, entropies, partition = ctx.saved_tensors
        weight = table.to(ctx.dtype)
        hidden_grad = torch.empty_like(hidden)
        table_grad = torch.zeros_like(table, dtype=partition.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.size):
            at = slice(start, start + ctx.size)
            part = hidden[at].to(ctx.dtype)
            logits = F.linear(part, weight)
            columns, present = own_rows(targets[at], ctx.first, logits.shape[-1])
            scores = entropies[at], partition[at]
            upstream = grad_logprobs[at], grad_entropy[at]
            grad = gradient_of(logits, columns, ctx.temperature, *scores, *upstream, present)
            hidden_grad[at] = (grad @ weight).to(hidden.dtype)
            if table_grad is not None:
                table_grad += grad.T @ part
        table_grad = None if table_grad is None else table_grad.to(table.dtype)
        return hidden_grad, table_grad, None, None, None, None, None, None


def gathered_scores(
    logits: Tensor, targets: Tensor, temperature: float, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """`logprobs.scores_of` over the whole vocabulary, from each rank's logits [M, part] of the tokens from `first` on.

    The maximum over all ranks is subtracted first, so that partial sums can be added up.
    """
    logits = at_least_float32(logits) / temperature
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits -= top[:, None]
    rows, here = own_rows(targets, first, logits.shape[-1])
    chosen = logits.gather(-1, rows[:, None]).squeeze(-1).where(here, 0.0)
    probs = logits.exp()
    logits.masked_fill_(probs == 0, 0.0)  # as in `logprobs.scores_of`
    sums = torch.stack([probs.sum(-1), (probs * logits).sum(-1), chosen])
    dist.all_reduce(sums, group=group)
    total, weighted, chosen = sums
    return chosen - total.log(), total.log() - weighted / total, top + total.log()


def own_rows(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Indices of tokens within this rank's part of the vocabulary, and which tokens are in it; others are clamped."""
    rows = ids - first
    return rows.clamp(0, count - 1), (rows >= 0) & (rows < count)


class Part(nn.Module):
    """A linear layer or norm of which this rank holds a slice of the weights, or all of them (see `split_dim`)."""

    def __init__(self, whole: nn.Linear | Norm, name: str, mesh: Mesh) -> None:
        super().__init__()
        assert mesh.tp_group is not None
        self.group = mesh.tp_group
        self.weight = split(whole.weight, mesh, split_dim(f"{name}.weight"))
        bias = getattr(whole, "bias", None)
        self.bias = None if bias is None else split(bias, mesh, split_dim(f"{name}.bias"))
        self.eps, self.offset = getattr(whole, "eps", 0.0), getattr(whole, "offset", 0.0)


class ColumnLinear(Part):
    """Computes this rank's outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local_tensor(self.weight), None if self.bias is None else local_tensor(self.bias))


class RowLinear(Part):
    """Takes this rank's inputs; the outputs are summed, and the bias is added once."""

    def forward(self, x: Tensor) -> Tensor:
        out = reduce_from(F.linear(x, local_tensor(self.weight)), self.group)
        return out if self.bias is None else out + local_tensor(self.bias).to(out.dtype)


class WholeNorm(Part):
    """A norm that every rank computes identically."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local_tensor(self.weight), self.eps, self.offset)


class EntryNorm(WholeNorm):
    """The norm before a split block. One collective here serves all projections that read its output."""

    def forward(self, x: Tensor) -> Tensor:
        return copy_to(super().forward(x), self.group)


class HeadNorm(Part):
    """The norm of queries or keys: one weight for all heads, of which each rank computes its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to(local_tensor(self.weight), self.group)
        return rms_norm(x, weight, self.eps, self.offset)


def shard_decoder(decoder: Decoder, mesh: Mesh) -> None:
    """Replace the decoder's layers by this rank's parts, in place. All ranks must hold the same weights. Names stay."""
    check_sizes(decoder.spec, mesh.tp_size)
    for layer in decoder.model.layers:
        for name, kind in zip(decoder.spec.design.norms, (EntryNorm, WholeNorm, EntryNorm, WholeNorm), strict=True):
            if name:
                swap(layer, name, kind, mesh)
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                swap(layer, name, ColumnLinear if name.split(".")[-1] in COLUMN_PARALLEL else RowLinear, mesh)
        if decoder.spec.qk_norm:
            swap(layer, "self_attn.q_norm", HeadNorm, mesh)
            swap(layer, "self_attn.k_norm", HeadNorm, mesh)
    swap(decoder, "model.norm", WholeNorm, mesh)
    table = split(decoder.model.embed_tokens.weight, mesh, 0)
    head = table if decoder.spec.tied else split(decoder.lm_head.weight, mesh, 0)
    assert mesh.tp_group is not None
    decoder.set_submodule("model.embed_tokens", VocabularyEmbedding(table, mesh.tp_rank, mesh.tp_group))
    decoder.set_submodule("lm_head", VocabularyHead(head, mesh.tp_rank, mesh.tp_group))


def swap(module: nn.Module, name: str, kind: type[Part], mesh: Mesh) -> None:
    module.set_submodule(name, kind(module.get_submodule(name), name, mesh))  # type: ignore[arg-type]


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
    design = spec.design
    if tp > 1 and (design.fused_qkv or design.fused_gate_up or design.qk_norm_over_heads or not design.norms[0]):
        raise UserError(f"{spec.family} models cannot be split over ranks: set parallel.tp = 1")
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
