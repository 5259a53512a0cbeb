"""Write and read checkpoints: the model as a Hugging Face folder, optimizer state and progress. No pickle.

With LoRA, `model` is the merged model, and the adapters are saved next to it. A checkpoint can be resumed on any number
of processes, whatever number has saved it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.mesh import Mesh, reshard
from assay.models import PolicyModel, save_adapter, save_model
from assay.models.export import in_shards, shard_plan, write_files
from assay.models.lora import is_adapter
from assay.runs import checkpoints
from assay.runs.files import read_json
from assay.runs.resolve import SETTINGS
from assay.runs.rollouts import read_rollouts, write_rollouts
from assay.text import Tokenizer
from assay.training.learner.critic import Critic
from assay.training.learner.optim import allocate_optimizer_state, optimizer_tensors
from assay.training.parallel import check_replicas, is_sharded, load_tensors, save_sharded, saved_shapes
from assay.training.sources import ReplayBuffer
from assay.types import Group, UserError

STATE = "state.json"  # in a checkpoint: counters and everything else that is neither tensors nor rollouts
WHOLE = "optimizer"  # in a checkpoint: the stem of the file, or files, with optimizer state
FILE_BYTES = 10**9  # approximate size of a file: several files are written, and hashed, in parallel
PARTS = "optimizer"  # in a checkpoint: the folder of optimizer state if the model is sharded over ranks
ADAPTER = "adapter"  # in a checkpoint: LoRA adapters, in the format of PEFT
REFERENCE = "reference"  # in a checkpoint if the reference is dynamic, else in the run directory
REPLAY = "replay"  # in a checkpoint: the replay buffer
QUEUE = "queue"  # in a checkpoint of an asynchronous run: finished groups that are not trained yet
BASE = "base"  # in the directory of a run with LoRA: the model that the adapters were added to
COUNTERS = ("step", "cursor", "tokens", "answers", "skipped")  # entries of the state that are equal on all ranks


def save(
    run_path: Path,
    state: Mapping[str, Any],
    policy: PolicyModel,
    optimizer: torch.optim.Optimizer,
    tokenizer: Tokenizer,
    mesh: Mesh | None = None,
    reference: PolicyModel | None = None,
    replay: ReplayBuffer | None = None,
    critic: Critic | None = None,
    settings: str = "",
    queue: Sequence[Group] = (),
) -> None:
    """Write a checkpoint; all ranks call this together. The model is gathered, optimizer state is written in shards.

    `state`: the content of state.json (`TrainingRun.state_dict`). `reference`: given if it is dynamic; a fixed one is
    stored once, in the run directory. `settings`: as TOML. `queue`: sampled groups that are not trained yet.
    """
    mesh, step = mesh or Mesh(), state["step"]
    reshard(policy)
    moments = optimizer_tensors(policy.named_parameters(), optimizer)
    tensors = {name: value.detach().contiguous() for name, value in moments.items()}
    counters = {f"state.{key}": state[key] for key in COUNTERS if key in state}
    check_replicas(replicated(policy, tensors, reference, critic), counters, step, mesh)
    with saving_together(run_path, step, mesh) as folder:
        write = partial(save_model, shard_bytes=FILE_BYTES, writes=mesh.is_main)
        write(policy, folder / "model", eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
        if policy.lora is not None:
            save_adapter(policy, folder / ADAPTER, writes=mesh.is_main)
        if reference is not None:
            write(reference, folder / REFERENCE)
        if tensors and is_sharded(policy):
            save_sharded(folder / PARTS, tensors, mesh)
        elif mesh.is_main:
            write_files(files_of(tensors, folder))
        if critic is not None:
            critic.save(folder)
        if mesh.is_main and replay is not None:
            replay.save(folder / REPLAY)
        if mesh.is_main and queue:
            (folder / QUEUE).mkdir()
            write_rollouts(folder / QUEUE, 0, list(queue))
        if mesh.is_main:
            tokenizer.save(folder / "model")
            (folder / STATE).write_text(json.dumps(state, indent=1))
            if settings:
                (folder / SETTINGS).write_text(settings, encoding="utf-8")


def replicated(
    policy: PolicyModel, moments: dict[str, Tensor], reference: PolicyModel | None, critic: Critic | None
) -> dict[str, Tensor]:
    """Every tensor of which several ranks may hold the same shard."""
    tensors = dict(policy.named_parameters()) | moments
    if reference is not None:
        reshard(reference)
        tensors |= {f"reference {name}": weight for name, weight in reference.named_parameters()}
    if critic is not None:
        tensors |= {f"critic {name}": value for name, value in critic.tensors().items()}
    return {name: value.detach() for name, value in tensors.items()}


@contextmanager
def saving_together(run_path: Path, step: int, mesh: Mesh) -> Iterator[Path]:
    """`checkpoints.saving` on all ranks: the main rank creates and renames the folder, and all of them write to it."""
    writing: AbstractContextManager[Path] = nullcontext(checkpoints.unfinished(checkpoints.folder(run_path, step)))
    with checkpoints.saving(run_path, step) if mesh.is_main else writing as folder:
        mesh.barrier()  # the folder exists
        yield folder
        mesh.barrier()  # all ranks have written
    mesh.barrier()


def save_base(run_path: Path, policy: PolicyModel, tokenizer: Tokenizer, writes: bool = True) -> None:
    """Save the model that adapters are trained on, which cannot be recovered exactly from merged weights.

    In the widest dtype of its weights: norms may be in float32 where matrices are in bfloat16.
    """
    dtype = None
    if not policy.quantized:
        dtypes = [weight.dtype for name, weight in policy.named_parameters() if not is_adapter(name)]
        dtype = reduce(torch.promote_types, dtypes)
    write = partial(save_model, dtype=dtype, shard_bytes=FILE_BYTES, writes=writes)
    target = run_path / BASE  # written before the first checkpoint; adapters store its fingerprint
    with checkpoints.atomic_folder(target) if writes else nullcontext(target) as folder:
        with policy.adapters_off():
            write(policy, folder, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
        if writes:
            tokenizer.save(folder)


def read_state(run_path: Path, step: int, known: Collection[str]) -> dict[str, Any]:
    """Read state.json, which must have the `known` entries; the entry `source` may be missing or superfluous."""
    file = checkpoints.folder(run_path, step) / STATE
    state = read_json(file)
    if differing := sorted((state.keys() ^ set(known)) - {"source"}):
        raise UserError(
            f"{file} is not the state of a run of this version (missing or unknown: {', '.join(differing[:3])}): "
            "resume from another checkpoint, or with the version that saved it"
        )
    return state


def load_replay(run_path: Path, step: int, replay: ReplayBuffer) -> None:
    """Restore the replay buffer; it stays empty if the checkpoint has none."""
    folder = checkpoints.folder(run_path, step) / REPLAY
    if folder.exists():
        replay.add(list(ReplayBuffer.load(folder)))


def load_queue(run_path: Path, step: int) -> list[Group]:
    """The finished groups of an asynchronous run that were not trained."""
    folder = checkpoints.folder(run_path, step) / QUEUE
    return read_rollouts(folder, 0) if folder.exists() else []


def load_optimizer(run_path: Path, step: int, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    """Restore the optimizer state by parameter name. Each rank reads the shards that it needs."""
    reshard(policy)
    folder = checkpoints.folder(run_path, step)
    source = folder / PARTS if (folder / PARTS).is_dir() else folder
    if tensors := allocate_optimizer_state(policy.named_parameters(), optimizer, saved_shapes(source)):
        load_tensors(source, tensors)


def files_of(tensors: dict[str, Tensor], folder: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    plan = shard_plan(WHOLE, {name: tensor.nbytes for name, tensor in tensors.items()}, FILE_BYTES)
    return in_shards(folder, plan, tensors.items())
