"""Fingerprints of weights, to compare the weights of trainer and engine.

Imports torch and the standard library only: servers of other packages run a copy of this module (see
`integrations.vllm_worker`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

# Eight bytes are viewed as two words: products wrap at 64 bits, where the top bit of a 64-bit word could get lost.
INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
CHUNK = 1 << 20  # words per sum; small enough for the caches of a CPU
AT_ONCE = 16  # chunks per operation on a GPU, where launching an operation is expensive


def fingerprint(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> str:
    """The fingerprint of named weights, after a cast to `dtype` if given.

    Fingerprints are equal if and only if (except for collisions) every bit of every weight is equal. They use integer
    arithmetic in one pass, so they do not depend on device, thread count or order of summation.
    """
    return digest_of(digests(weights, dtype))


def digest_of(by_name: Mapping[str, str]) -> str:
    """The fingerprint of weights with these digests."""
    text = "".join(f"{by_name[name]};" for name in sorted(by_name))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def digests(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> dict[str, str]:
    """For each weight a text of its name, shape, dtype and a hash of its bits."""
    headings: dict[str, str] = {}
    sums: dict[str, Tensor] = {}
    for name, weight in weights:  # one at a time: sharded weights are gathered for this
        value = weight.detach()
        if dtype is not None:
            value = value.to(dtype)
        headings[name] = f"{name}:{tuple(value.shape)}:{value.dtype}"
        sums[name] = chunk_sums(value, 1 if value.device.type == "cpu" else AT_ONCE)
    # Synchronizes once per device: optimizer state may be on several.
    by_device: dict[torch.device, list[str]] = defaultdict(list)
    for name, values in sums.items():
        by_device[values.device].append(name)
    texts: dict[str, str] = {}
    for names in by_device.values():
        numbers = iter(torch.cat([sums[name] for name in names]).tolist())
        texts |= {name: f"{headings[name]}:{combined(islice(numbers, len(sums[name])))}" for name in names}
    return texts


def chunk_sums(value: Tensor, at_once: int) -> Tensor:
    """For each chunk the sum of its words, each multiplied by an odd number that depends on its position."""
    bits = value.contiguous().flatten().view(INTEGER_VIEWS[value.element_size()])
    factors = multipliers(bits.device)
    whole = bits.numel() // CHUNK * CHUNK
    parts = list(bits[:whole].view(-1, CHUNK).split(at_once))
    if whole < bits.numel() or not whole:
        parts.append(bits[whole:][None])
    return torch.cat([(part.to(torch.int64) * factors[: part.shape[1]]).sum(1) for part in parts])


def combined(sums: Iterable[int]) -> int:
    """The hash of the chunk sums of one weight, modulo 2**64."""
    total = 0
    for value in sums:
        total = (total * 0x5851F42D4C957F2D + value + 0x14057B7EF767814F) % 2**64
    return total


@lru_cache(maxsize=8)
def multipliers(device: torch.device) -> Tensor:
    position = torch.arange(1, CHUNK + 1, device=device) * 0x9E3779B97F4A7C1 + 0x632BE59BD9B4E01
    return (position ^ (position >> 29)) | 1
