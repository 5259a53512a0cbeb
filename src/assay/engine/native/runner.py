"""Running the network on a device: prompt chunks into the KV cache, then one token per step for all rows.

On CUDA, one step of all rows, from token to token, is captured as a CUDA graph and replayed without the host. A graph
has a fixed number of rows. Graphs are captured for a few sizes, and the smallest that holds all running rows is
replayed. The kernels skip rows that have ended, so the host need not read results after every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from assay.engine.base import TokenScores, gc_paused
from assay.engine.native.attention import ChunkAttention, RowAttention, VarlenAttention, has_varlen, slots_of
from assay.engine.native.kv_cache import new_cache
from assay.engine.native.network import FusedDecoder, TokenPositions, TritonOperations
from assay.engine.native.scheduler import Chunk
from assay.engine.sampler import Rows, joined_scores, target_logprobs, token_scores
from assay.engine.sequence import BLOCK_SIZE, Column, RowState, Sample, batches_of
from assay.models.fp8 import Quantized, as_bytes

WINDOW = 3  # steps between two reads of results; blocks are allocated for all of them at once
SHARING_PROGRAMS = 512  # rows times key-value heads below which prefixes are not shared
SHARED_TOKENS = 256  # minimum shared prefix for which an additional kernel pays off
SCORE_LOGITS = 1 << 25  # maximum number of logits at once in `score`


class Runner:
    """The network in torch, for any device.

    `window`: number of steps before the host reads results, because reading makes a GPU wait.
    """

    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor) -> None:
        self.network, self.rows, self.kv = network, rows, kv
        self.device, self.dtype = kv.device, network.norm.dtype
        self.window = 1 if self.device.type == "cpu" else 8
        self.ahead = 0  # windows in flight while the host processes earlier results

    def compute(self, chunks: Sequence[Chunk]) -> None:
        """Compute keys and values of prompt tokens."""
        self.network.fill(*self._inputs(chunks), self.kv, self._attention(chunks))

    def _inputs(self, chunks: Sequence[Chunk]) -> tuple[Tensor, TokenPositions]:
        """Token ids of the chunks, concatenated, with their positions and slots."""
        ids = np.concatenate([np.asarray(chunk.tokens[chunk.start : chunk.stop], dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        slots = np.concatenate([slots_of(chunk, chunk.start, chunk.stop, BLOCK_SIZE) for chunk in chunks])
        upload = self.rows.upload
        places = self.network.ops.token_positions(upload(positions), upload(slots))
        return upload(ids), places

    def _attention(self, chunks: Sequence[Chunk]) -> VarlenAttention | ChunkAttention:
        if has_varlen(self.device, self.dtype):
            return VarlenAttention(chunks, BLOCK_SIZE, self.rows.upload)
        return ChunkAttention(chunks, BLOCK_SIZE, self.device, self.dtype)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float, budget: int) -> list[list[float]]:
        """Log-probabilities of every token but the first; at most `budget` tokens, or one sequence, per pass."""
        scores: list[list[float]] = []
        for batch in batches_of(sequences, budget):
            parts = [
                target_logprobs(logits, targets, temperature)
                for logits, targets in self._scored_logits(sequences[batch], [1] * len(sequences[batch]))
            ]
            logprobs = torch.cat(parts).cpu() if parts else torch.empty(0)
            scores += [part.tolist() for part in logprobs.split([len(sequence) - 1 for sequence in sequences[batch]])]
        return scores

    def top_logprobs(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int], count: int, temperature: float, budget: int
    ) -> list[TokenScores]:
        """Scores of the tokens from `starts` on; batches as in `score`."""
        scores: list[TokenScores] = []
        for batch in batches_of(sequences, budget):
            parts = self._scored_logits(sequences[batch], starts[batch])
            joined = joined_scores(token_scores(*part, count, temperature) for part in parts)
            lengths = [len(ids) - start for ids, start in zip(sequences[batch], starts[batch], strict=True)]
            scores += [joined.part(*bounds) for bounds in pairwise(accumulate(lengths, initial=0))]
        return scores

    def _scored_logits(
        self, sequences: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits for the tokens of all sequences from `starts` on, and these tokens, in parts of `SCORE_LOGITS`."""
        hidden = self._hidden(sequences)
        predicts = np.zeros(len(hidden), dtype=bool)
        end = 0
        for sequence, start in zip(sequences, starts, strict=True):
            predicts[end + start - 1 : end + len(sequence) - 1] = True
            end += len(sequence)
        hidden = hidden[self.rows.upload(predicts)]
        pairs = zip(sequences, starts, strict=True)
        targets = self.rows.upload(np.concatenate([np.asarray(ids[start:], dtype=np.int64) for ids, start in pairs]))
        size = max(SCORE_LOGITS // self.network.spec.vocab_size, 1)
        for first in range(0, len(targets), size):
            yield self.network.unembed(hidden[first : first + size]), targets[first : first + size]

    def _hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states of all tokens. Uses a separate KV cache, so that running sequences are not affected."""
        counts = [-(-len(sequence) // BLOCK_SIZE) for sequence in sequences]
        ends = np.cumsum(counts).tolist()
        pairs = zip(sequences, counts, ends, strict=True)
        chunks = [Chunk(sequence, 0, len(sequence), range(end - count, end)) for sequence, count, end in pairs]
        kv, _ = new_cache(self.network.spec, ends[-1] + 1, self.device, self.kv.dtype)
        return self.network.forward(*self._inputs(chunks), kv, self._attention(chunks))

    def close(self) -> None:
        """Release the cache."""
        self.kv = self.kv.new_empty(0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs (from, to)."""
        sources, destinations = (self.rows.upload(np.array(side)) for side in zip(*pairs, strict=True))
        kv = as_bytes(self.kv)
        kv.index_copy_(3, destinations, kv.index_select(3, sources))

    def arrange(self, running: Sequence[Sample]) -> None:
        """Called before the next step when rows were added, removed or moved."""
        self.rows.update_modes(running)

    def decode(self, size: int, steps: int, span: int) -> None:
        """Decoding steps of the first `size` rows; no sequence gets longer than `span`."""
        for _ in range(steps):
            self._step(size, span)

    def _step(self, size: int, span: int) -> None:
        rows = self.rows
        positions, running = rows.column(Column.POSITION, size), rows.column(Column.STATE, size) == RowState.RUNNING
        tables = rows.tables[:size]
        slots = tables.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
        slots = torch.where(running & (positions >= rows.column(Column.STORED, size)), slots, -1)
        attend = RowAttention(tables, positions + 1, span, BLOCK_SIZE, self.dtype)
        places = self.network.ops.token_positions(positions, slots)
        hidden = self.network.forward(rows.column(Column.TOKEN, size), places, self.kv, attend)
        rows.draw(self.network.unembed(hidden))


def sizes_up_to(rows: int) -> list[int]:
    """Numbers of rows of the graphs: powers of two up to 64, then steps of 32 up to 512, then of an eighth or less."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < rows]
    size, stride = 64, 32
    while size < rows:
        sizes.append(size)
        size += stride
        if size >= 16 * stride:
            stride *= 2
    return [*sizes, rows]


class StepKind(NamedTuple):
    """What the CUDA graph of a step is captured for."""

    rows: int
    sharing: bool = False  # of prefixes
    splits: int = 1  # ranges per sequence
    windowed: bool = True  # some sequence may be longer than a sliding window
    forbids: bool = True  # `Modes` of the rows
    truncates: bool = True


class GraphRunner(Runner):
    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor) -> None:
        from assay.engine.native.kernels import attention, few_rows, layers, sampling

        super().__init__(network, rows, kv)
        self.attention, self.layers, self.sampling = attention, layers, sampling
        self.window, self.ahead = WINDOW, 1
        spec = network.spec
        self.min_shared_blocks = SHARED_TOKENS // BLOCK_SIZE
        self.shared = attention.SharedPrefixes.new(rows.size, spec.heads, spec.kv_heads, spec.head_dim, kv.device)
        self.order = torch.arange(rows.size, dtype=torch.int32, device=kv.device)
        self.counters = torch.zeros(rows.size, spec.kv_heads, dtype=torch.int32, device=kv.device)
        self.scratch = sampling.Scratch(rows.size, network.spec.vocab_size, kv.device)
        self.few = few_rows.FewRows(cast(TritonOperations, network.ops)) if few_rows.FewRows.supports(network) else None
        self.few_rows = few_rows.MAX_ROWS if self.few else 0
        self.sizes = sizes_up_to(rows.size)
        self.graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self.sharing = False
        self.pool = torch.cuda.graph_pool_handle()

    def arrange(self, running: Sequence[Sample]) -> None:
        """Sort rows by length and find prefix groups, if there are enough to pay for an additional kernel."""
        super().arrange(running)
        size = len(running)
        # Longest first. All rows grow by one token per step, so the order is valid until rows are added or removed.
        order = np.arange(self.rows.size, dtype=np.int32)
        order[:size] = np.argsort(-self.rows.start_offsets[:size], kind="stable")
        self.order.copy_(self.rows.upload(order))
        counts = self.rows.prompt_lengths[:size] // BLOCK_SIZE
        counts[counts < self.min_shared_blocks] = 0
        keys, tokens = self.attention.find_groups(self.rows.host_tables[:size], counts)
        plan = self.attention.plan_tiles(keys, tokens, self.shared.rows.shape[1], rows=self.rows.size)
        self.sharing = bool(plan[1].any())
        if self.sharing:
            self.shared.write(plan, self.rows.upload)

    def decode(self, size: int, steps: int, span: int) -> None:
        rows, kv_heads = next(graph_size for graph_size in self.sizes if graph_size >= size), self.network.spec.kv_heads
        # For few rows, shared prefixes do not pay; float32 products leave no registers for them.
        many = rows > self.few_rows and rows * kv_heads >= SHARING_PROGRAMS
        sharing = self.sharing and many and self.dtype.itemsize == 2
        splits = self.attention.default_splits(rows, kv_heads, span)
        windowed = any(0 < window < span for window in self.network.spec.windows)
        kind = StepKind(rows, sharing, splits, windowed, self.rows.modes.forbids, self.rows.modes.truncate)
        if kind not in self.graphs:
            self.graphs[kind] = self._record(kind)
        for _ in range(steps):
            self.graphs[kind].replay()

    def close(self) -> None:
        self.graphs.clear()
        super().close()

    def _record(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        self._warm_up(kind)
        graph = torch.cuda.CUDAGraph()
        # A collection could delete CUDA objects of another engine meanwhile, which would invalidate the capture.
        with gc_paused(), torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self._whole_step(kind)
        return graph

    def _warm_up(self, kind: StepKind) -> None:
        """Run once before capture, so that all kernels are compiled and loaded; with idle rows this has no effect."""
        states = self.rows.ints[:, Column.STATE]
        before = states.clone()
        states.fill_(int(RowState.IDLE))
        self._whole_step(kind)
        states.copy_(before)
        self.rows.step -= 1
        torch.cuda.synchronize()

    def _whole_step(self, kind: StepKind) -> None:
        rows, device, size = self.rows, self.device, kind.rows
        positions, slots, ids = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(3))
        lengths = torch.empty(size, dtype=torch.int32, device=device)
        self.layers.start_step(rows.ints, rows.tables, size, BLOCK_SIZE, positions, lengths, slots, ids)

        few = self.few if size <= self.few_rows else None
        attend = StepAttention(self, kind, lengths, overlapped=few is not None)
        hidden = self.network.forward(ids, TokenPositions(positions, slots), self.kv, attend, few)
        logits = self.network.unembed(hidden)
        self.sampling.sample(
            *(logits, rows.ints, rows.floats, rows.forbidden, rows.step, rows.log_tokens, rows.log_scores),
            self.scratch,
            forbids=kind.forbids,
            truncates=kind.truncates,
        )
        rows.step += 1


@dataclass(frozen=True)
class StepAttention:
    """Attention of a step: a `QuantizingAttend`."""

    runner: GraphRunner
    kind: StepKind
    lengths: Tensor  # of the sequences
    overlapped: bool  # between kernels of `FewRows`

    def __call__(
        self,
        kv: Tensor,
        q: Tensor,
        window: int,
        scale: float | None,
        out: Tensor | None = None,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        runner, window = self.runner, window if self.kind.windowed else 0
        return runner.attention.decode_attention(
            *(q, kv, runner.rows.tables, self.lengths, out),
            splits=self.kind.splits,
            counters=runner.counters,
            order=runner.order,
            shared=runner.shared if self.kind.sharing and not window else None,
            window=window,
            scale=scale,
            out_scale=out_scale,
            overlapped=self.overlapped,
        )

    def quantized(self, kv: Tensor, q: Tensor, window: int, scale: float | None, out_scale: Tensor) -> Quantized:
        out = torch.empty_like(q, dtype=torch.float8_e4m3fn)
        return Quantized(self(kv, q, window, scale, out, out_scale).flatten(1), out_scale)
