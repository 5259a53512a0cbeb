"""A fingerprint of weights: equal if and only if (short of a collision) every bit of every weight is equal.

It is exact integer arithmetic, so it does not depend on device, thread count or order of summation, and costs one pass.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

# Eight bytes are seen as two words: products below wrap at 64 bits, where the top bit of a 64-bit word could get lost.
INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
CHUNK = 1 << 20  # words that have a sum of their own; small enough for a CPU's caches
AT_ONCE = 16  # chunks, where starting an operation costs more than its intermediate results


def fingerprint(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """The fingerprint of named weights, as they are or as they would be after a cast to `dtype`."""
    found = digests(weights, dtype)
    text = "".join(f"{found[name]};" for name in sorted(found))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """Of each named weight: its name, shape, dtype and a number that stands for all of its bits."""
    headings: dict[str, str] = {}
    sums: dict[str, Tensor] = {}
    for name, weight in weights:  # one at a time: whole ones may be gathered from many ranks just for this
        value = weight.detach()
        if dtype is not None:
            value = value.to(dtype)
        headings[name] = f"{name}:{tuple(value.shape)}:{value.dtype}"
        sums[name] = chunk_sums(value, 1 if value.device.type == "cpu" else AT_ONCE)
    # Waits for each device once: moments may be on another one than the counts of their steps.
    by_device: dict[torch.device, list[str]] = defaultdict(list)
    for name, values in sums.items():
        by_device[values.device].append(name)
    found: dict[str, str] = {}
    for names in by_device.values():
        numbers = iter(torch.cat([sums[name] for name in names]).tolist())
        found |= {name: f"{headings[name]}:{combined(islice(numbers, len(sums[name])))}" for name in names}
    return found


def chunk_sums(value: Tensor, at_once: int) -> Tensor:
    """For each chunk the sum of the raw bits, each multiplied by an odd number that depends on its place."""
    bits = value.contiguous().flatten().view(INTEGER_VIEWS[value.element_size()])
    factors = multipliers(bits.device)
    whole = bits.numel() // CHUNK * CHUNK
    parts = list(bits[:whole].view(-1, CHUNK).split(at_once))
    if whole < bits.numel() or not whole:
        parts.append(bits[whole:][None])
    return torch.cat([(part.to(torch.int64) * factors[: part.shape[1]]).sum(1) for part in parts])


def combined(sums: Iterable[int]) -> int:
    """Of the chunks of one weight, modulo 2**64."""
    total = 0
    for one in sums:
        total = (total * 0x5851F42D4C957F2D + one + 0x14057B7EF767814F) % 2**64
    return total


@lru_cache(maxsize=8)
def multipliers(device: torch.device) -> Tensor:
    place = torch.arange(1, CHUNK + 1, device=device) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01
    return (place ^ (place >> 29)) | 1
