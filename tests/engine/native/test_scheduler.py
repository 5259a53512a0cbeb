"""The scheduler with a simulated device that checks the contents of every slot of the KV cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.engine.base import Capabilities, EngineInfo, Request, SamplingParams
from assay.engine.native.kv_cache import Blocks
from assay.engine.native.scheduler import Chunk, Plan, Scheduler
from assay.engine.sequence import BLOCK_SIZE, Job, Kept, Prefix, Sample, job_for

NOTHING = -1
VOCABULARY = 8
LONGEST = 60  # of a prompt
Name = tuple[int, int, int]  # call, request, sample


# -- what is asked for


class Ask(NamedTuple):
    stem: int  # which of the common beginnings, and how many tokens of it
    shared: int
    own: int  # tokens that are not shared
    n: int
    limit: int
    stops: int  # how many of the tokens end an answer
    cut: int  # after so many tokens the host ends an answer, as stop strings do; 0: never
    keep: bool
    alike: bool  # all its samples draw the same tokens


@dataclass(frozen=True)
class Case:
    asks: list[Ask]
    calls: int
    size: int  # of a block
    spare: int | None  # blocks beyond those of the longest sequence; None: more than can be used
    max_batch: int
    budget: int
    windows: list[int]  # in turn
    lag: int  # windows that the host is behind
    seed: int


@dataclass
class Item:
    """A request and its expected result."""

    request: Request
    tokens: list[int]
    continues: Name | None
    answers: list[list[int]]  # what each sample draws if nothing ends it
    cut: int
    expected: list[list[int]]


@dataclass
class Call:
    items: list[Item]
    drops: list[Name] = field(default_factory=list)  # before the next call
    new_weights: bool = False  # before this call


def prompt_of(ask: Ask, draw: random.Random) -> list[int]:
    stem = random.Random(ask.stem).choices(range(VOCABULARY), k=ask.shared)
    return (stem + draw.choices(range(VOCABULARY), k=ask.own))[:LONGEST] or [0]


def item_of(ask: Ask, before: list[int], more: list[int], continues: Name | None, draw: random.Random) -> Item:
    params = SamplingParams(n=ask.n, max_new_tokens=ask.limit, stop_token_ids=tuple(range(ask.stops)))
    answers = [draw.choices(range(VOCABULARY), k=ask.limit) for _ in range(ask.n)]
    if ask.alike:
        answers = [answers[0]] * ask.n
    expected = []
    for answer in answers:
        length = next((place + 1 for place, token in enumerate(answer) if token < ask.stops), len(answer))
        expected.append(answer[: min(length, ask.cut or length)])
    return Item(Request(more, params, seed=0, keep=ask.keep), before + more, continues, answers, ask.cut, expected)


def calls_of(case: Case) -> list[Call]:
    """All calls with their expected completions, which do not depend on scheduling."""
    draw = random.Random(case.seed)
    kept: dict[Name, list[int]] = {}
    calls: list[Call] = []
    for number in range(case.calls):
        if number == 0:
            items = [item_of(ask, [], prompt_of(ask, draw), None, draw) for ask in case.asks]
        else:
            items = [item_of(ask, [], prompt_of(ask, draw), None, draw) for ask in draw.sample(case.asks, 1)]
            for name in draw.sample(list(kept), min(len(kept), 5)):
                more = draw.choices(range(VOCABULARY), k=draw.choice((0, 1, 5, 20)))
                items.append(item_of(draw.choice(case.asks), kept.pop(name), more, name, draw))
            draw.shuffle(items)
        call = Call(items, new_weights=number > 0 and draw.random() < 0.3)
        for index, item in enumerate(items):
            if item.request.keep:
                kept |= {(number, index, i): item.tokens + answer for i, answer in enumerate(item.expected)}
        call.drops = [name for name in kept if draw.random() < 0.2]
        for name in call.drops:
            del kept[name]
        calls.append(call)
    return calls


# -- the device


@dataclass
class Row:
    """A running sequence on the device."""

    start: int
    history: list[int]  # of its tokens
    answer: list[int]
    drawn: int
    limit: int
    stops: tuple[int, ...]
    new: list[int] = field(default_factory=list)  # drawn since it entered
    over: bool = False


class Device:
    """Each slot has a number that identifies a token, all tokens before it, and the weights that computed it."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.size = blocks, blocks.size
        self.memory = [[NOTHING] * self.size for _ in range(blocks.total)]
        self.weights = NOTHING
        self.numbers: dict[tuple[int, int], int] = {}
        self.rows: list[Row] = []
        self.tables: list[list[int]] = []
        self.log: list[list[int]] = []  # of each step, the tokens drawn by row
        self.computed = self.copied = 0  # tokens, blocks

    def longer(self, history: int, token: int) -> int:
        return self.numbers.setdefault((history, token), len(self.numbers))

    def histories(self, tokens: Sequence[int]) -> list[int]:
        found, history = [], self.weights
        for token in tokens:
            history = self.longer(history, token)
            found.append(history)
        return found

    def holds(self, table: Sequence[int], histories: list[int]) -> bool:
        size, memory = self.size, self.memory
        full = len(histories) // size
        if any(memory[table[i]] != histories[i * size : (i + 1) * size] for i in range(full)):
            return False
        rest = histories[full * size :]
        return not rest or memory[table[full]][: len(rest)] == rest

    def compute(self, chunks: Sequence[Chunk], foreign: set[int]) -> None:
        """Compute all chunks in one pass: no slot may be written twice, and `foreign` blocks must not be written."""
        written: set[tuple[int, int]] = set()
        for chunk in chunks:
            histories = self.histories(chunk.tokens[: chunk.stop])
            assert chunk.start < chunk.stop
            assert self.holds(chunk.blocks, histories[: chunk.start])
            for position in range(chunk.start, chunk.stop):
                block, offset = chunk.blocks[position // self.size], position % self.size
                assert block not in foreign
                assert (block, offset) not in written
                written.add((block, offset))
                self.memory[block][offset] = histories[position]
            self.computed += chunk.stop - chunk.start
        assert all(self.holds(chunk.blocks, self.histories(chunk.tokens[: chunk.stop])) for chunk in chunks)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy all blocks at once: no destination may also be a source."""
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in copies}
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        self.copied += len(copies)

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            rows = zip(self.rows, self.tables, strict=True)
            self.log.append([NOTHING if row.over else self.draw(row, table) for row, table in rows])

    def draw(self, row: Row, table: Sequence[int]) -> int:
        if row.new:  # the first to be fed is stored already
            position = row.start + len(row.new) - 1
            block = table[position // self.size]
            assert self.blocks.ref_counts[block] == 1
            assert block not in self.blocks.keys
            self.memory[block][position % self.size] = row.history[position]
        assert self.holds(table, row.history)
        token = row.answer[row.drawn + len(row.new)]
        row.new.append(token)
        row.history.append(self.longer(row.history[-1], token))
        row.over = token in row.stops or row.drawn + len(row.new) == row.limit
        return token


# -- the host


class Window(NamedTuple):
    """Results of a window of steps."""

    samples: list[Sample]  # by row
    counts: list[int]  # tokens that each has drawn
    over: list[bool]


def order(sample: Sample) -> tuple[int, int]:
    return sample.job.id, sample.index


class Driver:
    def __init__(self, case: Case, total: int) -> None:
        self.case = case
        self.blocks = Blocks(total, case.size)
        self.scheduler = Scheduler(self.blocks, case.max_batch, case.budget)
        self.device = Device(self.blocks)
        self.looks: list[Window] = []
        self.handles: dict[Name, int] = {}
        self.draw = random.Random(case.seed)
        self.rounds = self.preempted = 0

    def generate(self, number: int, call: Call) -> None:
        if call.new_weights:
            self.scheduler.weights_changed(keep_kv=False)
            self.device.weights -= 1
        self.number, self.items = number, call.items
        self.results: dict[tuple[int, int], list[int]] = {}
        self.started: list[tuple[int, int]] = []
        for index, item in enumerate(call.items):
            self.add(index, item)
        most = self.rounds + rounds_allowed(self.case, call.items)
        while self.scheduler.unfinished:
            self.round()
            self.rounds += 1
            assert self.rounds <= most, "it goes on for too long"
        self.looks.clear()
        everything = [(index, i) for index, item in enumerate(call.items) for i in range(item.request.params.n)]
        assert sorted(self.results) == self.started == everything
        assert all(self.results[index, i] == call.items[index].expected[i] for index, i in everything)
        assert self.scheduler.pending == 0
        for name in call.drops:
            self.scheduler.release_kept(self.handles.pop(name))
        self.check()

    def add(self, index: int, item: Item) -> None:
        kept = self.scheduler.kept.pop(self.handles.pop(item.continues)) if item.continues else None
        before = kept.tokens if kept else []
        room = self.blocks.total * self.blocks.size
        info = EngineInfo(0, room + 1, 8, torch.float32, Capabilities(), vocab_size=99)
        job = job_for(item.request, index, before, info, can_decode=False)
        assert job.tokens == item.tokens
        self.scheduler.add(job.tokens, [Sample(job, i) for i in range(item.request.params.n)], kept)

    def round(self) -> None:
        steps = self.case.windows[self.rounds % len(self.case.windows)]
        self.make_room(steps)
        self.carry_out(steps)
        self.check()
        steps = min(self.draw.randint(1, steps), self.useful())
        if steps:
            self.decode(steps)
        while len(self.looks) > (self.case.lag if steps else 0):
            self.collect()

    def useful(self) -> int:
        """Number of steps after which all samples have reached their limit."""
        step = self.scheduler.step
        return max([0, *(sample.last_step - step for sample in self.scheduler.running)])

    def make_room(self, steps: int) -> None:
        scheduler = self.scheduler
        while scheduler.blocks_short(steps) > 0:
            if self.looks:
                self.collect()
                continue
            sample = scheduler.newest_running()
            assert order(sample) == max(order(other) for other in scheduler.running)
            assert len(scheduler.running) > 1, "who came first was stopped"
            count = len(sample.drawn) + scheduler.step - sample.entered
            row = self.device.rows[sample.row]
            assert not row.over
            assert count == row.drawn + len(row.new)
            sample.drawn = self.tokens_of(sample, count)
            self.leave([sample])
            scheduler.requeue(sample)
            self.preempted += 1

    def carry_out(self, steps: int) -> None:
        scheduler, device = self.scheduler, self.device
        before = list(scheduler.running)
        plan = scheduler.plan(steps)
        assert scheduler.running == before + plan.entering
        assert sum(chunk.stop - chunk.start for chunk in plan.chunks) <= self.case.budget
        foreign = {block for sample in before for block in sample.blocks}
        foreign |= {block for kept in scheduler.kept.values() for block in kept.blocks}
        device.compute(plan.chunks, foreign)
        device.copy(plan.copies)
        assert not foreign & {target for _, target in plan.copies}
        for sample in plan.grown:
            assert len(sample.blocks) > len(device.tables[sample.row])
            device.tables[sample.row] = list(sample.blocks)
        for sample in plan.entering:
            device.tables.append(list(sample.blocks))
            self.enter(sample)

    def enter(self, sample: Sample) -> None:
        item, job = self.items[sample.job.id], sample.job
        assert sample.row == len(self.device.rows)
        assert sample.spans == [(sample.row, self.scheduler.step)]
        history = self.device.histories([*job.tokens, *sample.drawn])
        assert len(history) == sample.start
        answer, stops = item.answers[sample.index], job.request.params.stop_token_ids
        self.device.rows.append(Row(sample.start, history, answer, len(sample.drawn), job.limit, stops))
        if order(sample) not in self.started:
            self.started.append(order(sample))

    def decode(self, steps: int) -> None:
        scheduler, device = self.scheduler, self.device
        assert scheduler.step == len(device.log)
        scheduler.step += steps
        device.decode(steps)
        for sample, row in zip(scheduler.running, device.rows, strict=True):
            stored = sample.stored(scheduler.step - sample.entered)
            self.check_outlook(sample)
            assert len(row.history) - 1 <= stored <= len(sample.blocks) * self.blocks.size
            assert row.over or len(row.history) - 1 == stored
        counts = [row.drawn + len(row.new) for row in device.rows]
        self.looks.append(Window(list(scheduler.running), counts, [row.over for row in device.rows]))

    def check_outlook(self, sample: Sample) -> None:
        """It reaches its limit at `last_step`; its blocks suffice until `blocks_exhausted_at`, not one step longer."""
        assert sample.last_step == sample.entered + sample.job.limit - len(sample.drawn)
        room, before = (
            len(sample.blocks) * self.blocks.size,
            min(sample.blocks_exhausted_at, sample.last_step) - sample.entered,
        )
        assert sample.stored(before) <= room
        assert sample.blocks_exhausted_at > sample.last_step or sample.stored(before + 1) > room

    def collect(self) -> None:
        """Process the oldest unread window and release the samples that have ended."""
        done = []
        for sample, count, over in zip(*self.looks.pop(0), strict=True):
            item = self.items[sample.job.id]
            if sample.done or not (over or 0 < item.cut <= count):
                continue
            sample.done = True
            tokens = self.tokens_of(sample, min(count, item.cut or count))
            assert order(sample) not in self.results
            self.results[order(sample)] = tokens
            if item.request.keep:
                handle = self.scheduler.keep([*sample.job.tokens, *tokens], sample.blocks)
                self.handles[self.number, sample.job.id, sample.index] = handle
                sample.blocks = []
            done.append(sample)
        self.leave(done)

    def tokens_of(self, sample: Sample, count: int) -> list[int]:
        """The first `count` tokens of a sample, from the log."""
        tokens = list(sample.drawn)
        for step in range(sample.entered, sample.entered + count - len(tokens)):
            row = [row for row, first in sample.spans if first <= step][-1]
            tokens.append(self.device.log[step][row])
        return tokens

    def leave(self, samples: list[Sample]) -> None:
        rows = self.device.rows
        for source, target in self.scheduler.release(samples):
            assert target < len(self.scheduler.running) <= source
            rows[target] = rows[source]
            self.device.tables[target] = self.device.tables[source]
        del rows[len(self.scheduler.running) :], self.device.tables[len(self.scheduler.running) :]
        assert all(sample.row < 0 and not sample.blocks for sample in samples)

    def check(self) -> None:
        """Every block is free, evictable, or has the right reference count; rows are contiguous and in order."""
        scheduler, blocks = self.scheduler, self.blocks
        holders: list[Sample | Prefix | Kept] = [*scheduler.running, *scheduler.waiting, *scheduler.kept.values()]
        held = Counter([block for holder in holders for block in holder.blocks])
        assert all(len(set(holder.blocks)) == len(holder.blocks) for holder in holders)
        assert blocks.ref_counts == [held[block] for block in range(blocks.total)]
        assert sorted([*blocks.free, *blocks.evictable, *held]) == list(range(blocks.total))
        assert blocks.available == blocks.total - len(held) == blocks.total - blocks.in_use
        assert all(block in blocks.keys for block in blocks.evictable)
        assert not any(block in blocks.keys for block in blocks.free)
        assert [sample.row for sample in scheduler.running] == list(range(len(self.device.rows)))
        assert len(scheduler.running) <= self.case.max_batch
        waiting = [order(sample) for prefix in scheduler.waiting for sample in prefix.samples]
        assert len(waiting) == scheduler.pending
        assert waiting == sorted(waiting)
        assert not waiting or all(order(sample) < waiting[0] for sample in scheduler.running)

    def finish(self) -> None:
        for handle in self.handles.values():
            self.scheduler.release_kept(handle)
        assert not self.scheduler.kept
        assert self.blocks.available == self.blocks.total
        assert self.blocks.ref_counts == [0] * self.blocks.total
        self.blocks.clear_prefix_index()
        assert sorted(self.blocks.free) == list(range(self.blocks.total))


def rounds_allowed(case: Case, items: list[Item]) -> int:
    """The oldest sample advances in every round; if none is running, a prompt is computed and a sample is admitted."""
    samples = sum(len(item.answers) for item in items)
    drawn = sum(len(answer) for item in items for answer in item.answers)
    longest = max(len(item.tokens) + len(item.answers[0]) for item in items)
    return drawn + samples * (longest // case.budget + 4)


def run(case: Case) -> Driver:
    calls = calls_of(case)
    items = [item for call in calls for item in call.items]
    blocks = [-(-(len(item.tokens) + len(item.answers[0]) - 1) // case.size) for item in items]
    every = sum(count * (len(item.answers) + 1) for count, item in zip(blocks, items, strict=True)) + case.max_batch
    driver = Driver(case, every if case.spare is None else max(blocks) + case.spare)
    for number, call in enumerate(calls):
        driver.generate(number, call)
    driver.finish()
    return driver


# -- any schedule

asks = st.builds(
    Ask,
    stem=st.integers(0, 1),
    shared=st.integers(0, 45),
    own=st.integers(0, 25),
    n=st.integers(1, 6),
    limit=st.integers(1, 40),
    stops=st.integers(0, 2),
    cut=st.sampled_from((0, 0, 3, 17)),
    keep=st.booleans(),
    alike=st.booleans(),
)
cases = st.builds(
    Case,
    asks=st.lists(asks, min_size=1, max_size=6),
    calls=st.integers(1, 3),
    size=st.sampled_from((16, BLOCK_SIZE, 4)),
    spare=st.one_of(st.integers(0, 4), st.integers(0, 30)),
    max_batch=st.integers(1, 12),
    budget=st.integers(1, 64),
    windows=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    lag=st.integers(0, 1),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=200)
@given(cases)
def test_random_requests_use_the_right_blocks(case: Case) -> None:
    run(case)


@pytest.mark.slow
@settings(max_examples=2000)
@given(cases)
def test_many_random_requests_use_the_right_blocks(case: Case) -> None:
    run(case)


@settings(max_examples=60)
@given(cases)
def test_no_token_is_computed_twice_with_ample_memory(case: Case) -> None:
    case = replace(case, spare=None)
    driver = run(case)
    assert driver.preempted == 0
    tokens, copies = least_work(calls_of(case), case.size)
    assert driver.device.computed == tokens
    assert driver.device.copied == copies


def least_work(calls: list[Call], size: int) -> tuple[int, int]:
    """Minimum number of prompt tokens to compute and blocks to copy, if the cache never evicts."""
    known: set[tuple[int, ...]] = set()
    kept: set[Name] = set()
    tokens = copies = 0
    for number, call in enumerate(calls):
        if call.new_weights:
            known, kept = set(), set()
        for index, item in enumerate(call.items):
            length, n = len(item.tokens), len(item.answers)
            prefixes = [tuple(item.tokens[:stop]) for stop in range(size, length + 1, size)]
            if item.continues in kept:
                have = length - len(item.request.prompt_ids) - 1
            else:
                have = size * next((i for i, prefix in enumerate(prefixes) if prefix not in known), len(prefixes))
            tokens += length - have
            copies += (n - 1) * (length % size != 0)
            known.update(prefixes)
            if item.request.keep:
                kept |= {(number, index, i) for i in range(n)}
    return tokens, copies


# -- examples


def make(blocks: int, max_batch: int = 8, budget: int = 100) -> Scheduler:
    """With blocks of 16 tokens, which the lengths in these examples assume."""
    return Scheduler(Blocks(blocks, 16), max_batch, budget)


def job(index: int, length: int, limit: int = 40, tokens: Sequence[int] | None = None) -> Job:
    """By default, a prompt whose first token differs from that of all others."""
    tokens = list(tokens or [index] * length)
    return Job(index, Request(tokens, SamplingParams(max_new_tokens=limit), seed=0), tokens, limit)


def add(scheduler: Scheduler, job: Job, n: int = 1) -> list[Sample]:
    samples = [Sample(job, i) for i in range(n)]
    scheduler.add(job.tokens, samples)
    return samples


def spans(plan: Plan) -> list[tuple[int, int, int]]:
    """The chunks of a plan; the first token of a prompt from `job` is its index."""
    return [(chunk.tokens[0], chunk.start, chunk.stop) for chunk in plan.chunks]


def go_on(scheduler: Scheduler, steps: int) -> Plan:
    """One round without results in flight."""
    assert scheduler.blocks_short(steps) == 0
    plan = scheduler.plan(steps)
    if scheduler.running:
        scheduler.step += steps
    return plan


def test_a_cache_for_one_sequence_serves_two_samples_in_turn() -> None:
    scheduler = make(3)
    first, second = add(scheduler, job(0, 40, limit=9), 2)
    plan = go_on(scheduler, 8)
    assert (plan.entering, plan.copies) == ([first], [])
    assert scheduler.blocks.available == 0
    assert not go_on(scheduler, 8).entering
    scheduler.release([first])
    plan = go_on(scheduler, 8)
    assert plan.entering == [second]
    assert spans(plan) == [(0, 32, 40)], "full blocks are found again"


def test_no_sample_is_admitted_without_free_blocks() -> None:
    scheduler = make(6)
    (a,) = add(scheduler, job(0, 50))
    (b,) = add(scheduler, job(1, 20))
    add(scheduler, job(2, 1))  # would fit, but it is not its turn
    assert go_on(scheduler, 1).entering == [a]
    assert go_on(scheduler, 1).entering == []
    scheduler.release([a])
    assert go_on(scheduler, 1).entering[0] is b


def test_samples_wait_for_a_block_to_copy_instead_of_recomputing_the_prompt() -> None:
    scheduler = make(4)
    (other,) = add(scheduler, job(0, 1))
    group = add(scheduler, job(1, 17), 2)
    plan = go_on(scheduler, 1)
    assert spans(plan) == [(0, 0, 1), (1, 0, 17)]
    assert plan.entering == [other]
    assert go_on(scheduler, 1) == Plan()
    scheduler.release([other])
    plan = go_on(scheduler, 1)
    assert plan.entering == group
    assert (plan.chunks, len(plan.copies)) == ([], 1)


def test_admission_leaves_a_block_per_running_sample() -> None:
    for total, enters in ((5, False), (6, True)):  # two each, and two that will be needed soon
        scheduler = make(total)
        samples = add(scheduler, job(0, 17), 2)
        assert go_on(scheduler, 1).entering == samples
        add(scheduler, job(1, 1))
        assert bool(go_on(scheduler, 1).entering) is enters


def test_long_prompts_are_computed_in_chunks_between_decoding_windows() -> None:
    scheduler = make(20, budget=10)
    (short,) = add(scheduler, job(0, 5))
    (long,) = add(scheduler, job(1, 22))
    plans = []
    while long.row < 0:
        plans.append(go_on(scheduler, 4))
    assert [spans(plan) for plan in plans] == [[(0, 0, 5), (1, 0, 5)], [(1, 5, 15)], [(1, 15, 22)]]
    assert [plan.entering for plan in plans] == [[short], [], [long]]
    assert (short.entered, long.entered, scheduler.step) == (0, 8, 12)


def test_admission_waits_for_several_free_rows_unless_fewer_samples_wait() -> None:
    scheduler = make(200, max_batch=64)
    samples = add(scheduler, job(0, 1), 64)
    late = add(scheduler, job(1, 1), 3)
    assert go_on(scheduler, 1).entering == samples
    scheduler.release(samples[:1])
    assert go_on(scheduler, 1).entering == []
    scheduler.release(samples[1:2])
    assert go_on(scheduler, 1).entering == late[:2]
    scheduler.release(samples[2:3])
    assert go_on(scheduler, 1).entering == late[2:]


def test_admission_waits_for_fewer_rows_if_the_prompt_is_cached() -> None:
    scheduler = make(300, max_batch=64)
    samples = add(scheduler, job(0, 0, tokens=[7] * 32), 60) + add(scheduler, job(1, 3), 4)
    (known,) = add(scheduler, job(2, 0, tokens=[7] * 32))
    (partly, new, last) = (add(scheduler, job(3 + i, 0, tokens=[t] * 40))[0] for i, t in enumerate((7, 8, 9)))
    assert go_on(scheduler, 1).entering == samples
    scheduler.release(samples[:1])
    plan = go_on(scheduler, 1)
    assert (plan.entering, plan.chunks) == ([known], [])
    scheduler.release(samples[1:2])
    assert go_on(scheduler, 1).entering == []  # eight tokens of the next prompt have to be computed
    scheduler.release(samples[2:3])
    assert go_on(scheduler, 1).entering == [partly, new]
    scheduler.release(samples[3:4])
    assert go_on(scheduler, 1).entering == [last]


def test_samples_of_a_computed_prompt_are_admitted_one_by_one() -> None:
    scheduler = make(200, max_batch=64)
    samples = add(scheduler, job(0, 5), 70)
    assert go_on(scheduler, 1).entering == samples[:64]
    scheduler.release(samples[:1])
    assert go_on(scheduler, 1).entering == samples[64:65]


def test_preemption_frees_the_newest_sequence_and_requeues_it_first() -> None:
    scheduler = make(4)
    first, second = add(scheduler, job(0, 14), 2)
    add(scheduler, job(1, 60, limit=5))
    assert go_on(scheduler, 2).entering == [first, second]
    go_on(scheduler, 16)
    assert scheduler.blocks_short(16) == 2
    assert scheduler.newest_running() is second
    second.drawn = [9] * 18
    assert scheduler.release([second]) == []
    scheduler.requeue(second)
    assert scheduler.blocks_short(16) == 0
    assert [prefix.tokens for prefix in scheduler.waiting] == [[0] * 14 + [9] * 18, [1] * 60]
    assert go_on(scheduler, 16).entering == []
    scheduler.release([first])
    plan = go_on(scheduler, 16)
    assert plan.entering == [second]
    assert spans(plan) == [(0, 0, 32)]
    assert (second.start, second.entered, second.stored(99)) == (32, 34, 14 + 40 - 1)


def keep(scheduler: Scheduler, sample: Sample, drawn: int) -> int:
    handle = scheduler.keep([*sample.job.tokens, *[9] * drawn], sample.blocks)
    sample.blocks = []
    scheduler.release([sample])
    return handle


def test_kept_sequences_are_evicted_before_preemption_oldest_first() -> None:
    scheduler = make(7)
    samples = [add(scheduler, job(index, 20))[0] for index in range(2)]
    go_on(scheduler, 4)
    old, new = (keep(scheduler, sample, drawn=4) for sample in samples)
    (late,) = add(scheduler, job(2, 60, limit=5))
    assert go_on(scheduler, 4).entering == [late]
    assert [scheduler.kept[handle].stored for handle in (old, new)] == [0, 23]
    kept = scheduler.kept.pop(old)
    again = Sample(job(3, 0, tokens=kept.tokens), 0)
    scheduler.add(again.job.tokens, [again], kept)
    scheduler.release([late])
    assert spans(go_on(scheduler, 4)) == [(0, 16, 24)], "the prompt's full block was still there"


def test_a_waiting_continuation_keeps_its_blocks() -> None:
    scheduler = make(9)
    (sample,) = add(scheduler, job(0, 20))
    go_on(scheduler, 16)
    handle = keep(scheduler, sample, drawn=13)
    (other,) = add(scheduler, job(1, 80))
    go_on(scheduler, 1)
    kept = scheduler.kept.pop(handle)
    assert (kept.stored, len(kept.blocks)) == (32, 2)  # full blocks, as those that are found for a prompt
    more = Sample(job(2, 0, tokens=[*kept.tokens, 3]), 0)
    scheduler.add(more.job.tokens, [more], kept)
    for _ in range(2):
        assert not go_on(scheduler, 8).entering
    scheduler.release([other])
    assert spans(go_on(scheduler, 1)) == [(0, 32, 34)]


def test_cached_blocks_of_a_waiting_prompt_stay_evictable() -> None:
    scheduler = make(6)
    (first,) = add(scheduler, job(0, 32))
    (second,) = add(scheduler, job(1, 17))
    go_on(scheduler, 1)
    scheduler.release([first])
    add(scheduler, job(2, 0, tokens=[0] * 32 + [5] * 32))
    assert go_on(scheduler, 1) == Plan()
    assert (scheduler.blocks.in_use, scheduler.blocks.available) == (2, 4)
    second.blocks = second.blocks + scheduler.blocks.allocate(4)
    assert scheduler.blocks.find_prefix([0] * 32) == []


def test_admission_takes_no_blocks_of_waiting_prefixes_while_others_run() -> None:
    scheduler = make(8)
    (sample,) = add(scheduler, job(0, 40))
    go_on(scheduler, 1)
    handle = keep(scheduler, sample, drawn=1)
    (running,) = add(scheduler, job(1, 20))
    (large,) = add(scheduler, job(2, 50))
    kept = scheduler.kept.pop(handle)
    scheduler.add(kept.tokens, [Sample(job(3, 0, tokens=kept.tokens), 0)], kept)
    assert go_on(scheduler, 1).entering == [running]
    assert go_on(scheduler, 1) == Plan()
    assert kept.stored == scheduler.waiting[1].computed == 40
    scheduler.release([running])
    assert go_on(scheduler, 1).entering[0] is large


def test_running_samples_get_blocks_of_waiting_prefixes_from_the_back_of_the_queue() -> None:
    scheduler = make(9, max_batch=3, budget=20)
    (first,) = add(scheduler, job(0, 14))
    going = add(scheduler, job(1, 30), 2)
    go_on(scheduler, 1)
    second = scheduler.waiting[0]
    assert (second.computed, len(second.blocks)) == (6, 2)
    kept = scheduler.kept.pop(scheduler.keep([2] * 40, scheduler.blocks.allocate(3)))
    late = Sample(job(2, 0, tokens=kept.tokens), 0)
    scheduler.add(kept.tokens, [late], kept)
    assert scheduler.blocks_short(40) == 0  # three more blocks are there
    assert [prefix.computed for prefix in scheduler.waiting] == [6, 39]
    (hog,) = (scheduler.blocks.allocate(1),)
    assert scheduler.blocks_short(40) == 0
    assert [prefix.computed for prefix in scheduler.waiting] == [6, 0]
    hog += scheduler.blocks.allocate(3)
    assert scheduler.blocks_short(40) == 0
    assert [prefix.computed for prefix in scheduler.waiting] == [0, 0]
    scheduler.blocks.release(hog)
    go_on(scheduler, 40)
    assert len(first.blocks) == 4
    assert going[0] in scheduler.waiting[0].samples


def test_a_weight_update_clears_the_prefix_cache() -> None:
    scheduler = make(20)
    (sample,) = add(scheduler, job(0, 32))
    go_on(scheduler, 4)
    with pytest.raises(AssertionError):
        scheduler.weights_changed(keep_kv=False)
    handle = keep(scheduler, sample, drawn=4)
    scheduler.weights_changed(keep_kv=False)
    assert scheduler.blocks.available == scheduler.blocks.total == len(scheduler.blocks.free)
    kept = scheduler.kept.pop(handle)
    again = Sample(job(0, 0, tokens=kept.tokens), 0)
    scheduler.add(kept.tokens, [again], kept)
    assert spans(go_on(scheduler, 1)) == [(0, 0, 36)]


def test_blocks_of_a_broken_sequence_leave_the_prefix_cache_while_shared() -> None:
    scheduler = make(20)
    broken, other = add(scheduler, job(0, 40), 2)
    go_on(scheduler, 1)
    own = broken.blocks[2:]
    held = scheduler.blocks.in_use
    scheduler.blocks.release(broken.blocks, unregister=True)
    assert scheduler.blocks.in_use == held - len(own)
    broken.blocks = []
    assert scheduler.release([broken]) == [(1, 0)]
    assert scheduler.blocks.in_use == len(other.blocks) == 3
    add(scheduler, job(1, 0, tokens=[0] * 40))
    assert spans(go_on(scheduler, 1)) == [(0, 0, 40)]
