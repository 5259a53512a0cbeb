"""Tensor parallelism: what one rank of a group holds of a model, and how the ranks put their parts together.

The rule is that of `assay.models.parallel`: heads and MLP are split by output on the way in and by input on the way
out, the vocabulary into runs of tokens of which the last may be shorter. So a layer needs two sums over the ranks, the
embedding one more, and logits are gathered. (A whole embedding on every rank would save its sum, and cost the memory of
all ranks but one; where the head is tied to it, it would have to be split anyway.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from assay.models.parallel import check_sizes
from assay.models.spec import ModelSpec

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
