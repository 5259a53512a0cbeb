"""Settings that a run accepts but that the user should know about: without effect, or likely to do harm.

What ranks must have in common: settings, code, data and weights before a run; replicas of weights when it saves.

Without these checks another learning rate on one rank would only show in its results, and another number of steps would
leave the others waiting.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

import assay
from assay.algos import Algorithm, RunFacts, complete_settings
from assay.config import EnvConfig, RewardConfig, TrainConfig
from assay.config.settings import keys
from assay.envs import Env
from assay.mesh import Mesh, init_mesh, local_tensor
from assay.models import PolicyModel, pick_device
from assay.models.fingerprint import digests, fingerprint
from assay.tasks import Task
from assay.tasks.base import LazyPrompts
from assay.text import Renderer
from assay.types import Prompt


def unused_settings(cfg: TrainConfig, algo: Algorithm, task: Task | None = None) -> Iterator[str]:
    """A line for each setting that differs from its default without any effect. `task`: the run's, or its environment.

    A setting of the algorithm has the default of the recipe.
    """
    defaults = {key: field.get_default(call_default_factory=True) for key, field in keys(TrainConfig)}
    defaults |= {f"algo.{name}": value for name, value in complete_settings(cfg.algo.recipe)}
    own = {f"algo.{name}" for name in cfg.algo.model_fields_set}
    for reason, names in (*_without_environment(cfg), *algo.unused(run_facts(cfg, algo)), *_without_judge(task)):
        for name in names:
            is_set = name in own or not name.startswith("algo.")
            if is_set and attrgetter(name)(cfg) != defaults[name]:
                yield f"{name} has no effect: {reason}"


def risky_settings(cfg: TrainConfig, algo: Algorithm) -> Iterator[str]:
    """A line for each setting that harms learning, with what to do about it."""
    if cfg.sampling.top_k or cfg.sampling.top_p < 1 or cfg.sampling.min_p or cfg.sampling.min_new_tokens:
        yield (
            "sampling is truncated (top_k, top_p, min_p or min_new_tokens): importance ratios are inexact; "
            "see sampling/kept_mass"
        )
    yield from algo.warnings(run_facts(cfg, algo))


def run_facts(cfg: TrainConfig, algo: Algorithm) -> RunFacts:
    largest_batch = cfg.train.prompts + cfg.replay.groups
    updates = algo.update_count(largest_batch) * cfg.train.passes
    return RunFacts(episodes=bool(cfg.env.name), updates=updates, replay=cfg.replay.groups > 0)


def _without_environment(cfg: TrainConfig) -> Iterator[tuple[str, Sequence[str]]]:
    if not cfg.env.name:
        yield "no environment is set (env.name)", [f"env.{name}" for name in EnvConfig.model_fields if name != "name"]


def _without_judge(task: Task | None) -> Iterator[tuple[str, Sequence[str]]]:
    """Settings of rewards, for an environment that gives all rewards itself."""
    if isinstance(task, Env) and not task.judged:
        of_pool = ("workers", "timeout_s")
        yield (
            f"all rewards come from {task.name} (one that leaves answers to the judge says so: judged = True)",
            [f"reward.{name}" for name in RewardConfig.model_fields if name not in of_pool],
        )


# Rank 0 alone reads the first; contents of the files below may be copies on each host, and are compared as data.
MAY_DIFFER = ("name", "runs_dir", "reward.workers", "log.wandb", "log.tensorboard")
PATHS = ("model.tokenizer", "task.path", "env.path", "prompt.system_file", "prompt.few_shot_file")
PACKAGES = ("transformers", "tokenizers", "safetensors", "math-verify")
GENERATED = 16  # prompts that are looked at where each has to be made
SAME_INPUTS = "give all ranks the same files"


def start_mesh(cfg: TrainConfig) -> Mesh:
    """The grid of processes, after all of them have shown the same settings and the same code."""
    timeout_s = cfg.parallel.heartbeat_timeout_s
    return init_mesh(cfg.parallel.tp, pick_device(cfg.device), code() | settings(cfg), timeout_s)


def settings(cfg: TrainConfig) -> dict[str, str]:
    compared = [key for key, _ in keys(TrainConfig) if key not in (*MAY_DIFFER, *PATHS)]
    return {key: repr(value) + own_code(value) for key in compared for value in [attrgetter(key)(cfg)]}


def own_code(value: object) -> str:
    """A hash of the file behind a setting such as `my_file.py:reward`."""
    file = Path(value.rpartition(":")[0]).expanduser() if isinstance(value, str) and ".py:" in value else None
    return f" (hash {digest([file.read_bytes()])})" if file and file.is_file() else ""


def code() -> dict[str, str]:
    """Versions of what computes, and a hash of our own source files."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    root = Path(assay.__file__).parent
    files = sorted(file for file in root.rglob("*") if file.suffix in (".py", ".c"))
    parts = (part for file in files for part in (file.relative_to(root).as_posix().encode(), file.read_bytes()))
    return {"assay": assay.__version__} | found | {"hash of assay's source files": digest(parts)}


def check_inputs(mesh: Mesh, prompts: Mapping[str, Sequence[Prompt]], renderer: Renderer, policy: PolicyModel) -> None:
    """The problems of each split, how they become tokens, and the weights: `policy` must still be whole."""
    if mesh.world == 1:
        return
    found = {f"{split} prompts": describe(rows) for split, rows in prompts.items()}
    ids = renderer.all_prompt_ids(next(iter(prompts.values()))[:GENERATED])
    found["hash of the first prompts' tokens"] = digest(json.dumps(list(one)).encode() for one in ids)
    mesh.require_equal(found, SAME_INPUTS)
    check_weights(mesh, "model", policy)


def check_weights(mesh: Mesh, name: str, model: nn.Module) -> None:
    """All ranks have loaded the same weights, which are not yet split between them."""
    if mesh.world > 1:
        found = fingerprint(model.named_parameters())[:12]
        mesh.require_equal({f"fingerprint of the {name}": found}, SAME_INPUTS)


def describe(prompts: Sequence[Prompt]) -> str:
    looked_at = prompts[:GENERATED] if isinstance(prompts, LazyPrompts) else prompts
    return f"{len(prompts)} (hash {digest(map(canonical, looked_at))})"


def canonical(prompt: Prompt) -> bytes:
    """The same bytes for the same problem in any process: objects without a form of their own count by their kind."""
    fields = dict(prompt.fields)
    whole = [prompt.id, [dict(message) for message in prompt.messages], prompt.answer, prompt.solution, fields]
    return json.dumps(whole, skipkeys=True, default=lambda value: type(value).__name__).encode()


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.blake2b(digest_size=6)
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()


def check_replicas(tensors: Mapping[str, Tensor], counts: Mapping[str, object], step: int, mesh: Mesh) -> None:
    """Refuse to go on unless ranks that hold the same part of a weight, or moment, hold the same bits.

    `counts`: where the loop stands on this rank.
    """
    if mesh.world == 1:
        return
    found = {key: repr(value) for key, value in counts.items()}
    parts = ((f"{name} {shard(tensor)}".strip(), local_tensor(tensor)) for name, tensor in tensors.items())
    found |= {key: text.rpartition(":")[2] for key, text in digests(parts).items()}
    mesh.require_equal(
        found,
        f"the checkpoint of step {step} is not written, because ranks no longer train the same model: resume from the "
        "last one, and test the memory and devices of that host if it happens again",
    )


def shard(tensor: Tensor) -> str:
    """Which part of a whole this rank holds; ranks that hold the same one say the same."""
    grid = getattr(tensor, "device_mesh", None)
    if grid is None:
        return ""
    placed = zip(grid.mesh_dim_names, tensor.placements, strict=True)  # type: ignore[attr-defined]
    return " ".join(f"{name}={grid.get_local_rank(name)}" for name, place in placed if not place.is_replicate())
