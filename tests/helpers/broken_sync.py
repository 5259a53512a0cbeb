"""Weight syncs that are broken on purpose, for tests of any engine: `break_sync(engine, policy, kind)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from assay.engine import Engine, WeightSource
from assay.models import PolicyModel

# Every kind keeps names and shapes, so that an engine that checks them notices nothing.
KINDS = {
    "skipped": "one weight keeps its value before training",
    "rows": "a block of rows of one weight keeps its value before training",
    "transposed": "a square weight is transposed",
    "late": "every update has the weights of the version before",
    "frozen": "no update is applied",
    "unmerged": "adapters are not merged",
}


def choose_weight(policy: PolicyModel, kind: str) -> str:
    """A weight of the middle layers; a square one, if the kind needs it."""
    matrices = {name: tuple(weight.shape) for name, weight in policy.weights() if weight.dim() == 2}
    names = [name for name, shape in matrices.items() if kind != "transposed" or shape[0] == shape[1]]
    inner = [name for name in names if any(part.isdigit() for part in name.split("."))]
    return inner[len(inner) // 2]


class BrokenWeights:
    """A weight source with a defect. `update(source)` sets the source of the next weights."""

    def __init__(self, policy: PolicyModel, kind: str, name: str = "", first: dict[str, Tensor] | None = None) -> None:
        """`first`: a copy of the weights before the defect begins, if there is one already."""
        assert kind in KINDS, kind
        self.policy, self.kind, self.name = policy, kind, name or choose_weight(policy, kind)
        self.first = first or self.copy(policy)
        self.given = self.first  # of the version before
        self.source: WeightSource = policy

    @staticmethod
    def copy(source: WeightSource) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in source.weights()}

    def update(self, source: WeightSource) -> BrokenWeights:
        self.source = source
        return self

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Iterates over the true weights in any case: ranks gather sharded weights together."""
        before, self.given = self.given, {}
        off = self.kind == "unmerged"
        with self.policy.adapters_off() if off else nullcontext():
            for name, weight in self.source.weights():
                if self.kind == "late":
                    self.given[name] = weight.detach().clone()
                yield name, self.broken(name, weight, before)

    def broken(self, name: str, weight: Tensor, before: dict[str, Tensor]) -> Tensor:
        if self.kind == "late":
            return before[name]
        if self.kind == "frozen":
            return self.first[name]
        if name != self.name or self.kind == "unmerged":
            return weight
        if self.kind == "transposed":
            return weight.t()
        rows = len(weight) if self.kind == "skipped" else max(len(weight) // 4, 1)
        return torch.cat((self.first[name][:rows], weight[rows:]))


def break_sync(engine: Engine, policy: PolicyModel, kind: str, name: str = "") -> BrokenWeights:
    """From now on, all weight updates of this engine are broken. The engine serves the policy's weights already."""
    broken = BrokenWeights(policy, kind, name)
    break_with(engine, broken)
    return broken


def break_with(engine: Engine, broken: BrokenWeights) -> None:
    update = engine.update_weights

    def update_weights(source: WeightSource, version: int) -> None:
        update(broken.update(source), version)

    patched: Any = engine
    patched.update_weights = update_weights
