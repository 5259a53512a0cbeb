"""What runs in servers: reading the weights that a trainer sends in files or in GPU memory (see `transport`).

vLLM loads this module in its own environment (see `integrations.vllm_worker`), so it uses torch and safetensors only.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KEY = "ASSAY_SERVER_KEY"  # environment variable with the key of servers that an engine starts


def weights_of_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no weights: do trainer and server share this folder?")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (a file, not a dict)
                yield name, file.get_tensor(name)


def gpu_of(device: torch.device) -> str:
    """Identifies a physical GPU; empty for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def shared_buffer(handle: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of bytes in the memory of another process, from the arguments that `reduce_tensor` returned there."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    size, memory, storage_size, storage_offset, counter, counter_offset, event, sync = handle
    return rebuild_cuda_tensor(
        *(torch.Tensor, (size,), (1,), 0),  # size, stride, offset
        *(torch.UntypedStorage, torch.uint8, device.index or 0),
        *(base64.b64decode(memory), storage_size, storage_offset, False),  # needs no gradient
        *(base64.b64decode(counter), counter_offset, base64.b64decode(event), sync),
    )


def weights_of_buffer(buffer: Tensor, chunk: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Copies of the weights in a buffer of bytes, whose names, dtypes, shapes and offsets are in `chunk`.

    Copies, because vLLM keeps the parts of a fused layer until it has all of them, and the buffer is used again.
    """
    parts = (chunk[key] for key in ("names", "dtypes", "shapes", "offsets"))
    for name, dtype_name, shape, offset in zip(*parts, strict=True):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        yield name, buffer[offset : offset + size].view(dtype).view(*shape).clone()
