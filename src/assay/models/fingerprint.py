"""A fingerprint of weights: equal if and only if (short of a collision) every bit of every weight is equal.

It is exact integer arithmetic, so it does not depend on device, thread count or order of summation, and costs one pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

# Eight bytes are seen as two words: products below wrap at 64 bits, where the top bit of a 64-bit word could get lost.
INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
CHUNK = 1 << 20  # words; small enough for the caches, and one table of multipliers serves every chunk


def fingerprint(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """The fingerprint of named weights, as they are or as they would be after a cast to `dtype`."""
    found: dict[str, str] = {}  # one weight at a time: whole ones may be gathered from many ranks just for this
    for name, weight in weights:
        value = weight.detach()
        if dtype is not None:
            value = value.to(dtype)
        found[name] = f"{name}:{tuple(value.shape)}:{value.dtype}:{tensor_sum(value)};"
    text = "".join(found[name] for name in sorted(found))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tensor_sum(value: Tensor) -> int:
    """Sum of the raw bits, each multiplied by an odd number that depends on its place, modulo 2**64."""
    bits = value.contiguous().flatten().view(INTEGER_VIEWS[value.element_size()])
    factors = multipliers(min(CHUNK, bits.numel()), bits.device)
    sums = [(part.to(torch.int64) * factors[: part.numel()]).sum() for part in bits.split(CHUNK)]
    total = 0
    for part_sum in torch.stack(sums).tolist() if sums else []:
        total = (total * 0x5851F42D4C957F2D + part_sum + 0x14057B7EF767814F) % 2**64
    return total


@lru_cache(maxsize=8)
def multipliers(count: int, device: torch.device) -> Tensor:
    place = torch.arange(1, count + 1, device=device) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01
    return (place ^ (place >> 29)) | 1
