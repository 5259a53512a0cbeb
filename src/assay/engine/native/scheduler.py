"""Scheduling: which sequences run, in which rows, with which blocks, and which prompt tokens come next.

Requests are served first come, first served. Prompts are computed in chunks within a token budget, between windows of
decoding steps. Samples are admitted as free rows and blocks allow. If blocks run short, cached and kept blocks are
evicted first; then the newest running sequences are preempted, and their tokens are computed again later, as a prompt.
The oldest sequences are never preempted, so every request finishes.

`Lockstep` compares the schedules of tensor-parallel ranks; the rest of the module holds no tensors.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist

from assay.engine.base import Request
from assay.engine.native.kv_cache import Blocks
from assay.engine.sequence import NEVER, Kept, Prefix, Sample, assign_slot, close_gaps

# Admission interrupts decoding, so it waits until 1/64 of the rows are free, or 1/32 if a prompt has to be computed.
CACHED_FRACTION, PROMPT_FRACTION = 64, 32
# While further requests may arrive, it waits until idle rows have missed as many row-steps as an admission costs.
ADMISSION_COST, MAX_WAIT = 8, 16  # steps of all running rows, steps


@dataclass(slots=True)
class Chunk:
    """Tokens start .. stop of a sequence, to be computed and stored in its blocks."""

    tokens: Sequence[int]
    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(slots=True)
class Plan:
    """Work to do before the next steps, in this order."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (from, to)
    entering: list[Sample] = field(default_factory=list)  # samples that start, in the last rows
    grown: list[Sample] = field(default_factory=list)  # samples that got more blocks


class Scheduler:
    """`running[i]` is the sample in row i: the rows in use are always 0 .. len(running) - 1."""

    def __init__(self, blocks: Blocks, max_batch: int, prefill_tokens: int) -> None:
        self.blocks, self.max_batch, self.prefill_tokens = blocks, max_batch, prefill_tokens
        self.waiting: deque[Prefix] = deque()
        self.running: list[Sample] = []
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        self.pending = 0  # number of waiting samples
        self.expects_arrivals = False  # whether further requests may arrive while these run
        self.waited = self.missed = 0  # steps since a waiting sample could have started; summed over such rows
        self.step = 0
        self.next_handle = 1

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, tokens: Sequence[int], samples: Iterable[Sample], kept: Kept | None = None) -> None:
        """`kept`: the sequence that these tokens continue."""
        prefix = Prefix(tokens, deque(samples))
        if kept is not None:
            prefix.blocks, prefix.computed, prefix.mixed = kept.blocks, kept.stored, kept.mixed
        self.pending += len(prefix.samples)
        self.waiting.append(prefix)

    # -- before decoding steps

    def blocks_short(self, steps: int) -> int:
        """Number of blocks that running samples lack for the next steps, after cached and kept blocks are evicted."""
        short = self._samples_short(steps)
        if len(short) * self.blocks.needed(steps) <= self.blocks.available:  # an upper bound
            return 0
        wanted = sum(self._growth(sample, steps) for sample in short)
        if wanted > self.blocks.available:
            self._evict(wanted)
        return max(0, wanted - self.blocks.available)

    def newest_running(self) -> Sample:
        """The newest running sample, which is preempted first.

        The caller stores its tokens, releases it and calls `requeue`.
        """
        return max(self.running, key=lambda sample: (sample.job.id, sample.index))

    def requeue(self, sample: Sample) -> None:
        """Put a preempted sample at the front of the queue."""
        self.waiting.appendleft(Prefix([*sample.job.tokens, *sample.drawn], deque([sample])))
        self.pending += 1

    def plan(self, steps: int) -> Plan:
        """Allocate blocks for the next steps of running samples, then admit others; `blocks_short(steps)` must be 0."""
        plan = Plan(grown=self._samples_short(steps))
        until, size = self.step + steps, self.blocks.size
        for sample in plan.grown:
            while sample.blocks_exhausted_at < until:
                sample.blocks.append(self.blocks.allocate_one())
                sample.blocks_exhausted_at += size
                if sample.blocks_exhausted_at >= sample.last_step:
                    sample.blocks_exhausted_at = NEVER
        if self._should_admit(steps):
            self._admit(plan, steps)
            # If the next prompt exceeded the budget, its next chunk is computed without waiting.
            self.waited = MAX_WAIT if self.pending and len(self.running) < self.max_batch else 0
            self.missed = 0
        return plan

    def _admit(self, plan: Plan, steps: int) -> None:
        budget = self.prefill_tokens
        while self.waiting and len(self.running) < self.max_batch:
            prefix = self.waiting[0]
            if not prefix.ready:
                if budget <= 0 or not self._allocate_prefix(prefix, steps):
                    return
                budget -= self._compute(prefix, plan, budget)
                if not prefix.ready:
                    return
            if not self._enter(prefix, plan, steps):
                return
            self.waiting.popleft()

    def _allocate_prefix(self, prefix: Prefix, steps: int) -> bool:
        """Allocate the blocks of a prefix, if enough are left for running samples; whether it succeeded."""
        searched = not prefix.blocks
        if searched:
            prefix.blocks = self.blocks.find_prefix(prefix.tokens)
            prefix.computed = len(prefix.blocks) * self.blocks.size
        missing = self.blocks.needed(len(prefix.tokens)) - len(prefix.blocks)
        growth = self._growth(prefix.samples[0], steps, have=missing + len(prefix.blocks))
        if not self._can_spare(missing + growth, prefix):
            if searched:  # only cached blocks so far: they stay evictable while the prefix waits
                self.blocks.release(prefix.drop_blocks())
            return False
        prefix.blocks = prefix.blocks + self.blocks.allocate(missing)
        return True

    def _compute(self, prefix: Prefix, plan: Plan, budget: int) -> int:
        """Schedule the next chunk of a prefix. Its full blocks can be shared at once: their users run later."""
        start, stop = prefix.computed, min(len(prefix.tokens), prefix.computed + budget)
        if start < stop:
            plan.chunks.append(Chunk(prefix.tokens, start, stop, prefix.blocks))
            prefix.computed = stop
            if not prefix.mixed:
                self.blocks.register_prefix(prefix.tokens, prefix.blocks, stop)
        return stop - start

    def _enter(self, prefix: Prefix, plan: Plan, steps: int) -> bool:
        """Start samples of a computed prefix; returns whether all of them have started."""
        first, tokens, blocks = len(self.running), prefix.tokens, prefix.blocks
        shared = blocks[: len(tokens) // self.blocks.size]
        growth = self._growth(prefix.samples[0], steps, have=len(blocks))  # the same for all, as are their lengths
        enough = len(self.running) + len(prefix.samples) * (growth + 2) <= self.blocks.available  # for all of them
        takes = False
        while prefix.samples and len(self.running) < self.max_batch and not takes:
            # The last sample takes over the blocks of the prefix. Others share them, with a copy of the last block if
            # it is not full, because they will write to it.
            copies = len(prefix.samples) > 1 and len(shared) < len(blocks)
            fits = enough or self._can_spare(growth + copies, prefix)
            if not fits and (self.running or not self._can_spare(growth, prefix)):
                break
            takes = len(prefix.samples) == 1 or not fits  # a cache that does not fit two is filled by one sequence
            copies = copies and fits
            sample = prefix.samples.popleft()
            sample.mixed = prefix.mixed
            sample.blocks, sample.shared_blocks = (blocks, len(blocks)) if takes else (shared, len(shared))
            sample.blocks = sample.blocks + self.blocks.allocate(growth + copies)
            if copies:
                plan.copies.append((blocks[-1], sample.blocks[len(shared)]))
            assign_slot(sample, self.running, self.step)
        started = self.running[first:]
        self.blocks.share(shared, len(started) - takes)
        if takes:
            prefix.drop_blocks()
        if started:
            ends = started[0].end, started[0].exhausts_blocks_at(self.blocks.size)
            for sample in started:
                sample.last_step, sample.blocks_exhausted_at = ends
        self.pending -= len(started)
        plan.entering += started
        return not prefix.samples

    def _can_spare(self, wanted: int, prefix: Prefix) -> bool:
        """Whether this number of blocks can be allocated and one is left per running sample, to avoid preemptions."""
        wanted += len(self.running)
        return wanted <= self.blocks.available or self._evict(wanted, sparing=prefix)

    def _should_admit(self, steps: int) -> bool:
        """Whether enough rows are free, or have been idle for long enough, to interrupt decoding for an admission."""
        free_rows = self.max_batch - len(self.running)
        if self.expects_arrivals and self.running:
            idle_rows = min(free_rows, self.pending)
            self.missed, self.waited = self.missed + idle_rows * steps, self.waited + steps * bool(idle_rows)
            return self.missed >= ADMISSION_COST * len(self.running) or self.waited >= MAX_WAIT
        few, more = (
            min(self.pending, max(1, self.max_batch // fraction)) for fraction in (CACHED_FRACTION, PROMPT_FRACTION)
        )
        if free_rows >= more or free_rows < few:
            return free_rows >= more
        return self.waiting[0].ready or self.blocks.has_prefix(self.waiting[0].tokens)

    def _samples_short(self, steps: int) -> list[Sample]:
        """Running samples that need more blocks for the next steps."""
        until = self.step + steps
        return [sample for sample in self.running if sample.blocks_exhausted_at < until]

    def _growth(self, sample: Sample, steps: int, have: int | None = None) -> int:
        """Number of blocks that a sample lacks for the next steps."""
        done = 0 if sample.row < 0 else self.step - sample.entered
        needed = self.blocks.needed(sample.stored(done + steps))
        return max(0, needed - (len(sample.blocks) if have is None else have))

    def _evict(self, wanted: int, sparing: Prefix | None = None) -> bool:
        """Free blocks that can be computed again until `wanted` are available; returns whether they are.

        Kept sequences go first, then waiting prefixes from the back of the queue, except `sparing`.
        """
        for kept in self.kept.values():
            if wanted <= self.blocks.available:
                return True
            self.blocks.release(kept.drop_blocks())
        if not (sparing is not None and self.running):  # while others run, the prefix can wait
            for prefix in reversed(self.waiting):
                if wanted <= self.blocks.available:
                    return True
                if prefix is not sparing and prefix.blocks:
                    self.blocks.release(prefix.drop_blocks())
        return wanted <= self.blocks.available

    # -- after decoding steps

    def release(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Remove running samples; returns the row moves (from, to) that close the gaps."""
        for shared, group in groupby(samples, key=lambda sample: sample.blocks[: sample.shared_blocks]):
            sharing = list(group)
            for sample in sharing:
                self.blocks.release_unshared(sample.blocks[sample.shared_blocks :])
                sample.blocks = []
            self.blocks.release(shared, len(sharing))
        return close_gaps(self.running, samples, self.step)

    def remove_waiting(self, samples: Sequence[Sample]) -> None:
        """Remove samples that have not started, or were preempted, from the queue."""
        gone = {id(sample) for sample in samples}
        for prefix in self.waiting:
            left = deque(sample for sample in prefix.samples if id(sample) not in gone)
            self.pending -= len(prefix.samples) - len(left)
            prefix.samples = left
            if not left:
                self.blocks.release(prefix.drop_blocks())
        self.waiting = deque(prefix for prefix in self.waiting if prefix.samples)

    # -- kept sequences

    def keep(self, tokens: list[int], blocks: list[int], mixed: bool = False) -> int:
        """Keep a finished sequence and the blocks that contain its tokens; returns its handle."""
        needed = self.blocks.needed(len(tokens) - 1)
        self.blocks.release(blocks[needed:])
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.kept[handle] = Kept(tokens, blocks[:needed], mixed)
        return handle

    def release_kept(self, handle: int) -> None:
        """Free a kept sequence; an unknown handle is ignored."""
        if (kept := self.kept.pop(handle, None)) is not None:
            self.blocks.release(kept.blocks)

    def evict_kept(self) -> None:
        """Release the blocks of kept sequences, which are computed again when they are continued."""
        for kept in self.kept.values():
            self.blocks.release(kept.drop_blocks())

    def weights_changed(self, keep_kv: bool) -> None:
        """Invalidate what earlier weights computed: cached prefixes, blocks of waiting prefixes and of kept sequences.

        With `keep_kv`, running and kept sequences keep their blocks; otherwise no sequence may be running.
        """
        assert keep_kv or not self.running
        for prefix in self.waiting:
            self.blocks.release(prefix.drop_blocks())
        if keep_kv:
            for sample in self.running:
                sample.mixed = True
            for kept in self.kept.values():
                kept.mixed = bool(kept.blocks)
        else:
            self.evict_kept()
        self.blocks.clear_prefix_index()


class Lockstep:
    """Compares requests and sampled tokens between tensor-parallel ranks.

    Every rank of a group runs the whole engine; only the network's computation is split. Nothing is communicated about
    the schedule: all ranks make the same scheduling decisions, because these depend on

    - requests, aborts, releases and weight updates: every rank receives the same calls, in the same order, between the
      same steps. In training all ranks execute the same program;
    - sampled tokens and their log-probabilities: logits are gathered, so all ranks have the same bits, and a sampled
      token is a function of its logits, its sampling parameters and its noise key;
    - the size of the KV cache: the smallest over all ranks (`min_over_ranks`), because free memory differs;
    - constants: window length, CUDA graph sizes, batch size. Ranks need the same kind of device and number of threads.

    No decision depends on a clock: the host waits for results and never polls for them. Containers that are iterated
    over are lists, or dicts in insertion order; sets are sorted first.

    Requests that were added since the last step are compared when the next step begins: once per batch of requests,
    also while other requests are running. The comparison is one exchange of two integers between the hosts, so the
    device is not synchronized. Without new requests there is no exchange. Sampled tokens are compared when the engine
    becomes idle. If only some ranks add requests before a step, or ranks abort different requests, they disagree about
    the next collective operation of the network, and the run ends with an error of the process group, at the latest
    after its timeout.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._added: list[Request] = []  # since the last step

    def add(self, request: Request) -> None:
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
