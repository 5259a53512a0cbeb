"""How weights get from the trainer to the servers of an engine.

Experimental: `NcclTransport` has never been run, because it needs two GPUs.
"""

from __future__ import annotations

import base64
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from assay.models.export import write_files
from assay.system.program import free_port
from assay.types import UserError

ALIGNMENT = 256  # bytes; of weights within a buffer
CHUNK_BYTES = 1 << 29  # of weights that are sent at once
MEMORY_FOLDER = "/dev/shm"
PREFIX, LOCK = "assay-weights-", "lock"  # of temporary folders
SHARD_BYTES = 2 * 10**9  # several files are written at the same time


class FolderTransport:
    """Safetensors files in a folder that trainer and servers share: on one host, or in a network file system."""

    def __init__(
        self,
        folder: str | Path = "",
        dtype: torch.dtype | None = None,
        needed_bytes: int = 0,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """`folder`: empty for a temporary one of this host, in memory if `needed_bytes` fit there.

        `dtype`: of the weights on the servers; weights are cast to it.
        """
        self.is_temporary = not folder
        self.folder = Path(folder or temporary_folder(needed_bytes)).absolute()
        self.dtype, self.shard_bytes = dtype, shard_bytes
        remove = (shutil.rmtree, self.folder, True) if self.is_temporary else (lambda: None,)
        self._remove = weakref.finalize(self, *remove)  # when the process ends, if it is not killed
        self._lock = None if folder else locked(self.folder)

    @contextmanager
    def written(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[Path]:
        """Write all weights to a new folder, which exists until the block ends."""
        target = self.folder / f"weights-{version}"
        partial = self.folder / f".{target.name}.{os.getpid()}"
        try:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for old in (partial, target):
                    shutil.rmtree(old, ignore_errors=True)
                partial.mkdir()
                write_files(self._files(weights, partial))
                partial.rename(target)
            except OSError as error:
                advice = "free some space, or choose another folder for weights (setting `folder` of the engine)"
                raise UserError(f"cannot write weights to {self.folder} ({error}): {advice}") from error
            yield target
        finally:
            for folder in (partial, target):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._remove()

    def _files(self, weights: Iterable[tuple[str, Tensor]], folder: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
        shard: dict[str, Tensor] = {}
        size = number = 0
        for name, weight in weights:
            tensor = weight.detach()
            dtype = self.dtype if tensor.is_floating_point() else None
            # A copy: the file is written while later weights are gathered, possibly into the same memory.
            shard[name] = tensor.to("cpu", dtype, copy=True).contiguous()
            size += shard[name].nbytes
            if size >= self.shard_bytes:
                number += 1
                yield folder / f"model-{number:05d}.safetensors", shard
                shard, size = {}, 0
        if shard:
            yield folder / f"model-{number + 1:05d}.safetensors", shard


def temporary_folder(needed_bytes: int) -> str:
    """A new folder. Removes those of processes that were killed: weights in memory would stay until a restart."""
    parent = fast_folder(needed_bytes) or tempfile.gettempdir()
    for other in Path(parent).glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), other.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if its process is alive
            shutil.rmtree(other.parent, ignore_errors=True)
    return tempfile.mkdtemp(prefix=PREFIX, dir=parent)


def locked(folder: Path) -> BinaryIO:
    """A file in `folder` that is locked as long as a process has it open. It appears when it is locked."""
    file = (folder / f".{LOCK}").open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    (folder / f".{LOCK}").rename(folder / LOCK)
    return file


def fast_folder(needed_bytes: int) -> str | None:
    """A folder in memory, if the host has one with enough space (containers often have a small one)."""
    with suppress(OSError):
        if os.access(MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(MEMORY_FOLDER).free > 2 * needed_bytes + 2**28:
            return MEMORY_FOLDER
    return None


class IpcTransport:
    """GPU memory of this process that servers on the same GPU read (CUDA IPC). Weights are sent in chunks."""

    def __init__(self, device: torch.device, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device, self.dtype, self.chunk_bytes = device, dtype, chunk_bytes

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Buffers of bytes with the layout of their weights. A buffer is used again after the next one is requested."""
        buffer = torch.empty(self.chunk_bytes, dtype=torch.uint8, device=self.device)
        layout = empty_layout()
        used = 0
        for name, weight in weights:
            value = weight.detach().to(self.dtype if weight.is_floating_point() else None)
            if used and used + value.nbytes > buffer.numel():
                yield buffer, layout
                layout, used = empty_layout(), 0
            if value.nbytes > buffer.numel():
                buffer = torch.empty(value.nbytes, dtype=torch.uint8, device=self.device)
            buffer[used : used + value.nbytes].copy_(value.contiguous().view(-1).view(torch.uint8))
            entry = (name, str(value.dtype).removeprefix("torch."), list(value.shape), used)
            for column, item in zip(layout.values(), entry, strict=True):
                column.append(item)
            used += -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        yield buffer, layout


def empty_layout() -> dict[str, list[Any]]:
    return {"names": [], "dtypes": [], "shapes": [], "offsets": []}


def ipc_handle(buffer: Tensor) -> list[Any]:
    """What another process needs to read a buffer, as JSON. Each handle may be opened once."""
    from torch.multiprocessing.reductions import reduce_tensor

    torch.cuda.synchronize(buffer.device)
    arguments = reduce_tensor(buffer)[1]
    memory, size, offset, _, counter, counter_offset, event, sync = arguments[7:15]
    encoded = [base64.b64encode(part).decode() for part in (memory, counter, event)]
    return [buffer.numel(), encoded[0], size, offset, encoded[1], counter_offset, encoded[2], sync]


class NcclTransport:
    """Broadcasts from this process to the workers of all servers, through vLLM's weight-transfer API.

    Never run: it needs a second GPU. vLLM must be installed in the trainer's environment too, because both ends must
    set up NCCL in the same way.
    """

    backend = "nccl"

    def __init__(self, device: torch.device, dtype: torch.dtype, host: str, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device, self.dtype, self.host, self.chunk_bytes = device, dtype, host, chunk_bytes
        self.port = free_port()
        self.communicator: Any = None

    def connect(self, world_size: int) -> None:
        """Wait until all workers have joined; this process has rank 0."""
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError:
            raise UserError("transport 'nccl' needs vLLM in this environment: install it, or use 'folder'") from None
        group = StatelessProcessGroup.create(host=self.host, port=self.port, rank=0, world_size=world_size)
        self.communicator = PyNcclCommunicator(group, device=self.device)

    def chunks(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        chunk: list[tuple[str, Tensor]] = []
        for name, weight in weights:
            chunk.append((name, weight.detach().to(self.device, self.dtype, copy=True).contiguous()))
            if sum(tensor.nbytes for _, tensor in chunk) >= self.chunk_bytes:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def abort(self) -> None:
        """Try to end `connect` or `broadcast`, for which another thread waits. vLLM cannot end the former."""
        if self.communicator is not None:
            self.communicator.destroy()

    def broadcast(self, chunk: Iterable[tuple[str, Tensor]]) -> None:
        stream = torch.cuda.current_stream(self.device)
        for _, tensor in chunk:
            self.communicator.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()


Transport = FolderTransport | IpcTransport | NcclTransport
