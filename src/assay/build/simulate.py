"""The asynchronous pipeline as a simulation of events: engines decode, a learner updates, and nothing is computed.

It follows `training.async_source`, and the servers of `engine.remote`: a group goes to the engine with the fewest
unfinished samples, a batch takes the groups that finish first, groups that would become too old are sampled again, and
engines pause while they get new weights. With a staleness of 0, engines and learner take turns.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import log, sqrt
from random import Random
from statistics import fmean

from assay.build.cost import Line
from assay.training.async_source import MAX_RESTARTS


@dataclass(frozen=True)
class Decoding:
    """Seconds of an engine for one decoded position of all its running sequences."""

    fixed: float  # whatever runs
    row: float  # per sequence
    context: float = 0.0  # per token in the KV cache of the running sequences
    weights: float = 0.0  # to read the weights, which takes place while `product` is computed
    product: float = 0.0  # per sequence, of the products with weights
    saved: float = 0.0  # of `fixed`, with at most `few_rows` sequences
    few_rows: int = 0

    def at(self, rows: int, context: float) -> float:
        fixed = self.fixed - self.saved * (rows <= self.few_rows)
        return fixed + max(self.weights, rows * self.product) + rows * self.row + context * self.context


@dataclass(frozen=True)
class Pipeline:
    """What is simulated. Times are in seconds."""

    engines: int
    max_batch: int  # sequences that an engine decodes at a time
    decoding: Decoding
    prefill: Line  # of a prompt, by its tokens
    prompts: int  # per step
    samples: int  # per prompt
    prompt_tokens: int
    lengths: Sequence[int]  # of answers, of which samples are drawn
    update: Line  # by the number of tokens of a batch
    sync: float  # to send new weights; the engines pause meanwhile
    staleness: int = 1  # 0: on-policy
    judge: float = 0.0  # per answer
    recomputes: bool = False  # whether engines compute running sequences again after new weights, as vLLM does
    seed: int = 0


@dataclass
class SimulatedSample:
    group: SimulatedGroup
    length: int
    ends: float = 0.0  # the position of its engine at which it ends


@dataclass(eq=False)
class SimulatedGroup:
    number: int
    version: int
    lengths: tuple[int, ...]
    restarts: int = 0
    engine: SimulatedEngine | None = None
    unfinished: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class SimulatedRun:
    """Means over the steps that were measured."""

    step: float  # seconds
    tokens_per_s: float  # of answers that were trained
    learner_busy: float  # share of the time, as the next two
    engines_busy: float  # of all engines: at least one sequence is running
    syncing: float
    staleness: float
    ages: dict[int, float]  # shares of groups by staleness
    restarted: float  # unfinished samples per step that are sampled again from their start
    rows: float  # sequences that an engine decodes at a time, while it is busy

    @property
    def bottleneck(self) -> str:
        if self.ages == {0: 1.0}:  # in turns
            sampling = 1 - self.learner_busy - self.syncing
            return max((sampling, "sampling"), (self.learner_busy, "updates"), (self.syncing, "weight sync"))[1]
        if self.syncing > 0.25:
            return "weight sync"
        if self.learner_busy > 0.9 - self.syncing:
            return "learner"
        return "engines" if self.engines_busy > 0.9 - self.syncing else "longest answers"


class SimulatedEngine:
    """Decodes its running sequences together, one token of each per position."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        self.pipeline, self.index = pipeline, index
        self.time = 0.0  # up to which this state holds
        self.free_at = 0.0  # when prefill or a pause ends
        self.position = 0.0
        self.context = 0.0  # tokens of running sequences
        self.running: list[tuple[float, int, SimulatedSample]] = []  # a heap by position
        self.waiting: deque[SimulatedSample] = deque()
        self.unfinished = 0  # samples
        self.busy = self.row_seconds = 0.0
        self.changes = 0  # tells which of the events in the queue are outdated
        self._order = count()

    def advance(self, time: float) -> None:
        """Decode until `time`, at which nothing has finished that was not taken by `finish`."""
        start, rows = max(self.time, self.free_at), len(self.running)
        if rows:
            self.busy += time - self.time
            self.row_seconds += rows * (time - self.time)
            if time > start:
                each, growth = self._speed()
                seconds = time - start
                # seconds = each * positions + growth / 2 * positions ** 2
                positions = 2 * seconds / (each + sqrt(each * each + 2 * growth * seconds))
                self.position += positions
                self.context += rows * positions
        self.time = time

    def next_end(self) -> float:
        """When the next sequence ends."""
        each, growth = self._speed()
        positions = self.running[0][0] - self.position
        return max(self.time, self.free_at) + positions * (each + growth / 2 * positions)

    def _speed(self) -> tuple[float, float]:
        rows, decoding = len(self.running), self.pipeline.decoding
        return decoding.at(rows, self.context), decoding.context * rows

    def add(self, group: SimulatedGroup) -> None:
        group.engine = self
        group.unfinished = len(group.lengths)
        self.waiting.extend(SimulatedSample(group, length) for length in group.lengths)
        self.unfinished += group.unfinished
        self.fill()

    def fill(self) -> None:
        """Start waiting samples. A prompt is computed once if samples of it start together."""
        computed = None
        while self.waiting and len(self.running) < self.pipeline.max_batch:
            sample = self.waiting.popleft()
            if sample.group is not computed:
                computed = sample.group
                self.pause(self.pipeline.prefill.at(self.pipeline.prompt_tokens))
            sample.ends = self.position + sample.length
            self.context += self.pipeline.prompt_tokens
            heapq.heappush(self.running, (sample.ends, next(self._order), sample))

    def finish(self) -> list[SimulatedSample]:
        """Take the sequences that end now."""
        self.position = self.running[0][0]
        ended = []
        while self.running and self.running[0][0] <= self.position:
            sample = heapq.heappop(self.running)[2]
            self.context -= self.pipeline.prompt_tokens + sample.length
            ended.append(sample)
        self.unfinished -= len(ended)
        self.fill()
        return ended

    def drop(self, group: SimulatedGroup) -> None:
        kept = [row for row in self.running if row[2].group is not group]
        for ends, _, sample in self.running:
            if sample.group is group:
                self.context -= self.pipeline.prompt_tokens + sample.length - (ends - self.position)
        heapq.heapify(kept)
        self.running = kept
        self.waiting = deque(sample for sample in self.waiting if sample.group is not group)
        self.unfinished -= group.unfinished
        self.fill()

    def pause(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.time) + seconds


@dataclass
class Simulation:
    pipeline: Pipeline
    time: float = 0.0
    version: int = 0
    trained: list[SimulatedGroup] = field(default_factory=list)  # all groups, in the order of their batches

    def __post_init__(self) -> None:
        self.rng = Random(self.pipeline.seed)
        self.engines = [SimulatedEngine(self.pipeline, index) for index in range(self.pipeline.engines)]
        self._ends: list[tuple[float, int, int, SimulatedEngine]] = []  # a heap: when, engine, its number of changes
        self._least_busy = [(0, engine.index) for engine in self.engines]  # a heap with outdated entries
        self.sampling: set[SimulatedGroup] = set()
        self.ready: list[SimulatedGroup] = []
        self.judged: deque[tuple[float, SimulatedGroup]] = deque()
        self.judge_free = 0.0
        self.number = 0
        self.learning = self.syncing = 0.0
        self.restarted = 0
        self.ages: Counter[int] = Counter()

    def run(self, steps: int, warm: int) -> SimulatedRun:
        """Simulate `warm` steps, and measure `steps` further ones."""
        for _ in range(warm):
            self.step()
        begun = self.time
        busy, rows = (sum(getattr(engine, name) for engine in self.engines) for name in ("busy", "row_seconds"))
        self.learning = self.syncing = 0.0
        self.restarted, self.ages, first = 0, Counter(), len(self.trained)
        for _ in range(steps):
            self.step()
        seconds = self.time - begun
        busy = sum(engine.busy for engine in self.engines) - busy
        rows = sum(engine.row_seconds for engine in self.engines) - rows
        return SimulatedRun(
            step=seconds / steps,
            tokens_per_s=sum(group.tokens for group in self.trained[first:]) / seconds,
            learner_busy=self.learning / seconds,
            engines_busy=busy / seconds / len(self.engines),
            syncing=self.syncing / seconds,
            staleness=fmean(self.ages.elements()),
            ages={age: number / self.ages.total() for age, number in sorted(self.ages.items())},
            restarted=self.restarted / steps,
            rows=rows / busy if busy else 0.0,
        )

    def step(self) -> None:
        """One step of training, and the start of groups of later steps."""
        pipeline, ahead = self.pipeline, self.pipeline.prompts * self.pipeline.staleness
        self._restart_stale()
        while self._needs_more():
            self._start(ahead + pipeline.prompts - len(self.sampling) - len(self.ready))
            self._wait()
        self.ready.sort(key=lambda group: (group.version, group.number))
        batch, self.ready = self.ready[: pipeline.prompts], self.ready[pipeline.prompts :]
        self.trained += batch
        self.ages.update(self.version - group.version for group in batch)
        self._start(ahead - len(self.sampling) - len(self.ready))
        tokens = sum(pipeline.prompt_tokens + group.tokens for group in batch)
        self._pass_time(pipeline.update.at(tokens))
        self.learning += pipeline.update.at(tokens)
        for engine in self.engines:
            engine.advance(self.time)
            engine.pause(pipeline.sync + pipeline.recomputes * pipeline.prefill.at(engine.context))
            self._schedule(engine)
        self._pass_time(pipeline.sync)
        self.syncing += pipeline.sync
        self.version += 1

    def _restart_stale(self) -> None:
        def is_stale(group: SimulatedGroup) -> bool:
            return self.version - group.version > self.pipeline.staleness

        stale = [group for group in self.sampling if is_stale(group)]
        for group in sorted(stale, key=lambda group: group.number):
            assert group.engine is not None
            self.sampling.remove(group)
            if group.unfinished:
                self.restarted += group.unfinished
                group.engine.advance(self.time)
                group.engine.drop(group)
                self._schedule(group.engine)
        self.judged = deque((when, group) for when, group in self.judged if not is_stale(group))
        stale += [group for group in self.ready if is_stale(group)]
        self.ready = [group for group in self.ready if not is_stale(group)]
        for group in sorted(stale, key=lambda group: group.number):
            self._place(SimulatedGroup(group.number, self.version, group.lengths, group.restarts + 1))

    def _needs_more(self) -> bool:
        if len(self.ready) < self.pipeline.prompts:
            return True
        oldest = self.version - self.pipeline.staleness
        return any(group.restarts >= MAX_RESTARTS and group.version <= oldest for group in self.sampling)

    def _start(self, groups: int) -> None:
        for _ in range(groups):
            lengths = tuple(self.rng.choices(self.pipeline.lengths, k=self.pipeline.samples))
            self._place(SimulatedGroup(self.number, self.version, lengths))
            self.number += 1

    def _place(self, group: SimulatedGroup) -> None:
        engine = None
        while engine is None:  # until an entry is up to date
            unfinished, index = heapq.heappop(self._least_busy)
            engine = self.engines[index] if unfinished == self.engines[index].unfinished else None
        engine.advance(self.time)
        engine.add(group)
        self.sampling.add(group)
        self._schedule(engine)

    def _schedule(self, engine: SimulatedEngine) -> None:
        """Note when the engine's next sequence ends. Must be called after each change of its sequences."""
        engine.changes += 1
        heapq.heappush(self._least_busy, (engine.unfinished, engine.index))
        if engine.running:
            heapq.heappush(self._ends, (engine.next_end(), engine.index, engine.changes, engine))

    def _next_event(self) -> float:
        while self._ends and self._ends[0][2] != self._ends[0][3].changes:
            heapq.heappop(self._ends)
        ends = self._ends[0][0] if self._ends else float("inf")
        return min(ends, self.judged[0][0] if self.judged else float("inf"))

    def _handle(self, time: float) -> bool:
        """Handle the next event. Returns whether a group has become ready."""
        self.time = max(self.time, time)
        if self.judged and self.judged[0][0] <= time:
            group = self.judged.popleft()[1]
            self.sampling.remove(group)
            self.ready.append(group)
            return True
        engine = heapq.heappop(self._ends)[3]
        engine.advance(time)
        for sample in engine.finish():
            sample.group.unfinished -= 1
            if not sample.group.unfinished:
                self.judge_free = max(self.judge_free, time) + self.pipeline.judge * self.pipeline.samples
                self.judged.append((self.judge_free, sample.group))
        self._schedule(engine)
        return False

    def _wait(self) -> None:
        """Until a group is ready."""
        while not self._handle(self._next_event()):
            pass

    def _pass_time(self, seconds: float) -> None:
        until = self.time + seconds
        while (event := self._next_event()) <= until:
            self._handle(event)
        self.time = until


def simulate(pipeline: Pipeline, steps: int = 6, warm: int = 2) -> SimulatedRun:
    return Simulation(pipeline).run(steps, warm)


def drawn_lengths(mean: float, limit: int, number: int = 2000) -> list[int]:
    """Quantiles of lengths whose distribution is exponential, cut off at `limit` so that their mean is `mean`."""

    def lengths(scale: float) -> list[int]:
        quantiles = ((index + 0.5) / number for index in range(number))
        return [max(1, min(limit, round(-scale * log(1 - share)))) for share in quantiles]

    low, high = 1.0, 1e4 * limit
    for _ in range(60):
        middle = sqrt(low * high)
        low, high = (middle, high) if fmean(lengths(middle)) < mean else (low, middle)
    return lengths(high)
