"""Adapters on disk: a folder that PEFT loads, and that we load again to the last bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from assay.models.base import PolicyModel
from assay.models.collectives import whole
from assay.models.export import share, write_json
from assay.models.fingerprint import fingerprint
from assay.models.load import read_json
from assay.models.lora import adapted_layers, adapters_off, is_adapter
from assay.types import UserError

PREFIX = "base_model.model."  # what PEFT puts before a weight's own name
WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"  # the fingerprint of the weights that the adapters were trained on


def adapter_weights(policy: PolicyModel) -> dict[str, nn.Parameter]:
    return {PREFIX + name: weight for name, weight in policy.network.named_parameters() if is_adapter(name)}


def save_adapter(policy: PolicyModel, folder: Path, writes: bool = True) -> None:
    """The adapters as a folder that PEFT loads. Where they are split over ranks, all call this and one `writes`."""
    lora = policy.lora
    assert lora is not None, "a policy without adapters"
    tensors = {name: whole(weight.detach()).cpu().contiguous() for name, weight in adapter_weights(policy).items()}
    base = base_fingerprint(policy)
    if not writes:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})  # of several entries safetensors shuffles the order
    share(folder / WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name, _ in adapted_layers(policy.network)}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_json(folder / "adapter_config.json", config)
    write_json(folder / BASE, {"fingerprint": base})


@torch.no_grad()
def load_adapter(policy: PolicyModel, folder: Path) -> None:
    """Put saved adapters back onto the base that they were trained on."""
    weights = adapter_weights(policy)
    with safe_open(folder / WEIGHTS, framework="pt") as stored:
        saved = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (a file, not a dict)
        metadata = stored.metadata() or {}
    if {n: w.shape for n, w in saved.items()} != {n: w.shape for n, w in weights.items()}:
        raise UserError(
            f"the adapters in {folder} have other targets or another rank: use the lora settings of the run"
        )
    base = metadata.get("base")  # where earlier checkpoints have it
    if base is None:
        base = read_json(folder / BASE, f"'{folder / BASE}' is missing: restore it from a backup").get("fingerprint")
    if base != base_fingerprint(policy):
        raise UserError(f"the adapters in {folder} were trained on other base weights than these: put those back")
    for name, weight in weights.items():
        weight.copy_(saved[name])


def base_fingerprint(policy: PolicyModel) -> str:
    with adapters_off(policy):
        return fingerprint(policy.weights())
