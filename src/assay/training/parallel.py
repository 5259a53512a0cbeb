"""Training on several ranks: agreement of the ranks, and a policy on many devices.

Experimental: tested with several processes on CPUs (gloo), never on two GPUs.

Ranks compare settings, code, data and weights at the start of a run, and replicas at every save. Otherwise a different
learning rate on one rank would only show in the results, and a different number of steps would make the other ranks
wait forever.

The policy is sharded by tensor parallelism, then by FSDP2 or plain data parallelism. Token weights in the loss
refer to the whole batch, so gradients of data-parallel ranks are summed, not averaged. The optimizer state of a sharded
model is saved by torch.distributed.checkpoint in its safetensors format: each rank writes its shards, and any layout
can read them. Files of full tensors are read in the same way.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor, nn

import assay
from assay.algos import Algorithm
from assay.config import TrainConfig
from assay.config.settings import keys
from assay.mesh import Mesh, init_mesh, local_tensor
from assay.models import Decoder, HFModel, PolicyModel, pick_device
from assay.models.base import digests, fingerprint
from assay.runs.environment import version_of
from assay.types import Prompt, UserError

if TYPE_CHECKING:  # the process of `SubprocessUpdater` imports less without it
    from assay.text import Renderer

MAY_DIFFER = (  # used by rank 0 or one host only
    *("name", "runs_dir", "reward.workers"),
    *("log.wandb", "log.trackio", "log.mlflow", "log.tensorboard", "log.rollouts"),
)
# Hosts may have their own copies of these files: their contents are compared as prompts and tokens.
PATHS = ("model.tokenizer", "task.path", "env.path", "prompt.system_file", "prompt.few_shot_file")
PACKAGES = ("transformers", "tokenizers", "safetensors", "math-verify")
GENERATED = 16  # number of prompts that are compared if prompts are generated on demand
SAME_INPUTS = "give all ranks the same files"


def start_mesh(cfg: TrainConfig) -> Mesh:
    """Create the process grid; settings and code must be equal on all ranks."""
    timeout_s = cfg.parallel.heartbeat_timeout_s
    return init_mesh(
        cfg.parallel.tp, pick_device(cfg.device), lambda: code_versions() | compared_settings(cfg), timeout_s
    )


def check_layout(cfg: TrainConfig, mesh: Mesh, algo: Algorithm) -> None:
    """Raise a `UserError` if these ranks cannot train together with these settings."""
    if cfg.lora.quantize and mesh.dp_size > 1 and cfg.parallel.mode == "fsdp":
        raise UserError("quantized weights cannot be sharded: set parallel.mode = 'ddp', or remove lora.quantize")
    if mesh.world == 1 or cfg.source.name != "async":
        return
    # In asynchronous training, the main rank samples for all others.
    if cfg.engine.name not in ("assay", "vllm", "sglang"):
        raise UserError(
            f"asynchronous training with {mesh.world} processes needs engine servers: set engine.name to assay, vllm "
            "or sglang"
        )
    if mesh.tp_size > 1:
        raise UserError("asynchronous training has no tensor parallelism: set parallel.tp to 1, e.g. with mode 'fsdp'")
    if algo.needs.greedy_rollouts:
        raise UserError(
            f"asynchronous training with {mesh.world} processes has no greedy baselines: use another algo.recipe"
        )


def compared_settings(cfg: TrainConfig) -> dict[str, str]:
    compared = [key for key, _ in keys(TrainConfig) if key not in (*MAY_DIFFER, *PATHS)]
    return {key: repr(value) + hash_of_code(value) for key in compared for value in [attrgetter(key)(cfg)]}


def hash_of_code(value: object) -> str:
    """A hash of the file that a setting such as `my_file.py:reward` names; empty for other settings."""
    file = Path(value.rpartition(":")[0]).expanduser() if isinstance(value, str) and ".py:" in value else None
    return f" (hash {digest([file.read_bytes()])})" if file and file.is_file() else ""


def code_versions() -> dict[str, str]:
    """Versions of Python and of the packages that compute, and a hash of the source files of this package."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    versions |= {name: version_of(name) or "missing" for name in PACKAGES}
    root = Path(assay.__file__).parent
    files = sorted(file for file in root.rglob("*") if file.suffix in (".py", ".c"))
    parts = (part for file in files for part in (file.relative_to(root).as_posix().encode(), file.read_bytes()))
    return {"assay": assay.__version__} | versions | {"hash of assay's source files": digest(parts)}


def check_inputs(mesh: Mesh, prompts: Mapping[str, Sequence[Prompt]], renderer: Renderer, policy: PolicyModel) -> None:
    """Compare the prompts of each split, their tokens, and the weights of `policy`, which is not sharded yet."""
    if mesh.world == 1:
        return
    inputs = {f"{split} prompts": describe_prompts(rows) for split, rows in prompts.items()}
    ids = renderer.all_prompt_ids(next(iter(prompts.values()))[:GENERATED])
    inputs["hash of the first prompts' tokens"] = digest(json.dumps(list(tokens)).encode() for tokens in ids)
    mesh.require_equal(inputs, SAME_INPUTS)
    check_weights(mesh, "model", policy)


def check_weights(mesh: Mesh, name: str, model: nn.Module) -> None:
    """Compare the weights that the ranks have loaded; the model is not sharded yet."""
    if mesh.world > 1:
        weights = fingerprint(model.named_parameters())[:12]
        mesh.require_equal({f"fingerprint of the {name}": weights}, SAME_INPUTS)


def describe_prompts(prompts: Sequence[Prompt]) -> str:
    """Number of prompts and a hash of them."""
    from assay.tasks.base import LazyPrompts

    compared = prompts[:GENERATED] if isinstance(prompts, LazyPrompts) else prompts
    return f"{len(prompts)} (hash {digest(map(canonical, compared))})"


def canonical(prompt: Prompt) -> bytes:
    """The same bytes for the same prompt in every process; objects that JSON cannot represent count by their type."""
    parts = [prompt.id, [dict(message) for message in prompt.messages], prompt.answer, prompt.solution]
    values = [*parts, dict(prompt.fields)]
    return json.dumps(values, skipkeys=True, default=lambda value: type(value).__name__).encode()


def digest(parts: Iterable[bytes]) -> str:
    result = hashlib.blake2b(digest_size=6)
    for part in parts:
        result.update(len(part).to_bytes(8, "big") + part)
    return result.hexdigest()


def check_replicas(tensors: Mapping[str, Tensor], counters: Mapping[str, object], step: int, mesh: Mesh) -> None:
    """Raise unless ranks that hold the same shard of a weight or moment hold the same bits.

    `counters`: progress of the run on this rank, which is compared as well.
    """
    if mesh.world == 1:
        return
    values = {key: repr(value) for key, value in counters.items()}
    parts = ((f"{name} {shard(tensor)}".strip(), local_tensor(tensor)) for name, tensor in tensors.items())
    values |= {key: text.rpartition(":")[2] for key, text in digests(parts).items()}
    mesh.require_equal(
        values,
        f"the checkpoint of step {step} is not written, because ranks no longer train the same model: resume from the "
        "last checkpoint, and test the memory and devices of that host if it happens again",
    )


def shard(tensor: Tensor) -> str:
    """Which shard of a tensor this rank holds, in the same words on all ranks that hold it."""
    grid = getattr(tensor, "device_mesh", None)
    if grid is None:
        return ""
    placements = zip(grid.mesh_dim_names, tensor.placements, strict=True)  # type: ignore[attr-defined]
    return " ".join(f"{name}={grid.get_local_rank(name)}" for name, kind in placements if not kind.is_replicate())


# A policy on many devices

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
        return "ddp"  # quantized weights, and weights of a training process, cannot be sharded
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


def load_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
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
