"""How much memory the cache may take."""

from __future__ import annotations

import torch

from assay.engine.columns import BLOCK_SIZE
from assay.models.device import free_memory
from assay.models.spec import ModelSpec
from assay.types import UserError

GIB = 2**30
UNKNOWN = 8 * GIB  # free memory of a machine that does not say
SHARE = {"cuda": 0.4, "cpu": 0.25}  # of the memory that is free, where no budget is given


def cache_blocks(
    spec: ModelSpec, max_batch: int, max_length: int, device: torch.device, dtype: torch.dtype, budget: float
) -> int:
    """Blocks of the cache: within `budget` GiB; 0: as many as `max_batch` sequences can use, within what is free."""
    block_bytes = spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize * BLOCK_SIZE
    if budget > 0:
        blocks = int(budget * GIB) // block_bytes
        if blocks < 1:
            raise UserError(
                f"engine.memory = {budget:g} GiB holds less than one block of the cache ({block_bytes} bytes): raise it"
            )
        return blocks
    useful = max_batch * -(-max_length // BLOCK_SIZE)
    free = free_memory(device) or UNKNOWN
    return max(1, min(useful, int(free * SHARE.get(device.type, SHARE["cpu"])) // block_bytes))
