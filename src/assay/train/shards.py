"""The optimizer's moments of a model that is split over ranks: each rank writes its parts, any layout reads them.

torch.distributed.checkpoint in its safetensors form: a folder of plain tensors that say where in the whole they belong,
and no pickle. A file of whole tensors is read in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from assay.mesh import Mesh


def is_split(module: nn.Module) -> bool:
    """Whether this rank holds only parts of some weights."""
    return any(hasattr(weight, "to_local") for weight in module.parameters())


def save_parts(folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    """All ranks together; what several of them hold is written once."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with on_its_own():
            dcp.save(dict(tensors), storage_writer=writer, process_group=mesh.between, no_dist=mesh.world == 1)
    except CheckpointException as error:  # it is no Exception, and would pass by everything that handles one
        raise RuntimeError(f"the optimizer's state could not be saved: {error}") from error


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    import torch.distributed.checkpoint as dcp

    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in found.items()}  # type: ignore[union-attr]


def load_parts(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`, whole or in parts, from whatever layout was saved. Each rank reads what it needs for itself."""
    import torch.distributed.checkpoint as dcp

    with on_its_own():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


@contextmanager
def on_its_own() -> Iterator[None]:
    """Torch warns of every process that works for itself, also where that is wanted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
