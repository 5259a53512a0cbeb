"""Muon: momentum whose matrices are orthogonalised, so that every direction of a matrix moves equally far.

After Keller Jordan's description (https://kellerjordan.github.io/posts/muon). Vectors and embeddings get AdamW.

Which parameter is trained how: optimizers, their schedule, and gradient clipping.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from assay.config import OptimConfig
from assay.mesh import local_tensor
from assay.types import UserError

# Jordan's quintic: steep at zero, so that five rounds take singular values from 0.01 and more to about 1 (0.7 to 1.2).
QUINTIC = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """One optimizer for the whole model: groups of kind "matrix" take Muon's step, all others AdamW's."""

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
            ahead = parameter.grad.lerp(state["momentum"], group["momentum"])  # Nesterov's
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(direction(ahead), alpha=-group["lr"] * reach(parameter.shape))

    def _adamw(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in parameters:
            if not self.state[parameter]:
                counted_on = parameter.device if group["fused"] else "cpu"
                self.state[parameter] |= {
                    "step": torch.zeros((), device=counted_on),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        if states:
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],  # the largest second moments, which only AMSGrad keeps
                [state["step"] for state in states],
                fused=group["fused"],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def reach(shape: torch.Size) -> float:
    """How far to go: a tall matrix is lengthened, so that its output changes as much as that of a square one."""
    return max(1.0, shape[0] / shape[1]) ** 0.5


def direction(update: Tensor) -> Tensor:
    """The orthogonalised update; a sharded one is gathered, since it takes the whole matrix, and sharded again."""
    if not isinstance(update, DTensor):
        return orthogonalised(update)
    mesh = update.device_mesh
    whole = DTensor.from_local(orthogonalised(update.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=update.placements)


def orthogonalised(matrix: Tensor) -> Tensor:
    """Nearly U V' for a matrix U S V', by Newton and Schulz's iteration: an odd polynomial acts on S alone."""
    a, b, c = QUINTIC
    # Half precision is good enough for a direction, and several times as fast where there is hardware for it.
    x = matrix.bfloat16() if matrix.is_cuda and matrix.dtype == torch.float32 else matrix
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / x.norm().clamp(min=torch.finfo(x.dtype).tiny)  # the spectral norm is below Frobenius'
    for _ in range(ROUNDS):
        gram = x @ x.T  # of the shorter side
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.T).to(matrix.dtype)


LAYER = re.compile(r"\.\d+\.")  # in the name of whatever belongs to a layer


def make_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    if cfg.name == "muon" and cfg.matrix_lr is None:
        raise UserError("Muon's steps are of another size than AdamW's: set optim.matrix_lr, e.g. 0.001")
    groups = parameter_groups(model, cfg)
    fused = groups[0]["params"][0].device.type in ("cuda", "cpu")
    if cfg.name == "muon":
        return Muon(groups, cfg.lr, cfg.momentum, cfg.betas, cfg.eps, fused)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=fused)


def make_adamw(
    model: nn.Module, lr: float, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    return make_optimizer(model, OptimConfig(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))


def parameter_groups(model: nn.Module, cfg: OptimConfig) -> list[dict[str, Any]]:
    """Every trained parameter in one group: by kind, which decides on its rate, and by whether it decays.

    Weight decay is for matrices only: decaying norms and biases towards zero makes no sense.
    """
    rates = {"matrix": cfg.matrix_lr, "embedding": cfg.embedding_lr, "head": cfg.head_lr, "rest": None}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():  # a tied head is listed once, as the embedding
        if parameter.requires_grad:
            kind = "embedding" if id(parameter) in embeddings else kind_of(name, parameter)
            found.setdefault((kind, parameter.dim() >= 2), []).append(parameter)
    return [
        {
            "params": parameters,
            "kind": kind,
            "ratio": (rates[kind] or cfg.lr) / cfg.lr,
            "lr": rates[kind] or cfg.lr,
            "weight_decay": cfg.weight_decay if decays else 0.0,
        }
        for (kind, decays), parameters in found.items()
    ]


def kind_of(name: str, parameter: nn.Parameter) -> str:
    if parameter.dim() != 2:
        return "rest"
    return "matrix" if LAYER.search(name) else "head"


def lr_factor(kind: str, step: int, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """The fraction of the learning rate to use in `step` (from 0) of `total`."""
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
    """Give `lr` to all groups; those with a base rate of their own keep its ratio to `optim.lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["ratio"]


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to `max_norm` (0: leave them) and give their norm before that."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads)
    if max_norm > 0:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([local_tensor(grad) for grad in grads], scale)
    return norm


def total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, also where parts of them, or copies, lie on other ranks.

    Squares are added up over the ranks that hold parts, and a copy is counted once. (Torch's own function does not take
    gradients of different layouts together.)
    """
    by_holders: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for grad in grads:
        by_holders[holders(grad)].append(local_tensor(grad))
    if set(by_holders) <= {()}:
        return torch.nn.utils.get_total_norm([local_tensor(grad) for grad in grads])
    total = torch.zeros((), device=local_tensor(grads[0]).device, dtype=grads[0].dtype)
    for groups, parts in by_holders.items():
        square = torch.nn.utils.get_total_norm(parts) ** 2
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    return total.sqrt()


def holders(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks over which a gradient is cut into parts."""
    placements: Any = getattr(grad, "placements", ())
    mesh: Any = getattr(grad, "device_mesh", None)
    assert not any(placement.is_partial() for placement in placements), "a gradient that is still to be added up"
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())
