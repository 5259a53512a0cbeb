"""The running sequences as tensors, one row each: inputs of the next step, sampling parameters, a log of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from assay.engine.sampler import noise_keys, sample_rows, signed
from assay.engine.sequence import FORBIDDEN_SLOTS, STOP_SLOTS, WIDTH, Column, Job, Modes, RowState, Sample

STAGING_BYTES = 1 << 25
ALIGNMENT = 64
LOG_STEPS = 64  # steps in the log before it is overwritten


class Staging:
    """Copies small arrays to the device asynchronously, from one buffer of pinned memory.

    The buffer has two halves. Before a half is used again, the copies from it are synchronized.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.offset, self.half = 0, STAGING_BYTES // 2
        self.memory: Tensor | None = None
        self.sent: list[torch.cuda.Event | None] = [None, None]  # recorded when a half is full

    def upload(self, values: np.ndarray) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self.device.type != "cuda" or not 0 < values.nbytes <= self.half:
            return host.to(self.device)
        if self.memory is None:
            self.memory = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        pinned = self._allocate(values.nbytes).view(host.dtype).view(host.shape)
        pinned.copy_(host)
        return pinned.to(self.device, non_blocking=True)

    def _allocate(self, size: int) -> Tensor:
        assert self.memory is not None
        start = -(-self.offset // ALIGNMENT) * ALIGNMENT
        current = self.offset // self.half if self.offset < STAGING_BYTES else 1
        if start + size > (current + 1) * self.half:
            event = torch.cuda.Event()
            event.record()
            self.sent[current] = event
            current = 1 - current
            start = current * self.half
            arrived = self.sent[current]
            if arrived is not None:
                arrived.synchronize()
        self.offset = start + size
        return self.memory[start : start + size]


@dataclass(slots=True)
class StepOutput:
    """Results of some decoding steps: tokens and scores by step and row, counts and states after the last step."""

    samples: list[Sample]  # by row
    first: int  # index of the first step
    tokens: Tensor  # [steps, rows] int32
    scores: Tensor  # [4, steps, rows]: engine and sampling log-probabilities, kept mass, entropy
    after: Tensor  # [2, rows]: number of sampled tokens, state
    ready: torch.cuda.Event | None = None

    def wait(self) -> StepOutput:
        if self.ready is not None:
            self.ready.synchronize()
        return self


class Rows:
    """Tensors with one row per running sequence; rows in use come first."""

    def __init__(self, rows: int, max_blocks: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of the model. Scores and sampling parameters are float64 if the model is, otherwise float32."""
        self.device, self.size = device, rows
        wide = torch.promote_types(dtype, torch.float32)
        self.float_type: type[np.floating] = np.float64 if wide == torch.float64 else np.float32
        self.upload = Staging(device).upload  # copies to the device without waiting for it
        self.ints = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)
        self.ints[:, Column.STATE] = RowState.IDLE
        self.floats = torch.zeros(rows, 4, dtype=wide, device=device)  # temperature, top_p, min_p, unused
        self.forbidden = torch.full((rows, FORBIDDEN_SLOTS), -1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(rows, max_blocks, dtype=torch.int32, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.log_tokens = torch.zeros(LOG_STEPS, rows, dtype=torch.int32, device=device)
        self.log_scores = torch.zeros(4, LOG_STEPS, rows, dtype=wide, device=device)
        self.modes = Modes()
        self.host_tables = np.zeros((rows, max_blocks), dtype=np.int32)
        self.prompt_lengths = np.zeros(rows, dtype=np.int64)  # tokens before the first sampled one
        self.start_offsets = np.zeros(rows, dtype=np.int64)  # sequence length minus step, constant while it runs
        self.tables_changed = False

    def column(self, column: Column, size: int) -> Tensor:
        return self.ints[:size, column]

    def enter(self, samples: Sequence[Sample]) -> None:
        """Fill the rows of samples that enter; these rows are consecutive."""
        rows = slice(samples[0].row, samples[0].row + len(samples))
        common = {id(sample.job): row_of(sample.job) for sample in samples}
        ints = np.array([common[id(sample.job)] for sample in samples], dtype=np.int64)
        seeds = torch.tensor([signed(sample.job.request.seed) for sample in samples])
        ints[:, Column.KEY] = noise_keys(seeds, torch.tensor([sample.index for sample in samples])).numpy()
        for index, sample in enumerate(samples):
            if sample.drawn:  # it continues after a preemption
                ints[index, [Column.TOKEN, Column.COUNT]] = sample.drawn[-1], len(sample.drawn)
                ints[index, [Column.POSITION, Column.STORED]] = sample.start - 1, sample.start
        self.ints[rows] = self.upload(ints)
        self.prompt_lengths[rows] = [len(sample.job.tokens) for sample in samples]
        self.start_offsets[rows] = [sample.start - sample.entered for sample in samples]
        params = [sample.job.request.params for sample in samples]
        floats = [(p.temperature, p.top_p, p.min_p, 0.0) for p in params]
        self.floats[rows] = self.upload(np.array(floats, dtype=self.float_type))
        if any(p.forbidden_token_ids for p in params):
            forbidden = [padded(sorted(set(p.forbidden_token_ids)), FORBIDDEN_SLOTS) for p in params]
            self.forbidden[rows] = self.upload(np.array(forbidden, dtype=np.int64))

    def update_modes(self, running: Sequence[Sample]) -> None:
        """Must be called after rows were added or removed."""
        wanted = {sample.job.modes for sample in running}
        self.modes = Modes(*(any(mode) for mode in zip(*wanted, strict=True)))

    def draw(self, logits: Tensor) -> None:
        """Sample a token for each row of logits [B, V], in torch, and update the rows."""
        tables = (self.ints, self.floats, self.forbidden, self.step, self.log_tokens, self.log_scores)
        sample_rows(logits, *tables, self.modes)
        self.step += 1

    def add_blocks(self, samples: Sequence[Sample]) -> None:
        """Add the new blocks of samples to the block tables on the host."""
        for sample in samples:
            start, count = sample.blocks_in_table, len(sample.blocks)
            if start == count - 1:
                self.host_tables[sample.row, start] = sample.blocks[start]
            else:
                self.host_tables[sample.row, start:count] = sample.blocks[start:]
            sample.blocks_in_table = count
        self.tables_changed = self.tables_changed or bool(samples)

    def write_tables(self, size: int, width: int) -> None:
        """Copy the block tables of the first `size` rows to the device, up to `width` blocks each."""
        if self.tables_changed:
            self.tables[:size, :width] = self.upload(self.host_tables[:size, :width])
            self.tables_changed = False

    def move(self, moves: Sequence[tuple[int, int]], size: int, before: int) -> None:
        """Move rows (from, to) so that the first `size` rows are in use; before, the first `before` rows were."""
        if moves:
            froms, tos = (np.array(side) for side in zip(*moves, strict=True))
            for kept in (self.host_tables, self.prompt_lengths, self.start_offsets):
                kept[tos] = kept[froms]
            self.tables_changed = True
            sources, destinations = self.upload(froms), self.upload(tos)
            for table in (self.ints, self.floats, self.forbidden):
                table.index_copy_(0, destinations, table.index_select(0, sources))
        self.ints[size:before, Column.STATE] = RowState.IDLE

    def read(self, samples: list[Sample], first: int, steps: int) -> StepOutput:
        """Results of the `steps` steps from `first` on. On a GPU, the copy to the host is asynchronous."""
        start, size = first % LOG_STEPS, len(samples)
        assert start + steps <= LOG_STEPS
        tokens = self.log_tokens[start : start + steps, :size]
        scores = self.log_scores[:, start : start + steps, :size]
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
    """The integers of a sample without sampled tokens; the noise key is added later."""
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
    return [*(values[Column(index)] for index in range(Column.STOPS)), *padded(stops, STOP_SLOTS)]


def padded(ids: Sequence[int], width: int) -> list[int]:
    return [*ids, *[-1] * (width - len(ids))]


def to_host(x: Tensor) -> Tensor:
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x.contiguous(), non_blocking=True)
