"""Devices, dtypes, free memory, transfers to a GPU, and results that are equal bit by bit in every run."""

from __future__ import annotations

import gc
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.system.memory import free_main_memory
from assay.types import UserError, plural

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}


def pick_device(name: str = "auto") -> torch.device:
    """The named device; "auto": cuda, mps or cpu, whichever is available first."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if has_mps() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "mps", "cpu"):
        raise UserError(f"unknown device '{name}': use auto, cuda, cuda:N, mps or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        version = torch.__version__
        raise UserError(f"device '{name}' is not available: torch {version} sees no CUDA GPU; use auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise UserError(f"device '{name}' does not exist: the machine has {plural(count, 'GPU')}, numbered from 0")
    if device.type == "mps" and not has_mps():
        raise UserError("device 'mps' is not available on this machine or in this build of torch: use auto or cpu")
    return device


def has_mps() -> bool:
    return torch.backends.mps.is_available()


def pick_dtype(name: str = "auto", device: torch.device | str = "cpu") -> torch.dtype:
    """The named dtype; "auto": bfloat16 on GPUs that support it, float32 elsewhere."""
    if name == "auto":
        native = torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        hint = " (float16 overflows in training)" if name in ("float16", "fp16", "half") else ""
        raise UserError(f"dtype '{name}' is not supported{hint}: use auto, float32 or bfloat16")
    return DTYPES[name]


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with `x`: autocast's dtype if it is enabled, else the dtype of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


# On two idle cores, a second thread makes steps of models with 1M to 135M parameters 1.3 to 1.5 times as fast. On cores
# that others use, it makes them about half as fast. Small models train in minutes in any case.
PARAMETERS_PER_THREAD = 5_000_000


THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@cache
def default_threads() -> int:
    """Torch's number of threads at the first call: the number of cores, or what `THREAD_VARIABLES` say."""
    return torch.get_num_threads()


def choose_threads(parameters: int, cores: int) -> int:
    """Number of CPU threads for a model of this size: one per `PARAMETERS_PER_THREAD`, at most `cores`.

    The load of the machine is not considered: results depend on the number of threads, and must be repeatable.
    """
    return max(1, min(cores, parameters // PARAMETERS_PER_THREAD))


def set_threads(threads: int, parameters: int, device: torch.device) -> None:
    """Set the number of CPU threads: `threads`, or if it is 0 what environment variables or the model's size say."""
    cores = default_threads()
    if threads:
        torch.set_num_threads(threads)
    elif device.type == "cpu" and not any(name in os.environ for name in THREAD_VARIABLES):
        torch.set_num_threads(choose_threads(parameters, cores))


def describe_threads() -> str:
    """The number of CPU threads, with advice if other processes use all cores."""
    threads = torch.get_num_threads()
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)
    advice = " (all cores are busy: --threads 1 may be faster)" if threads > 1 and busy else ""
    return f"{threads} CPU thread{'' if threads == 1 else 's'}{advice}"


def free_memory(device: torch.device) -> int | None:
    """Free memory of the device in bytes; None if unknown. Main memory: at most what a container or job may use."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_main_memory()


def gpu_memory_use(device: torch.device) -> float | None:
    """Fraction of the GPU's memory that is in use at the peak of this process, with other processes; None without one.

    Memory that the allocator has reserved but not given out counts as free.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return (max(others, 0) + torch.cuda.max_memory_allocated(device)) / total


def uses_triton(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:  # some builds of torch lack it: slower, but works
        return False
    return True


def check_compile_cache() -> None:
    """Keep torch.compile from loading code that another user has put into its folder: it has a predictable name in the
    folder for temporary files, where everyone may write."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ or not hasattr(os, "geteuid"):
        return
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        info = folder.lstat()
        is_safe = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & stat.S_IWOTH
    except OSError:
        is_safe = False
    if not is_safe:
        private = tempfile.mkdtemp(prefix="assay-compile-")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = private
        warnings.warn(
            f"{folder} belongs to another user or everyone may write to it: compiled code is stored in {private} "
            "(TORCHINDUCTOR_CACHE_DIR sets a folder)",
            stacklevel=2,
        )


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, without synchronizing with a GPU."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def use_expandable_segments(device: torch.device) -> None:
    """Let torch's allocator grow its blocks instead of adding new ones, so that less memory is lost between them.

    Nothing is changed if the user has set the allocator up. Blocks of this kind cannot be shared with all processes.
    """
    if device.type == "cuda" and not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE_WORKSPACES = (":4096:8", ":16:8")  # sizes of cuBLAS' work space with which its products are repeatable

_deterministic = False


def is_deterministic() -> bool:
    """Whether this process is in the context of `deterministic`: no result may depend on free memory or time."""
    return _deterministic


@contextmanager
def deterministic(wanted: bool, device: torch.device | str) -> Iterator[None]:
    """In this context, operators of torch give the same bits in every run, or raise. Not `wanted`: nothing changes.

    On CUDA it must be entered before the first matrix product. `CUBLAS_WORKSPACE_CONFIG` stays set at the end, because
    torch reads it once; all else is restored.
    """
    global _deterministic
    if not wanted:
        yield
        return
    device = pick_device(str(device))
    if device.type == "mps":
        raise UserError("train.deterministic = true is not available on mps: set device = 'cpu', or leave it out")
    if device.type == "cuda" and os.environ.get(CUBLAS_WORKSPACE) not in REPEATABLE_WORKSPACES:
        os.environ[CUBLAS_WORKSPACE] = REPEATABLE_WORKSPACES[0]
    before = _deterministic, torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filling: Any = torch.utils.deterministic
    fill, benchmark = filling.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)
        # Nothing reads memory before it is written, and filling it takes time.
        filling.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        _deterministic = True
        if device.type == "cuda" and torch.cuda.is_initialized():
            check_products(device)
        yield
    finally:
        _deterministic = before[0]
        torch.use_deterministic_algorithms(before[1], warn_only=warn_only)
        filling.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark


def check_products(device: torch.device) -> None:
    """Raise a `UserError` if this process has multiplied matrices before `CUBLAS_WORKSPACE_CONFIG` was set."""
    number = torch.ones(1, 1, device=device)
    try:
        number @ number
    except RuntimeError as error:
        if CUBLAS_WORKSPACE not in str(error):
            raise
        raise UserError(
            f"train.deterministic = true has to set {CUBLAS_WORKSPACE} before the first matrix product on the GPU, "
            f"which this process has made: start it with {CUBLAS_WORKSPACE}={REPEATABLE_WORKSPACES[0]} in its "
            "environment"
        ) from None


def release_memory() -> None:
    """Free what is not used any more: models, engines and caches are parts of reference cycles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
