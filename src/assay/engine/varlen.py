"""Attention of prompt chunks on CUDA at 16 bits: torch's variable-length kernel over keys gathered from the cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.engine.scheduler import Chunk


def find_varlen() -> Callable[..., Any] | None:
    """torch's own, where the build has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


varlen_attn = find_varlen()
PARAMETERS = set(inspect.signature(varlen_attn).parameters) if varlen_attn is not None else set()
# How causal attention is asked for has changed between versions of torch.
CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in PARAMETERS else {"is_causal": True}


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and varlen_attn is not None


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
        assert varlen_attn is not None
        kv_heads, head_dim = kv.shape[1], kv.shape[-1]
        keys, values = kv.view(2, kv_heads, -1, head_dim).index_select(2, self.slots).transpose(1, 2)
        options = dict(CAUSAL)
        if q.shape[1] != kv_heads:
            if "enable_gqa" in PARAMETERS:
                options["enable_gqa"] = True
            else:
                keys, values = (x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in (keys, values))
        return varlen_attn(q, keys, values, self.queries, self.keys, *self.most, **options)


def slots_of(chunk: Chunk, start: int, stop: int, block_size: int) -> np.ndarray:
    """Where tokens start .. stop of a sequence are in the cache."""
    positions = np.arange(start, stop)
    blocks = np.array(chunk.blocks, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size
