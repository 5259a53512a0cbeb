"""The KV cache: its blocks with reference counts and prefix index, and its memory.

A block holds the keys and values of `size` consecutive tokens. Sequences with equal prefixes can share blocks. Full
blocks of prompts are registered in a prefix index. The key is the block's tokens and the entry of its parent block, so
equal keys mean equal prefixes, without relying on a hash. A registered block that no sequence uses stays valid until it
is evicted, least recently used first.

CUDA graphs contain addresses. If the memory of the cache came from torch's allocator, it could not be released without
capturing the graphs again. `MappedMemory` reserves the addresses permanently with CUDA's virtual memory management;
physical memory is mapped and unmapped behind them.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.engine.sequence import BLOCK_SIZE
from assay.models.device import free_memory, is_deterministic
from assay.models.spec import ModelSpec
from assay.types import UserError

ROOT = 0  # the parent entry of a sequence's first block
Key = tuple[int, tuple[int, ...]]  # entry of the parent block, tokens
GIB = 2**30
DEFAULT_FREE = 8 * GIB  # assumed if free memory is unknown
MEMORY_FRACTION = {"cuda": 0.4, "cpu": 0.25}  # of free memory, without a budget
ALIGNMENT = 64  # bytes
PINNED, DEVICE, READ_AND_WRITE, OUT_OF_MEMORY = 1, 1, 3, 2  # values of CUDA enumerations


class Blocks:
    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.ref_counts = [0] * total
        self.free = list(range(total - 1, -1, -1))  # allocated from the end, so that low numbers are used most
        self.evictable: OrderedDict[int, None] = OrderedDict()  # registered and unused, least recently used first
        self.prefix_index: dict[Key, int] = {}
        self.keys: dict[int, Key] = {}  # of registered blocks
        self.entries: dict[int, int] = {}  # unique numbers by which keys of child blocks name their parent
        self.next_entry = ROOT + 1

    @property
    def available(self) -> int:
        return len(self.free) + len(self.evictable)

    @property
    def in_use(self) -> int:
        return self.total - self.available

    def needed(self, tokens: int) -> int:
        """Number of blocks for this number of tokens."""
        return -(-tokens // self.size)

    def allocate(self, count: int) -> list[int]:
        """Empty blocks with one reference each."""
        assert count <= self.available, "more blocks were requested than are available"
        return [self.allocate_one() for _ in range(count)]

    def allocate_one(self) -> int:
        if self.free:
            block = self.free.pop()
        else:
            block, _ = self.evictable.popitem(last=False)
            self._unregister(block)
        self.ref_counts[block] = 1
        return block

    def share(self, blocks: Iterable[int], count: int = 1) -> None:
        """Add `count` references to each block."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self.evictable[block]
            self.ref_counts[block] += count

    def release(self, blocks: Sequence[int], count: int = 1, *, unregister: bool = False) -> None:
        """Drop `count` references to each block.

        `unregister`: remove them from the prefix index, because their contents are invalid.
        """
        ref_counts, keys = self.ref_counts, self.keys
        for block in reversed(blocks):  # the end of a prefix is evicted before its beginning
            left = ref_counts[block] = ref_counts[block] - count
            assert left >= 0, "a block was released twice"
            if unregister:
                self._unregister(block)
            if left == 0 and block in keys:
                self.evictable[block] = None
            elif left == 0:
                self.free.append(block)

    def release_unshared(self, blocks: Sequence[int]) -> None:
        """As `release`, for blocks with one reference that are not in the prefix index; faster."""
        ref_counts = self.ref_counts
        for block in blocks:
            ref_counts[block] = 0
        self.free.extend(reversed(blocks))

    def find_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest cached prefix of these tokens, each with one more reference."""
        blocks = list(self._cached(tokens))
        self.share(blocks)
        return blocks

    def has_prefix(self, tokens: Sequence[int]) -> bool:
        """Whether all of these tokens are cached."""
        return len(tokens) % self.size == 0 and len(list(self._cached(tokens))) == len(tokens) // self.size

    def _cached(self, tokens: Sequence[int]) -> Iterator[int]:
        parent = ROOT
        for start in range(0, len(tokens) - self.size + 1, self.size):
            block = self.prefix_index.get((parent, tuple(tokens[start : start + self.size])))
            if block is None:
                return
            yield block
            parent = self.entries[block]

    def register_prefix(self, tokens: Sequence[int], blocks: Sequence[int], computed: int) -> None:
        """Add the full blocks among the first `computed` tokens to the prefix index."""
        parent = ROOT
        for index in range(computed // self.size):
            block = blocks[index]
            if block not in self.keys:
                key = (parent, tuple(tokens[index * self.size : (index + 1) * self.size]))
                other = self.prefix_index.get(key)
                if other is None:
                    self.prefix_index[key], self.keys[block] = block, key
                    self.entries[block] = self.next_entry
                    self.next_entry += 1
                else:
                    block = other  # computed twice: the first one stays in the index
            parent = self.entries[block]

    def clear_prefix_index(self) -> None:
        """Remove all cached prefixes. Blocks that are in use stay allocated."""
        self.free.extend(self.evictable)
        self.evictable.clear()
        self.prefix_index.clear()
        self.keys.clear()
        self.entries.clear()

    def _unregister(self, block: int) -> None:
        key = self.keys.pop(block, None)
        if key is not None:
            del self.prefix_index[key], self.entries[block]


def cache_blocks(
    spec: ModelSpec, max_batch: int, max_length: int, device: torch.device, dtype: torch.dtype, budget: float
) -> int:
    """Number of blocks: within `budget` GiB; 0: as many as `max_batch` sequences can use and free memory allows."""
    block_bytes = spec.layers * 2 * spec.kv_heads * spec.head_dim * dtype.itemsize * BLOCK_SIZE
    if budget > 0:
        blocks = int(budget * GIB) // block_bytes
        if blocks < 1:
            raise UserError(
                f"engine.kv_cache_gib = {budget:g} GiB is less than one block of the KV cache ({block_bytes} bytes): "
                "raise it"
            )
        return blocks
    useful = max_batch * -(-max_length // BLOCK_SIZE)
    free = free_memory(device) or DEFAULT_FREE
    blocks = max(1, int(free * MEMORY_FRACTION.get(device.type, MEMORY_FRACTION["cpu"])) // block_bytes)
    if blocks < useful and is_deterministic():
        gib = blocks * block_bytes / GIB
        raise UserError(
            "with train.deterministic = true, the KV cache must not depend on free memory, which has room for "
            f"{blocks} of the {useful} blocks that engine.max_batch = {max_batch} sequences can use: set "
            f"engine.kv_cache_gib, e.g. to {rounded_down(gib)}, or lower engine.max_batch or model.max_length"
        )
    return min(useful, blocks)


def rounded_down(number: float) -> str:
    """Two digits, which are not more than the number."""
    step = 10.0 ** (math.floor(math.log10(number)) - 1)
    return f"{math.floor(number / step) * step:.6g}"


def new_cache(
    spec: ModelSpec, blocks: int, device: torch.device, dtype: torch.dtype, mapped: bool = False
) -> tuple[Tensor, MappedMemory | None]:
    """A cache [layers, 2, kv_heads, blocks, block size, head_dim]. On a CPU, memory is committed as it is written.

    With `mapped`, on CUDA, it is backed by `MappedMemory`, and can be used once that is mapped.
    """
    shape = (spec.layers, 2, spec.kv_heads, blocks, BLOCK_SIZE, spec.head_dim)
    size = math.prod(shape) * dtype.itemsize
    try:
        if device.type == "cuda" and mapped:
            memory = MappedMemory(size, device)
            return memory.tensor(size).view(dtype).view(shape), memory
        if device.type != "cpu":
            return torch.zeros(size, device=device, dtype=torch.uint8).view(dtype).view(shape), None
        return zeros_on_cpu(size).view(dtype).view(shape), None
    except (torch.OutOfMemoryError, MemoryError):
        raise UserError(
            f"the KV cache of {size / GIB:.1f} GiB does not fit on {device}: lower engine.kv_cache_gib or "
            "engine.max_batch"
        ) from None


def zeros_on_cpu(size: int) -> Tensor:
    """Bytes whose memory is committed as they are written. They are aligned as torch's own tensors: the last bits of
    matrix products can depend on the alignment of their factors."""
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size])


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


class MappedMemory:
    """GPU memory at fixed addresses that can be released and mapped again. It is not mapped at first."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.address, self.handle, self.mapped = ctypes.c_ulonglong(), ctypes.c_ulonglong(), False
        torch.cuda.synchronize(device)  # CUDA must be initialized
        self.location = Location(DEVICE, device.index if device.index is not None else torch.cuda.current_device())
        self.kind = AllocationProperties(type=PINNED, location=self.location)
        step = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self.kind), ctypes.c_int(0))
        self.size = -(-size // step.value) * step.value
        call("cuMemAddressReserve", ctypes.byref(self.address), self.size, 0, 0, 0)

    def map(self) -> None:
        """Map physical memory; its contents are undefined."""
        if self.mapped:
            return
        torch.cuda.empty_cache()  # what training has used, so that both never add up
        try:
            call("cuMemCreate", ctypes.byref(self.handle), self.size, ctypes.byref(self.kind), 0)
        except MemoryError:
            raise UserError(
                f"the {self.size / 2**30:.1f} GiB of the KV cache cannot be mapped again: lower "
                "engine.kv_cache_gib or train.token_budget"
            ) from None
        call("cuMemMap", self.address, self.size, 0, self.handle, 0)
        access = Access(self.location, READ_AND_WRITE)
        call("cuMemSetAccess", self.address, self.size, ctypes.byref(access), 1)
        self.mapped = True

    def unmap(self) -> None:
        """Release the physical memory. The addresses stay reserved; accessing them is an error until `map`."""
        if not self.mapped:
            return
        torch.cuda.synchronize()
        call("cuMemUnmap", self.address, self.size)
        call("cuMemRelease", self.handle)
        self.mapped = False

    def tensor(self, size: int) -> Tensor:
        """The first bytes of the memory as a tensor, which must not outlive this object."""
        return torch.as_tensor(self, device=torch.device("cuda", self.location.id))[:size]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address.value, False), "version": 2}

    def __del__(self) -> None:
        if not sys.is_finalizing() and self.address.value:
            self.unmap()
            call("cuMemAddressFree", self.address, self.size)


@cache
def driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise UserError(
            "engine.sleep_while_training needs NVIDIA's driver library libcuda.so.1: set it to false"
        ) from None


def call(name: str, *values: Any) -> None:
    """Call the driver; integers are passed as 64 bits."""
    arguments = (ctypes.c_ulonglong(value) if isinstance(value, int) else value for value in values)
    error = getattr(driver(), name)(*arguments)
    if error == OUT_OF_MEMORY:
        raise MemoryError(name)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")
