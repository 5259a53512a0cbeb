"""torch's attention over sequences of different lengths, one behind the other: on CUDA, at 16 bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def find_varlen() -> Callable[..., Any] | None:
    """Where the build of torch has it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


varlen_attn = find_varlen()
PARAMETERS = set(inspect.signature(varlen_attn).parameters) if varlen_attn is not None else set()
# How causal attention and shared key heads are asked for has changed between versions of torch.
CAUSAL: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in PARAMETERS else {"is_causal": True}


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and varlen_attn is not None


def varlen_attention(
    q: Tensor, keys: Tensor, values: Tensor, queries_at: Tensor, keys_at: Tensor, most: tuple[int, int]
) -> Tensor:
    """Causal, aligned at the ends of sequences, which begin at `queries_at` and `keys_at` (int32, ends included).

    q [N, H, d], keys and values [M, K, d]; `most`: queries and keys that a sequence has.
    """
    assert varlen_attn is not None
    options = dict(CAUSAL)
    if q.shape[1] != keys.shape[1]:
        if "enable_gqa" in PARAMETERS:
            options["enable_gqa"] = True
        else:
            keys, values = (x.repeat_interleave(q.shape[1] // keys.shape[1], dim=1) for x in (keys, values))
    return varlen_attn(q, keys, values, queries_at, keys_at, *most, **options)
