"""Losses and gradients that are not finite: what is known of them, the batch set aside, and when to give up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from assay.models import PolicyModel
from assay.models.collectives import whole
from assay.runs import rollouts
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
        gradients=_not_finite((name, p.grad) for name, p in named if p.grad is not None),
    )


def set_aside(run_path: Path, step: int, groups: Sequence[Group], faults: Sequence[Fault]) -> None:
    """`skipped/step-N.json` says what went wrong, the rollout files beside it hold the batch."""
    path = rollouts.write_rollouts(run_path, step, groups, "skipped")
    write_json(path.with_suffix(".json"), {"step": step, "updates": [asdict(fault) for fault in faults]})


def hopeless(faults: Sequence[Fault], in_a_row: int, most: int) -> bool:
    """Whether to stop: weights that are not finite never heal, and neither does a run that skips on and on."""
    return any(fault.weights for fault in faults) or (bool(faults) and 0 < most <= in_a_row)


def diagnosis(fault: Fault, in_a_row: int, run_path: Path | None = None) -> UserError:
    """What went wrong, what to try and, in reinforcement, where the batches are."""
    key, place = ("sft.lr", "") if run_path is None else ("optim.lr", f"; the batches lie in {run_path / 'skipped'}")
    how = "is not finite" if fault.weights else f"was not finite for {in_a_row} steps in a row"
    return UserError(
        f"{fault.what} {how} (loss {fault.loss:g}, gradient norm {fault.grad_norm:g}): resume with a lower {key} or "
        f"dtype = float32, and check weights, reward, advantage or loss where they are your own{place}"
    )


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, tensor in tensors if not whole(tensor.detach()).isfinite().all()][:NAMED]
