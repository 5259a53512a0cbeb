"""Muon: momentum whose matrices are orthogonalised, so that every direction of a matrix moves equally far.

After Keller Jordan's description (https://kellerjordan.github.io/posts/muon). Vectors and embeddings get AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

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
