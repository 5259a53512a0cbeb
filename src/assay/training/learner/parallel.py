"""A policy on many devices: tensor parallelism, then FSDP2 or plain data parallelism; and sharded tensors on disk.

Experimental: tested with several processes on CPUs (gloo), never on two GPUs.

Token weights in the loss are those of the whole batch, so gradients of data-parallel ranks are summed, not averaged.

The optimizer state of a sharded model is saved by torch.distributed.checkpoint in its safetensors format: each rank
writes its shards, and any layout can read them. Files of full tensors are read in the same way.
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

LARGE = 10**9  # parameters from which mode "auto" shards: a full copy per GPU would take too much memory
BUCKET = 1 << 25  # elements per all-reduce


def parallelise(policy: PolicyModel, mesh: Mesh, mode: str = "auto", dtype: torch.dtype = torch.float32) -> PolicyModel:
    """Shard the policy in place; the optimizer must be made afterwards.

    `dtype`: of the computation. All ranks must have loaded the same weights.
    """
    if mesh.tp_size > 1:
        if not isinstance(policy, Decoder):
            raise UserError(
                "parallel.tp is not for models that run through transformers: set it to 1 and parallel.mode to 'fsdp'"
            )
        if policy.lora is not None:
            raise UserError("adapters cannot be sharded by parallel.tp: set it to 1, or lora.rank to 0")
        from assay.models.parallel import shard_decoder

        shard_decoder(policy, mesh)
    if mesh.dp_size > 1 and pick_mode(mode, policy, mesh) == "fsdp":
        shard_data(policy, mesh, dtype)
    return policy


def pick_mode(mode: str, policy: PolicyModel, mesh: Mesh) -> str:
    if mode != "auto":
        return mode
    if policy.quantized or policy.device.type != mesh.device.type:
        return "ddp"  # quantized weights, and those of a training process, cannot be sharded
    size = sum(weight.numel() for weight in policy.parameters())
    return "fsdp" if mesh.device.type == "cuda" and size >= LARGE else "ddp"


def shard_data(policy: PolicyModel, mesh: Mesh, dtype: torch.dtype) -> None:
    """FSDP2 by layer. Embedding, last norm and head stay gathered from the forward to the backward pass."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    assert mesh.device_mesh is not None
    # Hide its warning that gathering a weight that is sharded in two dimensions takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    precision = mixed if dtype == torch.bfloat16 else MixedPrecisionPolicy()
    root, layers = root_and_layers(policy)
    for module in (*layers, root):
        fully_shard(module, mesh=mesh.device_mesh["dp"], mp_policy=precision)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo supports no other, and gradients are summed anyway


def root_and_layers(policy: PolicyModel) -> tuple[nn.Module, list[nn.Module]]:
    """The module whose `forward` computes everything, and its layers."""
    if isinstance(policy, HFModel):
        kinds = policy.hf._no_split_modules or ()
        return policy.hf, [module for module in policy.hf.modules() if type(module).__name__ in kinds]
    assert isinstance(policy, Decoder)
    return policy, list(policy.model.layers)


def is_fsdp(weight: Tensor) -> bool:
    """Whether FSDP shards this weight and therefore sums its gradient over the data-parallel ranks."""
    mesh = getattr(weight, "device_mesh", None)
    return mesh is not None and "dp" in mesh.mesh_dim_names


def in_lockstep(policy: PolicyModel, mesh: Mesh) -> bool:
    """Whether a pass contains collectives, so that a rank cannot repeat it by itself."""
    return mesh.tp_size > 1 or any(is_fsdp(weight) for weight in policy.parameters())


@torch.no_grad()
def sum_gradients(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sum gradients over the data-parallel ranks, except those that FSDP has summed."""
    if mesh.dp_size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for weight in parameters:
        if weight.grad is not None and not is_fsdp(weight):
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
    """Whether this rank holds only shards of some weights."""
    return any(hasattr(weight, "to_local") for weight in module.parameters())


def save_sharded(folder: Path, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    """Write shards; all ranks call this together. Replicated tensors are written once."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with no_warning():
            dcp.save(dict(tensors), storage_writer=writer, process_group=mesh.cpu_group, no_dist=mesh.world == 1)
    except CheckpointException as error:  # a BaseException, which `except Exception` would not catch
        raise RuntimeError(f"the optimizer's state could not be saved: {error}") from error


def saved_shapes(folder: Path) -> dict[str, torch.Size]:
    import torch.distributed.checkpoint as dcp

    metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry.size for name, entry in metadata.items()}  # type: ignore[union-attr]


def load_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill full or sharded tensors from any saved layout. Each rank reads what it needs, without collectives."""
    import torch.distributed.checkpoint as dcp

    with no_warning():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


@contextmanager
def no_warning() -> Iterator[None]:
    """Hide torch's warning about a process that works by itself, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
