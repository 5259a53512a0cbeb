"""Optimizers (AdamW and Muon), learning rates, gradient clipping, and the optimizer's state as named tensors.

Models whose matrices are in bfloat16 are trained by `low_memory.AdamW8bit`.

Muon orthogonalises the momentum of a matrix, so that the update has equal singular values; see Keller Jordan,
https://kellerjordan.github.io/posts/muon. Vectors and embeddings are updated by AdamW.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from assay.config import OptimConfig
from assay.mesh import local_tensor
from assay.models.device import uses_triton
from assay.training.learner.low_memory import AdamW8bit, exact_parts
from assay.types import UserError

# Coefficients of Jordan's quintic: five iterations map singular values above 0.01 to about 1 (0.7 to 1.2).
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
LAYER = re.compile(r"\.\d+\.")  # in the names of parameters that belong to a layer


class Muon(torch.optim.Optimizer):
    """One optimizer for the whole model: Muon for parameter groups of kind "matrix", AdamW for all others."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": 0.0, "fused": fused}
        super().__init__(list(groups), defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is computed before the step"
        for group in self.param_groups:
            (self._muon if group["kind"] == "matrix" else self._adamw)(group)

    def _muon(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(state["momentum"], group["momentum"])  # Nesterov momentum
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            # Above 1 for a tall matrix, so that its output changes as much as that of a square one.
            scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
            parameter.add_(orthogonal_update(update), alpha=-group["lr"] * scale)

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] |= zero_state(parameter, ("step", "exp_avg", "exp_avg_sq"), group["fused"])
        states = [self.state[parameter] for parameter in parameters]
        if states:
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],  # maxima of the second moments, for AMSGrad only
                [state["step"] for state in states],
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                **{name: group[name] for name in ("lr", "weight_decay", "eps", "fused")},
            )


def orthogonal_update(update: Tensor) -> Tensor:
    """The orthogonalised update. A sharded one is gathered, because the whole matrix is needed, and sharded again."""
    if not isinstance(update, DTensor):
        return orthogonalised(update)
    mesh = update.device_mesh
    whole = DTensor.from_local(orthogonalised(update.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=update.placements)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Approximately U V' for a matrix U S V', by the Newton-Schulz iteration: an odd polynomial, applied to S."""
    a, b, c = QUINTIC
    # bfloat16 is precise enough for an update direction, and several times faster on a GPU.
    x = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)  # the Frobenius norm bounds the spectral norm
    for _ in range(ITERATIONS):
        gram = x @ x.T  # of the shorter side
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).to(matrix.dtype)


def make_optimizer(model: nn.Module, cfg: OptimConfig, section: str = "optim") -> torch.optim.Optimizer:
    """`section`: the section of the settings that errors refer to."""
    if cfg.name == "muon" and cfg.matrix_lr is None:
        raise UserError(f"Muon needs a learning rate of its own for matrices: set {section}.matrix_lr, e.g. 0.001")
    groups = parameter_groups(model, cfg)
    if any(parameter.dtype == torch.bfloat16 for group in groups for parameter in group["params"]):
        if cfg.name == "muon":
            key = "optim.name" if section == "optim" else f"{section}.optimizer"
            raise UserError(f"Muon needs weights in float32: set {key} = 'adamw', or optim.precision = 'float32'")
        make_step = None
        if uses_triton(next(model.parameters()).device):
            from assay.training.learner import low_memory_kernels

            make_step = low_memory_kernels.update
        return AdamW8bit(groups, cfg.lr, cfg.betas, cfg.eps, cfg.offload, make_step)
    fused = groups[0]["params"][0].device.type in ("cuda", "cpu")
    if cfg.name == "muon":
        return Muon(groups, cfg.lr, cfg.momentum, cfg.betas, cfg.eps, fused)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=fused)


def parameter_groups(model: nn.Module, cfg: OptimConfig) -> list[dict[str, Any]]:
    """Trained parameters, grouped by kind, which determines the learning rate, and by whether they decay.

    Weight decay applies to matrices only, not to norms and biases.
    """
    rates = {"matrix": cfg.matrix_lr, "embedding": cfg.embedding_lr, "head": cfg.head_lr, "rest": None}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
        if parameter.requires_grad:
            kind = "embedding" if id(parameter) in embeddings else kind_of(name, parameter)
            groups.setdefault((kind, parameter.dim() >= 2), []).append(parameter)
    return [
        {
            "params": parameters,
            "kind": kind,
            "ratio": (rates[kind] or cfg.lr) / cfg.lr,
            "lr": rates[kind] or cfg.lr,
            "weight_decay": cfg.weight_decay if decays else 0.0,
        }
        for (kind, decays), parameters in groups.items()
    ]


def kind_of(name: str, parameter: nn.Parameter) -> str:
    if parameter.dim() != 2:
        return "rest"
    return "matrix" if LAYER.search(name) else "head"


def lr_factor(kind: str, step: int, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """The factor of the base learning rate in `step` (from 0) of `total`."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    if kind == "linear":
        return 1.0 - (1.0 - final) * done
    if kind == "cosine":
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))
    assert kind == "constant", kind
    return 1.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate; parameter groups with a rate of their own keep its ratio to `optim.lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["ratio"]


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to the norm `max_norm` (0: do not); returns their norm before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads)
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_tensor(grad) for grad in grads], scale)
    return norm


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, also if some are sharded over ranks or replicated.

    Squares are summed over the ranks that hold shards. (Torch's own function does not accept gradients of different
    layouts together.)
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_groups[shard_groups(grad)].append(local_tensor(grad))
    if set(by_groups) <= {()}:
        if any(grad.dtype.itemsize < 4 for grad in grads):
            return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]).norm()
        return torch.nn.utils.get_total_norm([local_tensor(grad) for grad in grads])
    total = torch.zeros((), device=local_tensor(grads[0]).device, dtype=grads[0].dtype)
    for groups, parts in by_groups.items():
        square = torch.nn.utils.get_total_norm(parts) ** 2
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    return total.sqrt()


def shard_groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups over which a gradient is sharded."""
    placements: Any = getattr(grad, "placements", ())
    mesh: Any = getattr(grad, "device_mesh", None)
    assert not any(placement.is_partial() for placement in placements), "a gradient that was not reduced"
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())


def optimizer_tensors(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The optimizer's state, with names such as `lm_head.weight|exp_avg`, and what a model in bfloat16 lacks."""
    return {
        f"{name}|{kind}": value
        for name, parameter in parameters
        for kind, value in (exact_parts(parameter, optimizer) | optimizer.state.get(parameter, {})).items()
    }


def allocate_optimizer_state(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, saved: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Create the state whose names and shapes were saved, as zeros; returns the tensors by name, to be filled."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for key in saved:
        name, _, kind = key.partition("|")
        if kind:
            kinds[name].add(kind)
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters:
        if not kinds[name]:
            continue
        exact, state = exact_parts(parameter, optimizer), new_state(parameter, optimizer)
        if kinds[name] - exact.keys() not in (set(), state.keys()) or not exact.keys() <= kinds[name]:
            raise UserError(
                f"the checkpoint's optimizer state is that of another optimizer ({name} has "
                f"{', '.join(sorted(kinds[name]))}): resume with the run's own optim.name and optim.precision"
            )
        if kinds[name] - exact.keys():
            optimizer.state[parameter] = state
            exact = exact | state
        if any(tuple(saved[f"{name}|{kind}"]) != tuple(value.shape) for kind, value in exact.items()):
            raise UserError(
                f"the checkpoint's optimizer state does not fit the model ({name}): resume with the run's own model"
            )
        tensors |= {f"{name}|{kind}": value.detach() for kind, value in exact.items()}
    return tensors


def new_state(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of a parameter before its first step."""
    if isinstance(optimizer, AdamW8bit):
        return optimizer.new_state(parameter)
    kinds = ["step", "exp_avg", "exp_avg_sq"]
    if isinstance(optimizer, Muon):
        matrices = (p for group in optimizer.param_groups if group["kind"] == "matrix" for p in group["params"])
        if any(parameter is matrix for matrix in matrices):
            kinds = ["momentum"]
    return zero_state(parameter, kinds, bool(optimizer.defaults.get("fused")))


def zero_state(parameter: nn.Parameter, kinds: Iterable[str], fused: bool) -> dict[str, Tensor]:
    """Fused AdamW counts its steps on the device, the plain one on the CPU."""
    step_device = parameter.device if fused else torch.device("cpu")
    return {
        kind: torch.zeros((), device=step_device) if kind == "step" else torch.zeros_like(parameter) for kind in kinds
    }
