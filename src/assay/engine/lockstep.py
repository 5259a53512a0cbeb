"""Ranks that serve one model together each run the whole engine; only what the network computes is split.

Nobody tells the others what to do next, because all of them come to the same decisions. These depend on

- requests, weights' version and handles: every rank is given the same calls in the same order;
- drawn tokens and their scores: all ranks have the same bits of logits, each part of which one rank computed and sent
  to the others, and a draw depends on its logits, settings and key alone;
- the size of the cache: free memory differs, so that the smallest on any rank is taken for all (`least`);
- windows, recordings and batch: constants, given that ranks have the same kind of device and number of threads.

There are no clocks: the host waits for results and never asks whether they are there. What is iterated over is a list,
or a dict in the order of insertion; what is a set is sorted first. A weight that is not a number is one on all ranks
after the next sum. Where one rank alone is broken off (a callback that raises, a signal), the others wait for it in the
next exchange, until its process ends and takes them along: callbacks have to do the same on all ranks.

What callers can get wrong is looked at, once a call. Further requests (`more`) are asked for only when all others are
done, and compared then: asking after every window would need an exchange that makes the device wait.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from assay.engine.base import Request


def least(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    found = torch.tensor(value, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return int(found)


def check_requests(requests: Sequence[Request], group: dist.ProcessGroup, device: torch.device) -> None:
    """Before ranks wait for each other in vain."""
    rest = [(r.params, r.seed, r.keep, r.continues, len(r.prompt_ids)) for r in requests]
    digest = digest_of([repr(rest).encode(), *(np.array(r.prompt_ids, dtype=np.int64).tobytes() for r in requests)])
    if not same(digest, group, device):
        raise RuntimeError("ranks that serve one model together were given different requests, or in another order")


def check_drawn(digest: int, group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare a digest of all tokens sampled so far."""
    if not same(digest, group, device):
        raise RuntimeError("ranks that serve one model together drew different tokens: are their devices alike?")


def digest_of(parts: Iterable[bytes]) -> int:
    digest = hashlib.blake2b(digest_size=7)  # fits an int64, whatever its sign
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def same(value: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks have the same value."""
    found = torch.tensor([value, -value], device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return int(found[0]) == -int(found[1])
