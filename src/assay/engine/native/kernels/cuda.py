"""Kernels in CUDA C++, compiled at first use by NVRTC, which comes with torch, and launched through CUDA's driver."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

OVERLAPPING = (9, 0)  # compute capability
TRIAL = 'extern "C" __global__ void trial() { asm volatile("griddepcontrol.wait;"); }'
OVERLAPPED = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
Argument = Tensor | int | float | ctypes.c_int64 | None


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)),
    ]


class Kernel:
    """A function of a source, whose machine code for the current device is kept on disk."""

    def __init__(self, source: str, name: str) -> None:
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        option = "--gpu-architecture=sm_{}{}".format(*torch.cuda.get_device_capability())
        file = cache_file(f"{torch.version.cuda} {option}\n{source}")
        code = read_own(file)
        if code is None or self._load(code):  # damaged
            code = compiled(source, option)
            check(self._load(code))
            write(file, code)
        check(driver().cuModuleGetFunction(ctypes.byref(self.function), self.module, name.encode()))

    def _load(self, code: bytes) -> int:
        return driver().cuModuleLoadData(ctypes.byref(self.module), code)

    def __call__(self, grid: int, block: int, *arguments: Argument) -> None:
        """Launch on the current stream. The kernel may start before the one before it has ended."""
        values = [_value(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        attribute = _Attribute(id=OVERLAPPED, value=1)
        stream = torch.cuda.current_stream().cuda_stream
        launch = _Launch(grid, 1, 1, block, 1, 1, 0, stream, ctypes.pointer(attribute), 1)
        check(driver().cuLaunchKernelEx(ctypes.byref(launch), self.function, pointers, None))


def _value(argument: Argument) -> Any:
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, Tensor) or argument is None:
        return ctypes.c_void_p(None if argument is None else argument.data_ptr())
    return argument


@cache
def is_available(device: torch.device) -> bool:
    """Whether kernels that overlap (Hopper or later) can be compiled and loaded."""
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip:
        return False
    if torch.cuda.get_device_capability(device) < OVERLAPPING:
        return False
    try:
        Kernel(TRIAL, "trial")
    except (OSError, RuntimeError) as error:
        warnings.warn(f"kernels in CUDA C++ are not used: {error}", stacklevel=2)
        return False
    return True


def check(result: int) -> None:
    if result:
        message = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(message))
        raise RuntimeError(f"CUDA driver: {(message.value or b'unknown error').decode()}")


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def nvrtc() -> ctypes.CDLL:
    """The library that torch was installed with, or another one of the same major version."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    folders = [Path(folder, "nvidia") for folder in sys.path]
    for place in [name, *(str(path) for folder in folders for path in folder.glob(f"*/lib/{name}"))]:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise OSError(f"{name} was not found")


def cache_file(text: str) -> Path | None:
    """Where the machine code of a source is kept; None without a home folder."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return root / "assay" / "kernels" / f"{hashlib.sha256(text.encode()).hexdigest()}.cubin"


def read_own(file: Path | None) -> bytes | None:
    """A file of this user; None if there is none that can be read."""
    with suppress(OSError):
        if file is not None and file.stat().st_uid == os.geteuid():
            return file.read_bytes()
    return None


def write(file: Path | None, code: bytes) -> None:
    """As far as it is possible: without the file, the next process compiles again."""
    with suppress(OSError):
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = file.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(code)
            temporary.replace(file)


def compiled(source: str, option: str) -> bytes:
    library, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        options = (ctypes.c_char_p * 2)(option.encode(), b"--std=c++17")
        if library.nvrtcCompileProgram(program, 2, options):
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {log.value.decode(errors='replace')}")
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
