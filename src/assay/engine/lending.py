"""GPU memory that can be given back and taken again at the same addresses, by CUDA's own memory mapping.

Recorded graphs hold addresses. Memory from torch's allocator could not be given back without recording them anew; here
the addresses are reserved for good, and only what lies behind them comes and goes.
"""

from __future__ import annotations

import ctypes
import math
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from assay.types import UserError

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
        raise UserError("engine.lend needs NVIDIA's driver library libcuda.so.1: set it to false") from None


def call(name: str, *values: Any) -> None:
    error = getattr(driver(), name)(*values)
    if error == OUT_OF_MEMORY:
        raise MemoryError(name)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")
