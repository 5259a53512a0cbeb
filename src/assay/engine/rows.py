"""Small arrays on their way to the device, without waiting for it and without asking for pinned memory each time.

The running sequences as tensors, one row each: what is fed next, how it is drawn, and a log of what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from assay.engine.sampler import noise_keys, sample_rows, signed
from assay.engine.sequence import FORBIDDEN_SLOTS, STOP_SLOTS, WIDTH, Column, Job, RowState, Sample

SIZE = 1 << 25  # bytes; each half is used up before the other is used again
ALIGNMENT = 64


class Staging:
    """A ring of two halves of pinned memory. Before a half is used again, all that was sent from it has arrived."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.place, self.half = 0, SIZE // 2
        self.memory: Tensor | None = None
        self.sent: list[torch.cuda.Event | None] = [None, None]  # recorded when a half was used up

    def upload(self, values: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda":
            return host.to(self.device)
        if values.nbytes == 0 or values.nbytes > self.half:
            return host.to(self.device)
        if self.memory is None:
            self.memory = torch.empty(SIZE, dtype=torch.uint8, pin_memory=True)
        pinned = self._room(values.nbytes).view(host.dtype).view(host.shape)
        pinned.copy_(host)
        return pinned.to(self.device, non_blocking=True)

    def _room(self, size: int) -> Tensor:
        assert self.memory is not None
        start = -(-self.place // ALIGNMENT) * ALIGNMENT
        current = self.place // self.half if self.place < SIZE else 1
        if start + size > (current + 1) * self.half:
            event = torch.cuda.Event()
            event.record()
            self.sent[current] = event
            current = 1 - current
            start = current * self.half
            arrived = self.sent[current]
            if arrived is not None:
                arrived.synchronize()
        self.place = start + size
        return self.memory[start : start + size]


LOG_STEPS = 64  # steps that the log holds before it is written over


@dataclass(slots=True)
class Modes:
    """What the sampler has to provide for, known on the host; the fields are those of `Job.modes`."""

    greedy: bool = False
    random: bool = False
    truncate: bool = False
    forbids: bool = False


@dataclass(slots=True)
class StepOutput:
    """Results of some decoding steps: tokens and scores by step and row, counts and states after the last step."""

    samples: list[Sample]  # by row
    first: int  # index of the first step
    tokens: Tensor  # [steps, rows] int32
    scores: Tensor  # [4, steps, rows]: engine and sampling log-probabilities, kept mass, entropy
    after: Tensor  # [2, rows]: tokens drawn in all, state
    ready: torch.cuda.Event | None = None

    def wait(self) -> StepOutput:
        if self.ready is not None:
            self.ready.synchronize()
        return self


class Rows:
    def __init__(self, rows: int, max_blocks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`dtype` is that of the model; scores and settings are float32, but float64 where the model is."""
        self.device, self.size = device, rows
        wide = torch.promote_types(dtype, torch.float32)
        self.float_type: type[np.floating] = np.float64 if wide == torch.float64 else np.float32
        self.staging = Staging(device)
        self.ints = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)
        self.ints[:, Column.STATE] = RowState.IDLE
        self.floats = torch.zeros(rows, 4, dtype=wide, device=device)  # temperature, top-p, min-p, nothing
        self.forbidden = torch.full((rows, FORBIDDEN_SLOTS), -1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.log_tokens = torch.zeros(LOG_STEPS, rows, dtype=torch.int32, device=device)
        self.log_scores = torch.zeros(4, LOG_STEPS, rows, dtype=wide, device=device)
        self.modes = Modes()
        self.host_tables = np.zeros((rows, max_blocks), dtype=np.int32)
        self.prompts = np.zeros(rows, dtype=np.int64)  # tokens before the first new one
        self.begun = np.zeros(rows, dtype=np.int64)  # tokens of the sequence, had it entered at step 0
        self.tables_changed = False

    def column(self, column: Column, size: int) -> Tensor:
        return self.ints[:size, column]

    def upload(self, values: np.ndarray) -> Tensor:
        """On the device, without waiting for it."""
        return self.staging.upload(values)

    def enter(self, samples: Sequence[Sample]) -> None:
        """Fill the rows of newcomers, which follow each other."""
        rows = slice(samples[0].row, samples[0].row + len(samples))
        common = {id(sample.job): row_of(sample.job) for sample in samples}
        ints = np.array([common[id(sample.job)] for sample in samples], dtype=np.int64)
        seeds = torch.tensor([signed(sample.job.request.seed) for sample in samples])
        ints[:, Column.KEY] = noise_keys(seeds, torch.tensor([sample.index for sample in samples])).numpy()
        for place, sample in enumerate(samples):
            if sample.drawn:  # it goes on after a preemption
                ints[place, [Column.TOKEN, Column.COUNT]] = sample.drawn[-1], len(sample.drawn)
                ints[place, [Column.POSITION, Column.STORED]] = sample.start - 1, sample.start
        self.ints[rows] = self.upload(ints)
        self.prompts[rows] = [len(sample.job.tokens) for sample in samples]
        self.begun[rows] = [sample.start - sample.entered for sample in samples]
        params = [sample.job.request.params for sample in samples]
        floats = [(p.temperature, p.top_p, p.min_p, 0.0) for p in params]
        self.floats[rows] = self.upload(np.array(floats, dtype=self.float_type))
        if any(p.forbidden_token_ids for p in params):
            forbidden = [padded(sorted(set(p.forbidden_token_ids)), FORBIDDEN_SLOTS) for p in params]
            self.forbidden[rows] = self.upload(np.array(forbidden, dtype=np.int64))

    def note_modes(self, running: Sequence[Sample]) -> None:
        """To be called when rows have come or gone."""
        wanted = {sample.job.modes for sample in running}
        self.modes = Modes(*(any(mode) for mode in zip(*wanted, strict=True)))

    def draw(self, logits: Tensor) -> None:
        """A token for each row of logits [B, V], in torch: written down, and what follows from it noted."""
        sample_rows(
            logits,
            self.ints,
            self.floats,
            self.forbidden,
            self.step,
            self.log_tokens,
            self.log_scores,
            greedy=self.modes.greedy,
            random=self.modes.random,
            truncate=self.modes.truncate,
            forbids=self.modes.forbids,
        )
        self.step += 1

    def note_blocks(self, samples: Sequence[Sample]) -> None:
        """They have entered, or have more blocks than before."""
        for sample in samples:
            noted, count = sample.noted, len(sample.blocks)
            if noted == count - 1:
                self.host_tables[sample.row, noted] = sample.blocks[noted]
            else:
                self.host_tables[sample.row, noted:count] = sample.blocks[noted:]
            sample.noted = count
        self.tables_changed = self.tables_changed or bool(samples)

    def write_tables(self, size: int, width: int) -> None:
        """Tell the device which blocks the rows have, up to `width` each."""
        if self.tables_changed:
            self.tables[:size, :width] = self.upload(self.host_tables[:size, :width])
            self.tables_changed = False

    def move(self, moves: Sequence[tuple[int, int]], size: int, before: int) -> None:
        """Close gaps: afterwards rows up to `size` are in use, and those up to `before` no longer are."""
        if moves:
            froms, tos = (np.array(side) for side in zip(*moves, strict=True))
            for kept in (self.host_tables, self.prompts, self.begun):
                kept[tos] = kept[froms]
            self.tables_changed = True
            sources, destinations = self.upload(froms), self.upload(tos)
            for table in (self.ints, self.floats, self.forbidden):
                table.index_copy_(0, destinations, table.index_select(0, sources))
        self.ints[size:before, Column.STATE] = RowState.IDLE

    def read(self, samples: list[Sample], first: int, steps: int) -> StepOutput:
        """Results of the last `steps` steps; on a GPU the copy to the host is still under way when this returns."""
        place, size = first % LOG_STEPS, len(samples)
        assert place + steps <= LOG_STEPS
        tokens = self.log_tokens[place : place + steps, :size]
        scores = self.log_scores[:, place : place + steps, :size]
        after = torch.stack((self.column(Column.COUNT, size), self.column(Column.STATE, size)))
        output = StepOutput(samples, first, tokens, scores, after)
        if self.device.type == "cuda":
            output.tokens, output.scores, output.after = (to_host(x) for x in (tokens, scores, after))
            output.ready = torch.cuda.Event()
            output.ready.record()
        elif self.device.type != "cpu":
            output.tokens, output.scores, output.after = (x.cpu() for x in (tokens, scores, after))
        return output


def row_of(job: Job) -> list[int]:
    """The integers of a sample that has drawn nothing yet, but for its key."""
    params = job.request.params
    forbidden = set(params.forbidden_token_ids)
    values = {
        Column.TOKEN: job.tokens[-1],
        Column.POSITION: len(job.tokens) - 1,
        Column.STORED: len(job.tokens),
        Column.COUNT: 0,
        Column.LIMIT: job.limit,
        Column.MIN_NEW: params.min_new_tokens,
        Column.KEY: 0,
        Column.TOP_K: params.top_k,
        Column.STATE: RowState.RUNNING,
        Column.FORBIDDEN: len(forbidden),
    }
    stops = sorted(set(params.stop_token_ids) - forbidden)
    return [*(values[Column(place)] for place in range(Column.STOPS)), *padded(stops, STOP_SLOTS)]


def padded(ids: Sequence[int], width: int) -> list[int]:
    return [*ids, *[-1] * (width - len(ids))]


def to_host(x: Tensor) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x.contiguous(), non_blocking=True)
