"""Attention of prompt chunks on CUDA at 16 bits: torch's variable-length kernel over keys gathered from the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from assay.engine.scheduler import Chunk
from assay.models.varlen import varlen_attention


class VarlenAttention:
    """Queries of several chunks, one behind the other, each over all that comes before it in its own sequence."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, upload: Callable[[np.ndarray], Tensor]) -> None:
        queries = [0, *np.cumsum([chunk.stop - chunk.start for chunk in chunks])]
        keys = [0, *np.cumsum([chunk.stop for chunk in chunks])]
        self.most = max(chunk.stop - chunk.start for chunk in chunks), max(chunk.stop for chunk in chunks)
        slots = np.concatenate([slots_of(chunk, 0, chunk.stop, block_size) for chunk in chunks])
        host = [np.array(queries, dtype=np.int32), np.array(keys, dtype=np.int32), slots]
        self.queries, self.keys, self.slots = (upload(values) for values in host)

    def __call__(self, kv: Tensor, q: Tensor) -> Tensor:
        keys, values = kv.view(2, kv.shape[1], -1, kv.shape[-1]).index_select(2, self.slots).transpose(1, 2)
        return varlen_attention(q, keys, values, self.queries, self.keys, self.most)


def slots_of(chunk: Chunk, start: int, stop: int, block_size: int) -> np.ndarray:
    """Where tokens start .. stop of a sequence are in the cache."""
    positions = np.arange(start, stop)
    blocks = np.array(chunk.blocks, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size
