"""Tensor parallelism without communication about the schedule: every rank of a group runs the whole engine.

Only the network's computation is split. All ranks make the same scheduling decisions, because these depend on

- requests, aborts, releases and weight updates: every rank receives the same calls, in the same order, between the same
  steps. In training all ranks execute the same program; for consumers on rank 0 alone see `tensor_parallel`;
- sampled tokens and their log-probabilities: logits are gathered, so all ranks have the same bits, and a sampled token
  is a function of its logits, its sampling parameters and its noise key;
- the size of the KV cache: the smallest over all ranks (`min_over_ranks`), because free memory differs;
- constants: window length, CUDA graph sizes, batch size. Ranks need the same kind of device and number of threads.

No decision depends on a clock: the host waits for results and never polls for them. Containers that are iterated over
are lists, or dicts in insertion order; sets are sorted first.

`Lockstep` checks the calls. Requests that were added since the last step are compared when the next step begins: once
per batch of requests, also while other requests are running. The comparison is one exchange of two integers between the
hosts, so the device is not synchronized. Without new requests there is no exchange. Sampled tokens are compared when
the engine becomes idle. If only some ranks add requests before a step, or ranks abort different requests, they disagree
about the next collective operation of the network, and the run ends with an error of the process group, at the latest
after its timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from assay.engine.base import Request


class Lockstep:
    """Compares requests and sampled tokens between the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.compares_requests = True  # False if one rank sends them to the others
        self._added: list[Request] = []  # since the last step

    def add(self, request: Request) -> None:
        if self.compares_requests:
            self._added.append(request)

    def check_requests(self, step: int) -> None:
        """Compare the requests added since the last call, and the step before which they were added."""
        if self._added:
            added, self._added = self._added, []
            if not self._equal(digest(added, step)):
                raise RuntimeError(
                    "ranks that serve one model together were given different requests, or in another order"
                )

    def check_tokens(self, tokens: int) -> None:
        """Compare a digest of sampled tokens."""
        if not self._equal(tokens):
            raise RuntimeError(
                "ranks that serve one model together sampled different tokens: are their devices alike, and were the "
                "same requests aborted?"
            )

    def clear(self) -> None:
        self._added = []

    def _equal(self, value: int) -> bool:
        lowest, negated_highest = min_over_ranks([value, -value], self.group)
        return lowest == -negated_highest


def min_over_ranks(values: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    """Minimum of each value over all ranks, exchanged between the hosts."""
    lowest = torch.tensor(values)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    return lowest.tolist()


def digest(requests: Sequence[Request], step: int) -> int:
    rest = [(r.params, r.seed, r.keep, r.continues, r.stream, len(r.prompt_ids)) for r in requests]
    hashed = hashlib.blake2b(repr((step, rest)).encode(), digest_size=7)  # fits an int64, whatever its sign
    for request in requests:
        hashed.update(np.array(request.prompt_ids, dtype=np.int64).tobytes())
    return int.from_bytes(hashed.digest(), "little")
