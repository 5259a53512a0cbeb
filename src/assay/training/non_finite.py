"""Losses and gradients that are not finite: diagnosis, dumped batches, and when to abort a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from assay.mesh import Mesh, full_tensor, local_tensor
from assay.models import PolicyModel
from assay.runs import checkpoints, rollouts
from assay.runs.files import write_json
from assay.types import Group, UserError, plural

MAX_NAMES = 5  # parameters listed per fault


@dataclass(frozen=True)
class Fault:
    """An update that was skipped."""

    loss: float
    grad_norm: float
    weights: list[str]  # parameters that are not finite, the first few
    gradients: list[str]  # parameters whose gradient is not finite, the first few

    @property
    def what(self) -> str:
        if self.weights:
            return f"the weight {self.weights[0]}"
        return "the gradient" if math.isfinite(self.loss) else "the loss"


def diagnose_nonfinite(policy: PolicyModel, loss: float, grad_norm: float) -> Fault:
    """Find the parameters that are affected. Call this before the gradients are cleared."""
    named = list(policy.named_parameters())
    gradients = [(name, p.grad) for name, p in named if p.grad is not None]
    affected = [name for name, gradient in gradients if not full_tensor(gradient).isfinite().all()]
    return Fault(loss, grad_norm, weights=_not_finite(named), gradients=affected[:MAX_NAMES])


def dump_batch(run_path: Path, step: int, groups: Sequence[Group], faults: Sequence[Fault]) -> None:
    """Write the faults to `skipped/step-N.json` and the batch to rollout files next to it."""
    path = rollouts.write_rollouts(run_path, step, groups, "skipped")
    write_json(path.with_suffix(".json"), {"step": step, "updates": [asdict(fault) for fault in faults]})


def should_abort(faults: Sequence[Fault], consecutive: int, limit: int) -> bool:
    """Whether to end the run: weights are not finite, or `limit` consecutive steps were skipped (0: no limit)."""
    return any(fault.weights for fault in faults) or (bool(faults) and 0 < limit <= consecutive)


class NonFiniteError(UserError):
    """Ends a run because of values that are not finite. `TrainingRun.active` adds the command that continues it."""


def nonfinite_error(fault: Fault, consecutive: int, run_path: Path | None = None) -> NonFiniteError:
    """The error that ends a run, or a warm start (without `run_path`: its batches are not saved)."""
    how = "is not finite" if fault.weights else f"was not finite for {plural(consecutive, 'step')} in a row"
    batches = "" if run_path is None else f"; the batches are saved in {run_path / 'skipped'}"
    return NonFiniteError(f"{fault.what} {how} (loss {fault.loss:g}, gradient norm {fault.grad_norm:g}{batches})")


def check_finite(tensors: Iterable[tuple[str, Tensor]], mesh: Mesh, step: int) -> None:
    """Refuse to save weights that are not finite. All ranks call this together."""
    if names := [name for names in mesh.all_gather_objects(_not_finite_here(tensors)) for name in names]:
        raise NonFiniteError(f"the weight {names[0]} is not finite after step {step}, which is not saved")


def describe_nonfinite(error: UserError, policy: PolicyModel, step: int) -> str:
    """The values that are not finite and have caused this error; empty if it has another cause.

    Weights that have become NaN are usually noticed by the engine, which cannot sample with them.
    """
    if isinstance(error, NonFiniteError):
        return str(error)
    names = _not_finite_here(policy.named_parameters())
    return f"the weight {names[0]} is not finite after step {step}" if names else ""


def how_to_continue(run_path: Path, key: str, lr: float) -> str:
    """How to resume from the last checkpoint, whose weights are finite (`check_finite`), with a lower learning rate.

    `key`: the setting of the learning rate.
    """
    step = checkpoints.last(run_path)
    start = "from the start" if step is None else f"from the checkpoint of step {step}, whose weights are finite,"
    command = f"assay train --resume {shlex.quote(str(run_path))} --{key} {lr / 10:g}"
    return (
        f"resume {start} with a lower learning rate, e.g. {command}, or with --dtype float32, "
        "and check the model, and custom rewards, advantages or losses"
    )


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [name for name, tensor in tensors if not _is_finite(full_tensor(tensor.detach()))][:MAX_NAMES]


def _not_finite_here(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """As `_not_finite`, for the shards of this rank."""
    return [name for name, tensor in tensors if not _is_finite(local_tensor(tensor.detach()))][:MAX_NAMES]


def _is_finite(weight: Tensor) -> bool:
    """Whether all values are finite. A bias may contain -inf, which blocks a token."""
    finite = weight.isfinite()
    return bool((finite | weight.isneginf() if weight.dim() == 1 else finite).all())
