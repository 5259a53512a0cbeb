"""Devices, dtypes, free memory and transfers to a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

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


def free_memory(device: torch.device) -> int | None:
    """Free memory of the device in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def uses_triton(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        import triton  # noqa: F401
    except ImportError:  # some builds of torch lack it: slower, but works
        return False
    return True


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, without synchronizing with a GPU."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
