"""A checkpoint: the model as a Hugging Face folder, the optimizer's moments, and where the loop stood. No pickle.

With LoRA the model is the merged one, and the adapters lie beside it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from assay.models import PolicyModel, load_adapter, save_adapter, save_model
from assay.models.export import share
from assay.models.lora import adapters_off
from assay.runs import checkpoints
from assay.text import Tokenizer
from assay.types import UserError

ADAPTER = "adapter"  # in a checkpoint: what PEFT loads, and a resumed run with LoRA
BASE = "base"  # in the folder of a run with LoRA: what the adapters belong to
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum")


@dataclass
class State:
    """Where the loop stands. All randomness is keyed by seed and step, so there is no generator state to keep."""

    step: int = 0
    cursor: int = 0  # prompts taken from the stream
    tokens: int = 0  # written by the policy in training so far
    wall_s: float = 0.0  # of everything, over all resumes
    skipped: int = 0  # steps in a row with a loss or gradient that was not finite
    best: dict[str, Any] | None = None  # step and value of the best checkpoint so far
    unmeasured: dict[str, float] | None = None  # metrics so far of a step whose evaluation was left when stopping
    facts: dict[str, Any] = field(default_factory=dict)  # what the summary needs from before, e.g. the warm start


def save(
    run_path: Path, state: State, policy: PolicyModel, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer
) -> None:
    with checkpoints.saving(run_path, state.step) as folder:
        save_model(policy, folder / "model", eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
        tokenizer.save(folder / "model")
        save_file(optimizer_tensors(policy, optimizer), folder / "optimizer.safetensors")
        share(folder / "optimizer.safetensors")
        if policy.lora is not None:
            save_adapter(policy, folder / ADAPTER)
        (folder / "state.json").write_text(json.dumps(asdict(state), indent=1))


def save_base(run_path: Path, policy: PolicyModel, tokenizer: Tokenizer) -> None:
    """Set aside what adapters are trained on: from merged weights it could not be told to the last bit."""
    with adapters_off(policy):
        save_model(policy, run_path / BASE, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    tokenizer.save(run_path / BASE)


def load_adapters(run_path: Path, step: int, policy: PolicyModel) -> None:
    if policy.lora is not None:
        load_adapter(policy, checkpoints.folder(run_path, step) / ADAPTER)


def load_state(run_path: Path, step: int) -> State:
    return State(**json.loads((checkpoints.folder(run_path, step) / "state.json").read_text()))


def load_optimizer(run_path: Path, step: int, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved moments back, by parameter name."""
    tensors = load_file(checkpoints.folder(run_path, step) / "optimizer.safetensors")
    for name, parameter in policy.named_parameters():
        saved = {kind: tensors[f"{name}|{kind}"] for kind in MOMENTS if f"{name}|{kind}" in tensors}
        if any(value.shape != parameter.shape for kind, value in saved.items() if kind != "step"):
            raise UserError(
                f"the checkpoint's optimizer state does not fit the model ({name}): resume with the run's own model"
            )
        if saved:
            # Fused AdamW counts its steps on the device, the plain one on the CPU.
            count_device = parameter.device if optimizer.defaults.get("fused") else torch.device("cpu")
            optimizer.state[parameter] = {
                kind: value.to(count_device if kind == "step" else parameter.device) for kind, value in saved.items()
            }


def optimizer_tensors(policy: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}|{kind}": torch.as_tensor(value).detach().contiguous()
        for name, parameter in policy.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }
