"""How weights get from the trainer to the servers of an engine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from assay.models.export import write_files
from assay.types import UserError

MEMORY_FOLDER = "/dev/shm"
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

        `dtype`: that of the servers; weights are cast to it.
        """
        self.own = not folder
        parent = fast_folder(needed_bytes) if self.own else None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="assay-weights-", dir=parent)).absolute()
        self.dtype, self.shard_bytes = dtype, shard_bytes

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
        if self.own:
            shutil.rmtree(self.folder, ignore_errors=True)

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


def fast_folder(needed_bytes: int) -> str | None:
    """A folder in memory, if the host has one with enough space (containers often have a small one)."""
    with suppress(OSError):
        if os.access(MEMORY_FOLDER, os.W_OK) and shutil.disk_usage(MEMORY_FOLDER).free > 2 * needed_bytes + 2**28:
            return MEMORY_FOLDER
    return None
