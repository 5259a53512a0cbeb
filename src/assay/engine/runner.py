"""Runs the network on a device: chunks of prompts into the cache, then all rows one token after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from assay.engine.attention import ChunkAttention, RowAttention
from assay.engine.columns import BLOCK_SIZE, Column, State
from assay.engine.lending import Lendable
from assay.engine.memory import GIB
from assay.engine.network import FusedDecoder
from assay.engine.rows import Rows
from assay.engine.scheduler import Chunk
from assay.engine.sequence import Sample
from assay.engine.varlen import VarlenAttention, slots_of
from assay.models.spec import ModelSpec
from assay.models.varlen import has_varlen
from assay.types import UserError

ALIGNED = 64  # bytes


class Runner:
    """In torch, for any device.

    `window`: steps to take before the host looks, where looking makes a device wait.
    """

    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor) -> None:
        self.network, self.rows, self.kv = network, rows, kv
        self.device, self.dtype = kv.device, kv.dtype
        self.window = 1 if self.device.type == "cpu" else 8
        self.ahead = 0  # windows in flight while the host works on the one before

    def compute(self, chunks: Sequence[Chunk]) -> None:
        """Keys and values of prompt tokens."""
        ids = np.concatenate([np.asarray(chunk.tokens[chunk.start : chunk.stop], dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        slots = np.concatenate([slots_of(chunk, chunk.start, chunk.stop, BLOCK_SIZE) for chunk in chunks])
        upload = self.rows.upload
        places = self.network.ops.places(upload(positions), upload(slots))
        if has_varlen(self.device, self.dtype):
            attend: VarlenAttention | ChunkAttention = VarlenAttention(chunks, BLOCK_SIZE, upload)
        else:
            attend = ChunkAttention(chunks, BLOCK_SIZE, self.device, self.dtype)
        self.network.fill(upload(ids), places, self.kv, attend)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks (from, to)."""
        sources, destinations = (self.rows.upload(np.array(side)) for side in zip(*pairs, strict=True))
        self.kv.index_copy_(3, destinations, self.kv.index_select(3, sources))

    def arrange(self, running: Sequence[Sample]) -> None:
        """Called when rows have come, gone or moved, before the next step."""
        self.rows.note_modes(running)

    def decode(self, size: int, steps: int, span: int) -> None:
        """Steps for the first `size` rows; no sequence gets longer than `span`."""
        for _ in range(steps):
            self._step(size, span)

    def _step(self, size: int, span: int) -> None:
        rows = self.rows
        positions, running = rows.column(Column.POSITION, size), rows.column(Column.STATE, size) == State.RUNNING
        tables = rows.tables[:size]
        slots = tables.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
        slots = torch.where(running & (positions >= rows.column(Column.STORED, size)), slots, -1)
        attend = RowAttention(tables, positions + 1, span, BLOCK_SIZE, self.dtype)
        places = self.network.ops.places(positions, slots)
        hidden = self.network.forward(rows.column(Column.TOKEN, size), places, self.kv, attend)
        rows.draw(self.network.unembed(hidden))


def new_cache(
    spec: ModelSpec, blocks: int, device: torch.device, dtype: torch.dtype, lend: bool = False
) -> tuple[Tensor, Lendable | None]:
    """[layers, 2, kv_heads, blocks, block size, head_dim]; on a CPU memory is taken only as it is written to.

    With `lend`, on CUDA, also what gives the memory back; the cache is empty until it is mapped.
    """
    shape = (spec.layers, 2, spec.kv_heads, blocks, BLOCK_SIZE, spec.head_dim)
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type == "cuda" and lend:
            memory = Lendable(size, device)
            return memory.tensor(shape, dtype), memory
        if device.type != "cpu":
            return torch.zeros(shape, device=device, dtype=dtype), None
        return zeros_on_cpu(size).view(dtype).view(shape), None
    except (torch.OutOfMemoryError, MemoryError):
        raise UserError(
            f"the key/value cache of {size / GIB:.1f} GiB does not fit on {device}: "
            "lower engine.memory or engine.max_batch"
        ) from None


def zeros_on_cpu(size: int) -> Tensor:
    """Bytes whose memory is taken as they are written to. They begin where torch's own tensors would: what products
    give can depend, in the last bits, on where their factors lie."""
    memory = np.zeros(size + ALIGNED, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNED
    return torch.from_numpy(memory[start : start + size])
