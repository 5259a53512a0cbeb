"""Running the network on a device: prompt chunks into the KV cache, then one token per step for all rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from assay.engine.native.attention import ChunkAttention, RowAttention, VarlenAttention, slots_of
from assay.engine.native.kv_cache import new_cache
from assay.engine.native.network import FusedDecoder
from assay.engine.native.operations import TokenPositions
from assay.engine.native.scheduler import Chunk
from assay.engine.rows import Rows
from assay.engine.sequence import BLOCK_SIZE, Column, RowState, Sample
from assay.models.attention import has_varlen

SCORE_LOGITS = 1 << 25  # maximum number of logits at once in `score`


class Runner:
    """The network in torch, for any device.

    `window`: number of steps before the host reads results, because reading makes a GPU wait.
    """

    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor) -> None:
        self.network, self.rows, self.kv = network, rows, kv
        self.device, self.dtype = kv.device, kv.dtype
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
        batch: list[Sequence[int]] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > budget:
                scores += self._score(batch, temperature)
                batch = []
            batch.append(sequence)
        return scores + self._score(batch, temperature) if batch else scores

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Uses a separate KV cache, so that running sequences are not affected."""
        counts = [-(-len(sequence) // BLOCK_SIZE) for sequence in sequences]
        ends = np.cumsum(counts).tolist()
        pairs = zip(sequences, counts, ends, strict=True)
        chunks = [Chunk(sequence, 0, len(sequence), range(end - count, end)) for sequence, count, end in pairs]
        kv, _ = new_cache(self.network.spec, ends[-1] + 1, self.device, self.dtype)
        hidden = self.network.forward(*self._inputs(chunks), kv, self._attention(chunks))
        lengths = [len(sequence) for sequence in sequences]
        predicts = np.ones(sum(lengths), dtype=bool)
        predicts[np.cumsum(lengths) - 1] = False
        hidden = hidden[self.rows.upload(predicts)]
        targets = self.rows.upload(np.concatenate([np.asarray(one[1:], dtype=np.int64) for one in sequences]))
        size = max(SCORE_LOGITS // self.network.spec.vocab_size, 1)
        parts = [
            self._target_logprobs(hidden[start : start + size], targets[start : start + size], temperature)
            for start in range(0, len(targets), size)
        ]
        logprobs = torch.cat(parts) if parts else hidden.new_empty(0)
        return [part.tolist() for part in logprobs.cpu().split([length - 1 for length in lengths])]

    def _target_logprobs(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logits = self.network.unembed(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

    def close(self) -> None:
        """Release the cache."""
        self.kv = self.kv.new_empty(0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs (from, to)."""
        sources, destinations = (self.rows.upload(np.array(side)) for side in zip(*pairs, strict=True))
        self.kv.index_copy_(3, destinations, self.kv.index_select(3, sources))

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
