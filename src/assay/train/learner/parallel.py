"""A policy laid out over many devices: tensor parallelism, then FSDP2 or plain data parallelism across the batch.

The weights in the loss are those of the whole batch already, so gradients of data-parallel ranks are added up, never
averaged.

The optimizer's moments of a model that is split over ranks: each rank writes its parts, any layout reads them.

torch.distributed.checkpoint in its safetensors form: a folder of plain tensors that say where in the whole they belong,
and no pickle. A file of whole tensors is read in the same way.
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from assay.mesh import Mesh, local_tensor
from assay.models import Decoder, HFModel, PolicyModel
from assay.types import UserError

LARGE = 10**9  # parameters; beyond that, a copy of weights, gradients and moments on each GPU is a waste
BUCKET = 1 << 25  # numbers that are added up in one exchange


def parallelise(policy: PolicyModel, mesh: Mesh, mode: str = "auto", dtype: torch.dtype = torch.float32) -> PolicyModel:
    """Leave this rank its part of the policy, the same one. The optimizer has to be made after this.

    `dtype` is that of the computation. All ranks must have loaded the same weights.
    """
    if mesh.tp_size > 1:
        if not isinstance(policy, Decoder):
            raise UserError("parallel.tp is for the Llama and Qwen families: set it to 1 and parallel.mode to 'fsdp'")
        if policy.lora is not None:
            raise UserError("adapters cannot be split by parallel.tp: set it to 1, or lora.rank to 0")
        from assay.models.parallel import shard_decoder

        shard_decoder(policy, mesh)
    if mesh.dp_size > 1 and pick_mode(mode, policy, mesh) == "fsdp":
        shard_data(policy, mesh, dtype)
    return policy


def pick_mode(mode: str, policy: PolicyModel, mesh: Mesh) -> str:
    if mode != "auto":
        return mode
    size = sum(weight.numel() for weight in policy.parameters())
    return "fsdp" if mesh.device.type == "cuda" and size >= LARGE else "ddp"


def shard_data(policy: PolicyModel, mesh: Mesh, dtype: torch.dtype) -> None:
    """FSDP2, a layer at a time. Embedding, last norm and head stay together from the forward to the backward pass."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    assert mesh.device_mesh is not None
    # It warns that gathering a weight of two dimensions takes two exchanges, which is what we want.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    low = dtype == torch.bfloat16
    policy_of_precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    root, layers = anatomy(policy)
    for module in (*layers, root):
        fully_shard(module, mesh=mesh.device_mesh["dp"], mp_policy=policy_of_precision)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other, and a sum is what we want


def anatomy(policy: PolicyModel) -> tuple[nn.Module, list[nn.Module]]:
    """The module whose forward runs everything, and its layers."""
    if isinstance(policy, HFModel):
        kinds = policy.hf._no_split_modules or ()
        return policy.hf, [module for module in policy.hf.modules() if type(module).__name__ in kinds]
    assert isinstance(policy, Decoder)
    return policy, list(policy.model.layers)


def over_data(weight: Tensor) -> bool:
    """Whether FSDP holds this weight: then its gradient is added up, over the data-parallel ranks, as it is made."""
    mesh = getattr(weight, "device_mesh", None)
    return mesh is not None and "dp" in mesh.mesh_dim_names


def in_lockstep(policy: PolicyModel, mesh: Mesh) -> bool:
    """Whether ranks exchange something in the middle of a pass, so that none of them can begin it anew on its own."""
    return mesh.tp_size > 1 or any(over_data(weight) for weight in policy.parameters())


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Add up gradients over the data-parallel ranks, where FSDP has not done so."""
    if mesh.dp_size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for weight in parameters:
        if weight.grad is not None and not over_data(weight):
            by_dtype[weight.grad.dtype].append(local_tensor(weight.grad))
    for gradients in by_dtype.values():
        for bucket in buckets(gradients):
            total = mesh.sum_(torch.cat([gradient.flatten() for gradient in bucket]))
            for gradient, part in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))


def buckets(tensors: list[Tensor]) -> Iterable[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def is_sharded(module: nn.Module) -> bool:
    """Whether this rank holds only parts of some weights."""
    return any(hasattr(weight, "to_local") for weight in module.parameters())


def save_sharded(folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    """All ranks together; what several of them hold is written once."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with on_its_own():
            dcp.save(dict(tensors), storage_writer=writer, process_group=mesh.cpu_group, no_dist=mesh.world == 1)
    except CheckpointException as error:  # it is no Exception, and would pass by everything that handles one
        raise RuntimeError(f"the optimizer's state could not be saved: {error}") from error


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    import torch.distributed.checkpoint as dcp

    found = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in found.items()}  # type: ignore[union-attr]


def load_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
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
