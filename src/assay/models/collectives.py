"""Exchanges between the ranks that hold one model together, as autograd sees them; and weights in parts.

A weight in parts is a DTensor. Forward passes compute with plain tensors: `local` gives this rank's part. (DTensor
itself is slow to import, so that nothing here names it.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight or gradient, or the thing itself where it is whole."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def whole(weight: Tensor) -> Tensor:
    """All of a weight. All ranks must ask for it together."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def gather_back(module: nn.Module) -> None:
    """FSDP leaves weights unsharded, in its computing dtype, after a forward pass without a backward pass."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def copy_to(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Where something that all ranks hold enters a computation that is split: its gradient is the sum of theirs."""
    return _CopyTo.apply(x, group)


def reduce_from(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Where a split computation ends: the sum over ranks, on all of them."""
    return _ReduceFrom.apply(x, group)
