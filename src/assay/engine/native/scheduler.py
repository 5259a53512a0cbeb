"""Scheduling: which sequences run, in which rows, with which blocks, and which prompt tokens come next. No tensors.

Requests are served first come, first served. Prompts are computed in chunks within a token budget, between windows of
decoding steps. Samples are admitted as free rows and blocks allow. If blocks run short, cached and kept blocks are
evicted first; then the newest running sequences are preempted, and their tokens are computed again later, as a prompt.
The oldest sequences are never preempted, so every request finishes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from assay.engine.native.blocks import Blocks
from assay.engine.sequence import NEVER, Kept, Prefix, Sample, assign_slot, close_gaps

FEW, MORE = 64, 32  # the parts of the batch that are collected before anybody is let in
PASS, PATIENCE = 8, 16  # what letting somebody in costs, in steps of those who run; the most steps that anybody waits


@dataclass(slots=True)
class Chunk:
    """Tokens start .. stop of a sequence, to be computed and stored in its blocks."""

    tokens: Sequence[int]
    start: int
    stop: int
    blocks: Sequence[int]


@dataclass(slots=True)
class Plan:
    """What to do before the next steps, in this order."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks (from, to)
    entering: list[Sample] = field(default_factory=list)  # in the last rows
    grown: list[Sample] = field(default_factory=list)  # have more blocks than before


class Scheduler:
    """`running[i]` is the sample in row i: rows in use are always 0 .. len(running) - 1."""

    def __init__(self, blocks: Blocks, max_batch: int, prefill_tokens: int) -> None:
        self.blocks, self.max_batch, self.prefill_tokens = blocks, max_batch, prefill_tokens
        self.waiting: deque[Prefix] = deque()
        self.running: list[Sample] = []
        self.kept: OrderedDict[int, Kept] = OrderedDict()
        self.pending = 0  # samples that wait
        self.open = False  # whether others may come while these run
        self.waited = self.missed = 0  # steps since somebody could have entered; those of all such rows together
        self.step = 0
        self.preemptions = 0
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

    # -- before some steps of decoding

    def lack(self, steps: int) -> int:
        """Blocks that those who run miss for so many steps, after giving up what is only kept in case."""
        short = self._short(steps)
        if len(short) * self.blocks.needed(steps) <= self.blocks.available:  # more than any of them can want
            return 0
        wanted = sum(self._growth(sample, steps) for sample in short)
        if wanted > self.blocks.available:
            self._give_up(wanted)
        return max(0, wanted - self.blocks.available)

    def preempt(self) -> Sample:
        """Return the newest running sample, which is preempted first.

        The caller stores what it has written, releases it and calls `restart`.
        """
        self.preemptions += 1
        return max(self.running, key=lambda sample: (sample.job.id, sample.index))

    def restart(self, sample: Sample) -> None:
        """Put a sample that was released in front of those who wait."""
        self.waiting.appendleft(Prefix([*sample.job.tokens, *sample.drawn], deque([sample])))
        self.pending += 1

    def plan(self, steps: int) -> Plan:
        """Blocks for those who run, then newcomers, for so many steps; `lack(steps)` has to be 0."""
        plan = Plan(grown=self._short(steps))
        until, size = self.step + steps, self.blocks.size
        for sample in plan.grown:
            while sample.blocks_exhausted_at < until:
                sample.blocks.append(self.blocks.take_one())
                sample.blocks_exhausted_at += size
                if sample.blocks_exhausted_at >= sample.last_step:
                    sample.blocks_exhausted_at = NEVER
        if self._worth_it(steps):
            self._admit(plan, steps)
            # Whose prompt was too long for one pass has waited enough.
            self.waited = PATIENCE if self.pending and len(self.running) < self.max_batch else 0
            self.missed = 0
        return plan

    def _admit(self, plan: Plan, steps: int) -> None:
        budget = self.prefill_tokens
        while self.waiting and len(self.running) < self.max_batch:
            prefix = self.waiting[0]
            if not prefix.ready:
                if budget <= 0 or not self._has_room(prefix, steps):
                    return
                budget -= self._compute(prefix, plan, budget)
                if not prefix.ready:
                    return
            if not self._enter(prefix, plan, steps):
                return
            self.waiting.popleft()

    def _has_room(self, prefix: Prefix, steps: int) -> bool:
        """Take the blocks that a prefix needs, if that leaves a little for those who run."""
        searched = not prefix.blocks
        if searched:
            prefix.blocks = self.blocks.find(prefix.tokens)
            prefix.computed = len(prefix.blocks) * self.blocks.size
        missing = self.blocks.needed(len(prefix.tokens)) - len(prefix.blocks)
        growth = self._growth(prefix.samples[0], steps, have=missing + len(prefix.blocks))
        if not self._can_spare(missing + growth, prefix):
            if searched:  # nothing but found blocks, which others may need before they are found again
                self.blocks.release(prefix.drop_blocks())
            return False
        prefix.blocks = prefix.blocks + self.blocks.take(missing)
        return True

    def _compute(self, prefix: Prefix, plan: Plan, budget: int) -> int:
        """Schedule the next chunk of a prefix. Its full blocks can be shared at once: what shares them runs later."""
        start, stop = prefix.computed, min(len(prefix.tokens), prefix.computed + budget)
        if start < stop:
            plan.chunks.append(Chunk(prefix.tokens, start, stop, prefix.blocks))
            prefix.computed = stop
            if not prefix.mixed:
                self.blocks.remember(prefix.tokens, prefix.blocks, stop)
        return stop - start

    def _enter(self, prefix: Prefix, plan: Plan, steps: int) -> bool:
        """Start samples of a computed prefix; whether all of them have started."""
        while prefix.samples and len(self.running) < self.max_batch:
            sample = prefix.samples[0]
            # The last to start takes the prefix over; others share it, with a copy of the block they will write to.
            takes = len(prefix.samples) == 1
            copies = not takes and len(prefix.tokens) % self.blocks.size != 0
            growth = self._growth(sample, steps, have=len(prefix.blocks))
            if not self._can_spare(growth + copies, prefix):
                if self.running or not self._can_spare(growth, prefix):
                    return False
                takes = True  # a cache so small that one sequence fills it
            prefix.samples.popleft()
            sample.mixed = prefix.mixed
            if takes:
                sample.blocks = prefix.drop_blocks()
            else:
                self._share(prefix, sample, plan)
            if growth:
                sample.blocks = sample.blocks + self.blocks.take(growth)
            self._seat(sample, plan)
            if takes:
                break
        return not prefix.samples

    def _share(self, prefix: Prefix, sample: Sample, plan: Plan) -> None:
        full = len(prefix.tokens) // self.blocks.size
        sample.blocks = prefix.blocks[:full]
        self.blocks.share(sample.blocks)
        if full < len(prefix.blocks):
            (own,) = self.blocks.take(1)
            plan.copies.append((prefix.blocks[full], own))
            sample.blocks.append(own)

    def _can_spare(self, wanted: int, prefix: Prefix) -> bool:
        """Whether a newcomer can have so many blocks; those who run soon need some and should not be thrown out."""
        wanted += len(self.running)
        return wanted <= self.blocks.available or self._give_up(wanted, sparing=prefix)

    def _seat(self, sample: Sample, plan: Plan) -> None:
        assign_slot(sample, self.running, self.step)
        sample.last_step, sample.blocks_exhausted_at = sample.end, sample.exhausts_blocks_at(self.blocks.size)
        self.pending -= 1
        plan.entering.append(sample)

    def _worth_it(self, steps: int) -> bool:
        # A newcomer costs a pass of its own, so that a few free rows are collected first: more of them where a prompt
        # has to be computed. As many as wait are enough, unless others come as those who run end their turns: then
        # they are collected for some steps, until what they miss is worth a pass.
        room = self.max_batch - len(self.running)
        if self.open and self.running:
            idle = min(room, self.pending)
            self.missed, self.waited = self.missed + idle * steps, self.waited + steps * bool(idle)
            return self.missed >= PASS * len(self.running) or self.waited >= PATIENCE
        few, more = (min(self.pending, max(1, self.max_batch // share)) for share in (FEW, MORE))
        return room >= more or (room >= few and self._is_computed(self.waiting[0]))

    def _is_computed(self, prefix: Prefix) -> bool:
        return prefix.ready or self.blocks.holds(prefix.tokens)

    def _short(self, steps: int) -> list[Sample]:
        """Those who run and need more blocks for so many steps."""
        until = self.step + steps
        return [sample for sample in self.running if sample.blocks_exhausted_at < until]

    def _growth(self, sample: Sample, steps: int, have: int | None = None) -> int:
        """Blocks that a sample misses for so many more steps."""
        done = 0 if sample.row < 0 else self.step - sample.entered
        needed = self.blocks.needed(sample.stored(done + steps))
        return max(0, needed - (len(sample.blocks) if have is None else have))

    def _give_up(self, wanted: int, sparing: Prefix | None = None) -> bool:
        """Free what can be computed again, until so many blocks are available; whether they are."""
        for kept in self.kept.values():
            if wanted <= self.blocks.available:
                return True
            self.blocks.release(kept.blocks)
            kept.blocks, kept.mixed = [], False
        if not (sparing is not None and self.running):  # who waits in front of the queue may go on waiting
            for prefix in reversed(self.waiting):
                if wanted <= self.blocks.available:
                    return True
                if prefix is not sparing and prefix.blocks:
                    self.blocks.release(prefix.drop_blocks())
        return wanted <= self.blocks.available

    # -- after some steps

    def advance(self, steps: int) -> None:
        self.step += steps

    def release(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        """Take samples out; returns the row moves (from, to) that close the gaps."""
        for sample in samples:
            self.blocks.release(sample.blocks)
            sample.blocks = []
        return close_gaps(self.running, samples, self.step)

    def remove_waiting(self, samples: Sequence[Sample]) -> None:
        """Take samples that have not entered, or were preempted, out of the queue."""
        gone = {id(sample) for sample in samples}
        for prefix in self.waiting:
            left = deque(sample for sample in prefix.samples if id(sample) not in gone)
            self.pending -= len(prefix.samples) - len(left)
            prefix.samples = left
            if not left:
                self.blocks.release(prefix.drop_blocks())
        self.waiting = deque(prefix for prefix in self.waiting if prefix.samples)

    # -- sequences kept for later

    def keep(self, tokens: list[int], blocks: list[int], mixed: bool = False) -> int:
        """Keep a finished sequence; only the blocks that hold some of its tokens stay."""
        needed = self.blocks.needed(len(tokens) - 1)
        self.blocks.release(blocks[needed:])
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.kept[handle] = Kept(tokens, blocks[:needed], mixed)
        return handle

    def resume(self, handle: int) -> Kept | None:
        """A kept sequence, which is no longer kept."""
        return self.kept.pop(handle, None)

    def drop(self, handle: int) -> None:
        """Free a kept sequence; an unknown handle is ignored."""
        if (kept := self.kept.pop(handle, None)) is not None:
            self.blocks.release(kept.blocks)

    # -- cached prefixes

    def reset_prefix_cache(self) -> None:
        """No cached prefix is found again. Running and kept sequences keep their blocks."""
        self.blocks.forget_all()

    def drop_kept_blocks(self) -> None:
        """Kept sequences are computed again when they are continued."""
        for kept in self.kept.values():
            self.blocks.release(kept.blocks)
            kept.blocks, kept.mixed = [], False

    def weights_changed(self, keep_kv: bool) -> None:
        """Cached prefixes are void. With `keep_kv`, running and kept sequences continue from what earlier weights
        computed; otherwise nothing may be running, and kept sequences are computed again. What waits always is.
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
            self.drop_kept_blocks()
        self.blocks.forget_all()
