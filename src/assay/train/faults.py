"""Losses and gradients that are not finite: what is known of them, the batch set aside, and when to give up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from assay.mesh import Mesh, full_tensor, local_tensor
from assay.models import PolicyModel
from assay.runs import checkpoints, rollouts
from assay.runs.files import write_json
from assay.types import Group, UserError

NAMED = 5  # parameters that a fault lists


@dataclass(frozen=True)
class Fault:
    """An update that was skipped."""

    loss: float
    grad_norm: float
    weights: list[str]  # parameters that were not finite already, the first few
    gradients: list[str]  # those whose gradient was not

    @property
    def what(self) -> str:
        if self.weights:
            return f"the weight {self.weights[0]}"
        return "the gradient" if math.isfinite(self.loss) else "the loss"


def examine(policy: PolicyModel, loss: float, grad_norm: float) -> Fault:
    """Called while the gradients are still there."""
    named = list(policy.named_parameters())
    return Fault(
        loss,
        grad_norm,
        weights=_not_finite(named),
        gradients=[name for name, p in named if p.grad is not None and not full_tensor(p.grad).isfinite().all()][
            :NAMED
        ],
    )


def set_aside(run_path: Path, step: int, groups: Sequence[Group], faults: Sequence[Fault]) -> None:
    """`skipped/step-N.json` says what went wrong, the rollout files beside it hold the batch."""
    path = rollouts.write_rollouts(run_path, step, groups, "skipped")
    write_json(path.with_suffix(".json"), {"step": step, "updates": [asdict(fault) for fault in faults]})


def hopeless(faults: Sequence[Fault], in_a_row: int, most: int) -> bool:
    """Whether to stop: weights that are not finite never heal, and neither does a run that skips on and on."""
    return any(fault.weights for fault in faults) or (bool(faults) and 0 < most <= in_a_row)


def diagnosis(fault: Fault, in_a_row: int, run_path: Path | None = None, lr: float = 0.0) -> UserError:
    """What went wrong, what to try and, in reinforcement, where the batches are."""
    how = "is not finite" if fault.weights else f"was not finite for {in_a_row} steps in a row"
    remedy = "resume with a lower sft.lr" if run_path is None else resume_command(run_path, lr)
    batches = "" if run_path is None else f"; the batches lie in {run_path / 'skipped'}"
    return UserError(
        f"{fault.what} {how} (loss {fault.loss:g}, gradient norm {fault.grad_norm:g}): {remedy}, or dtype = float32, "
        f"and check weights, reward, advantage or loss where they are your own{batches}"
    )


def check_finite(tensors: Iterable[tuple[str, Tensor]], mesh: Mesh, step: int, run_path: Path, lr: float) -> None:
    """Refuse to save weights that are not finite: no checkpoint ever holds them. All ranks together."""
    here = [name for name, tensor in tensors if not _is_sound(local_tensor(tensor.detach()))]
    if found := [name for names in mesh.all_gather_objects(here[:NAMED]) for name in names]:
        raise UserError(
            f"the weight {found[0]} is not finite after step {step}, which is not saved: {resume_command(run_path, lr)}"
        )


def resume_command(run_path: Path, lr: float) -> str:
    """How to go on from the last checkpoint, whose weights are finite (`check_finite`), with a lower learning rate."""
    step = checkpoints.last(run_path)
    if step is None:
        return "there is no checkpoint yet: check the model, or start again with a lower learning rate"
    return (
        f"resume from the checkpoint of step {step}, whose weights are finite, with a lower learning rate, e.g. "
        f"assay train --resume {run_path} --optim.lr {lr / 10:g}"
    )


def check_loaded(policy: PolicyModel, step: int, run_path: Path) -> None:
    """Refuse to resume from weights that are not finite, which early versions may have saved."""
    if found := _not_finite(policy.named_parameters()):
        finite = [other for other in checkpoints.steps(run_path) if other < step and _is_finite(run_path, other)]
        start = f"assay train {run_path / 'config.toml'} --model run:{run_path}@{finite[-1]}" if finite else ""
        remedy = f"start a new run from the last finite one: {start}" if finite else "no earlier checkpoint is finite"
        raise UserError(f"the weight {found[0]} in the checkpoint of step {step} is not finite; {remedy}")


def _is_finite(run_path: Path, step: int) -> bool:
    files = (checkpoints.folder(run_path, step) / "model").glob("*.safetensors")
    return all(_is_sound(tensor) for file in files for tensor in load_file(file).values())


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, tensor in tensors if not _is_sound(full_tensor(tensor.detach()))][:NAMED]


def _is_sound(weight: Tensor) -> bool:
    """Finite, but for a bias: -inf there is how a model blocks a token."""
    finite = weight.isfinite()
    return bool((finite | weight.isneginf() if weight.dim() == 1 else finite).all())
