"""How much memory the cache may take.

GPU memory that can be given back and taken again at the same addresses, by CUDA's own memory mapping.

Recorded graphs hold addresses. Memory from torch's allocator could not be given back without recording them anew; here
the addresses are reserved for good, and only what lies behind them comes and goes.

Runs the network on a device: chunks of prompts into the cache, then all rows one token after the other.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.engine.native.attention import ChunkAttention, RowAttention, VarlenAttention, slots_of
from assay.engine.native.network import FusedDecoder, Places
from assay.engine.native.scheduler import Chunk
from assay.engine.rows import Rows
from assay.engine.sequence import BLOCK_SIZE, Column, RowState, Sample
from assay.models.attention import has_varlen
from assay.models.device import free_memory
from assay.models.spec import ModelSpec
from assay.types import UserError

GIB = 2**30
UNKNOWN = 8 * GIB  # free memory of a machine that does not say
SHARE = {"cuda": 0.4, "cpu": 0.25}  # of the memory that is free, where no budget is given


def cache_blocks(
    spec: ModelSpec, max_batch: int, max_length: int, device: torch.device, dtype: torch.dtype, budget: float
) -> int:
    """Blocks of the cache: within `budget` GiB; 0: as many as `max_batch` sequences can use, within what is free."""
    block_bytes = spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize * BLOCK_SIZE
    if budget > 0:
        blocks = int(budget * GIB) // block_bytes
        if blocks < 1:
            raise UserError(
                f"engine.memory = {budget:g} GiB holds less than one block of the cache ({block_bytes} bytes): raise it"
            )
        return blocks
    useful = max_batch * -(-max_length // BLOCK_SIZE)
    free = free_memory(device) or UNKNOWN
    return max(1, min(useful, int(free * SHARE.get(device.type, SHARE["cpu"])) // block_bytes))


PINNED, DEVICE, READ_AND_WRITE = 1, 1, 3  # of CUDA's enumerations
OUT_OF_MEMORY = 2


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Lendable:
    """So many bytes on a GPU. At first there are only their addresses."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.address, self.handle, self.mapped = ctypes.c_ulonglong(), ctypes.c_ulonglong(), False
        torch.cuda.synchronize(device)  # whatever initialises CUDA has done so
        self.location = Location(DEVICE, device.index if device.index is not None else torch.cuda.current_device())
        self.kind = AllocationProperties(type=PINNED, location=self.location)
        step = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self.kind), ctypes.c_int(0))
        self.size = -(-size // step.value) * step.value
        self._call("cuMemAddressReserve", ctypes.byref(self.address), self.size, 0, 0, 0)

    def map(self) -> None:
        """Memory behind the addresses, with nothing in it that is worth reading."""
        if self.mapped:
            return
        try:
            self._create()
        except MemoryError:
            torch.cuda.empty_cache()  # torch may hold on to memory that nobody uses
            try:
                self._create()
            except MemoryError:
                raise UserError(
                    f"the {self.size / 2**30:.1f} GiB of the key/value cache cannot be taken back: lower engine.memory "
                    "or train.token_budget"
                ) from None
        self._call("cuMemMap", self.address, self.size, 0, self.handle, 0)
        access = Access(self.location, READ_AND_WRITE)
        self._call("cuMemSetAccess", self.address, self.size, ctypes.byref(access), 1)
        self.mapped = True

    def _create(self) -> None:
        self._call("cuMemCreate", ctypes.byref(self.handle), self.size, ctypes.byref(self.kind), 0)

    def unmap(self) -> None:
        """The addresses stay ours; touching what they point to would be an error until `map`."""
        if not self.mapped:
            return
        torch.cuda.synchronize()
        self._call("cuMemUnmap", self.address, self.size)
        self._call("cuMemRelease", self.handle)
        self.mapped = False

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The memory as a tensor, which must not outlive it."""
        whole = torch.as_tensor(self, device=torch.device("cuda", self.location.id))
        return whole[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address.value, False), "version": 2}

    def __del__(self) -> None:
        if not sys.is_finalizing() and self.address.value:
            self.unmap()
            self._call("cuMemAddressFree", self.address, self.size)

    def _call(self, name: str, *values: Any) -> None:
        """Plain numbers are sizes or flags, which the driver takes as 64 bits."""
        call(name, *(ctypes.c_ulonglong(value) if isinstance(value, int) else value for value in values))


@cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise UserError(
            "engine.sleep_while_training needs NVIDIA's driver library libcuda.so.1: set it to false"
        ) from None


def call(name: str, *values: Any) -> None:
    error = getattr(driver(), name)(*values)
    if error == OUT_OF_MEMORY:
        raise MemoryError(name)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")


ALIGNED = 64  # bytes
LOGITS = 1 << 25  # held at once in `score`


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
        """Compute keys and values of prompt tokens."""
        self.network.fill(*self._inputs(chunks), self.kv, self._attention(chunks))

    def _inputs(self, chunks: Sequence[Chunk]) -> tuple[Tensor, Places]:
        """Token ids of chunks, one behind the other, and where they belong."""
        ids = np.concatenate([np.asarray(chunk.tokens[chunk.start : chunk.stop], dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        slots = np.concatenate([slots_of(chunk, chunk.start, chunk.stop, BLOCK_SIZE) for chunk in chunks])
        upload = self.rows.upload
        places = self.network.ops.places(upload(positions), upload(slots))
        return upload(ids), places

    def _attention(self, chunks: Sequence[Chunk]) -> VarlenAttention | ChunkAttention:
        if has_varlen(self.device, self.dtype):
            return VarlenAttention(chunks, BLOCK_SIZE, self.rows.upload)
        return ChunkAttention(chunks, BLOCK_SIZE, self.device, self.dtype)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float, budget: int) -> list[list[float]]:
        """Log-probabilities of every token but the first; at most `budget` tokens (or one sequence) per pass."""
        scores: list[list[float]] = []
        batch: list[Sequence[int]] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > budget:
                scores += self._score(batch, temperature)
                batch = []
            batch.append(sequence)
        return scores + self._score(batch, temperature) if batch else scores

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Uses a cache of its own, so that running sequences need not make room."""
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
        size = max(LOGITS // self.network.spec.vocab_size, 1)
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
        positions, running = rows.column(Column.POSITION, size), rows.column(Column.STATE, size) == RowState.RUNNING
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
