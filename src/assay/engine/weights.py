"""Filling an engine's own weights, in place and by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from assay.engine.shares import Shares
from assay.types import UserError


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
