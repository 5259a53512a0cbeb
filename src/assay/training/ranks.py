"""Agreement of ranks: on settings, code, data and weights at the start of a run, on replicas at every save.

Otherwise a different learning rate on one rank would only show in the results, and a different number of steps would
make the other ranks wait forever.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

import assay
from assay.algos import Algorithm
from assay.config import TrainConfig
from assay.config.settings import keys
from assay.mesh import Mesh, init_mesh, local_tensor
from assay.models import PolicyModel, pick_device
from assay.models.base import digests, fingerprint
from assay.runs.directory import version_of
from assay.tasks.base import LazyPrompts
from assay.text import Renderer
from assay.types import Prompt, UserError

MAY_DIFFER = ("name", "runs_dir", "reward.workers", "log.wandb", "log.tensorboard")  # used by rank 0 or one host only
# Hosts may have their own copies of these files: their contents are compared as prompts and tokens.
PATHS = ("model.tokenizer", "task.path", "env.path", "prompt.system_file", "prompt.few_shot_file")
PACKAGES = ("transformers", "tokenizers", "safetensors", "math-verify")
GENERATED = 16  # number of prompts that are compared if prompts are generated on demand
SAME_INPUTS = "give all ranks the same files"


def start_mesh(cfg: TrainConfig) -> Mesh:
    """Create the process grid; settings and code must be equal on all ranks."""
    timeout_s = cfg.parallel.heartbeat_timeout_s
    return init_mesh(cfg.parallel.tp, pick_device(cfg.device), code_versions() | compared_settings(cfg), timeout_s)


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
