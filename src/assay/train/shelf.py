"""Named tensors in main memory that two processes share: a file without a name, which both of them map."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNED = 64  # bytes, as torch's own memory is


@dataclass(frozen=True)
class Slot:
    """Where on the shelf a tensor lies."""

    offset: int  # in bytes
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


class Shelf:
    """It grows as tensors are placed, and goes when the last process that has it open ends, however that comes about.

    `descriptor` and `slots` are those of another process, which handed its file on.
    """

    def __init__(self, descriptor: int | None = None, slots: Mapping[str, Slot] | None = None) -> None:
        self.file = os.fdopen(new_file() if descriptor is None else descriptor, "r+b", buffering=0)
        self.slots = dict(slots or {})
        self._views: dict[str, Tensor] = {}

    @property
    def size(self) -> int:
        return max((slot.end for slot in self.slots.values()), default=0)

    @torch.no_grad()
    def place(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors to the shelf, each to its own slot, and give those that lie there."""
        for name, tensor in tensors.items():
            if name not in self.slots:
                start = -(-self.size // ALIGNED) * ALIGNED
                self.slots[name] = Slot(start, tuple(tensor.shape), tensor.dtype)
        if self.file.seek(0, os.SEEK_END) < self.size:
            self.file.truncate(self.size)
        views = self.tensors()
        for name, tensor in tensors.items():
            if tensor.data_ptr() != views[name].data_ptr():  # else it is the one that lies there
                views[name].copy_(tensor)
        return {name: views[name] for name in tensors}

    def tensors(self) -> dict[str, Tensor]:
        """All that is there. Whatever is written to these, the other process sees in its own."""
        if self._views.keys() != self.slots.keys():
            memory = mmap.mmap(self.file.fileno(), self.size)  # stays for as long as a tensor needs it
            self._views = {
                name: torch.frombuffer(memory, dtype=slot.dtype, count=math.prod(slot.shape), offset=slot.offset).view(
                    slot.shape
                )
                for name, slot in self.slots.items()
            }
        return self._views


def new_file() -> int:
    """In memory where the system can: unlike /dev/shm, which containers keep small, that has no size of its own."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("assay")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
