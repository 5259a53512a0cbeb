"""A critic: a model of the values of states, and its updates. `assay.algos.credit` makes advantages of the values."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from assay.algos import Algorithm
from assay.algos.credit import RETURNS, VALUES, value_loss
from assay.config import CriticConfig, TrainConfig
from assay.mesh import Mesh, full_tensor, reshard
from assay.models import Decoder, PolicyModel
from assay.models.export import apply_umask
from assay.models.logprobs import predictors
from assay.train.learner.optim import clip_gradients
from assay.train.learner.pack import MicroBatch, Row, pack, partition_rows, retry_on_oom
from assay.train.learner.parallel import is_sharded, load_sharded, parallelise, sum_gradients
from assay.types import Group, Rollout, UserError

FILE = "critic.safetensors"  # in a checkpoint: weights and moments


class ValueModel(nn.Module):
    """One number for each state in place of logits, 0 for all of them at first.

    On a trunk of its own, which begins as a copy of the policy's, or on the policy's own.
    """

    def __init__(self, policy: Decoder, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.trunk = policy if shared else copy.deepcopy(policy)
        first = next(policy.parameters())
        self.head = nn.Linear(policy.spec.hidden, 1, device=first.device, dtype=first.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """What the critic's optimizer moves: a shared trunk is the policy's to move."""
        return {name: p for name, p in self.named_parameters() if not (self.shared and name.startswith("trunk."))}

    def values(self, hidden: Tensor) -> Tensor:
        """[M] of hidden states [M, D], in float32 at least."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


@dataclass
class Critic:
    model: ValueModel
    cfg: CriticConfig
    token_budget: int
    dtype: torch.dtype = torch.float32
    mesh: Mesh = field(default_factory=Mesh)  # every rank is handed all answers of a step, and takes its share

    def __post_init__(self) -> None:
        fused = self.model.trunk.device.type in ("cuda", "cpu")
        own = self.model.own_parameters().values()
        # Weights in parts and whole ones cannot be moved in one go.
        groups = [[p for p in own if hasattr(p, "to_local") is in_parts] for in_parts in (True, False)]
        given = [{"params": group} for group in groups if group]
        self.optimizer = torch.optim.AdamW(given, lr=self.cfg.lr, weight_decay=0.0, fused=fused)

    @property
    def shared(self) -> bool:
        """Whether it learns within the policy's updates, by `loss` and `step`; else by itself, in `learn`."""
        return self.model.shared

    @torch.no_grad()
    def start_from(self, policy: PolicyModel) -> None:
        """The policy as reinforcement finds it."""
        if not self.shared:
            reshard(policy)
            for own, weight in zip(self.model.trunk.parameters(), policy.parameters(), strict=True):
                own.copy_(weight)

    def values(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Values of the states before each trained token of each rollout, and of the state after a bootstrapped one."""
        return self.row_values([self._read(rollout) for rollout in rollouts])

    def _read(self, rollout: Rollout) -> Row:
        """What it values; with `bootstrap`, where a limit cut an episode off, also the state that would have followed.

        That is the one before a token which stands for any that could have come next. A full context has no next state.
        """
        row, given = Row.of(rollout), rollout.bootstrap_ids
        if not self.cfg.bootstrap or given is None or len(row.ids) + len(given) >= self.model.trunk.max_length:
            return row
        ids, trained = [*row.ids, *given, row.ids[0]], [*row.trained, *[0] * len(given), 1]
        return Row(ids, trained, [0.0] * len(ids), 0.0, 0.0)

    def row_values(self, rows: Sequence[Row]) -> list[list[float]]:
        """Of the state before each token that each row trains. Ranks share the work, and every one gets all of it."""
        places = {id(row): place for place, row in enumerate(rows)}

        @torch.no_grad()
        def own_share() -> dict[int, list[float]]:
            found = {}
            for part in self._shares(rows):
                split = self._values(self._packed(part)).cpu().split([row.count for row in part])
                for row, values in zip(part, split, strict=True):
                    found[places.get(id(row), -1)] = values.tolist()
            return found

        shares = self.mesh.all_gather_objects(retry_on_oom(self, self.model.trunk, rows, own_share))
        every = {place: values for share in shares for place, values in share.items()}
        return [every[place] for place in range(len(rows))]

    def loss(self, hidden: Tensor, part: MicroBatch) -> Tensor:
        """What it adds to the policy's loss of a micro-batch, weighted as that is; of the trunk's `hidden` states."""
        each = value_loss(self.model.values(hidden), *self._targets(part), self.cfg.clip)
        return self.cfg.coef * (part.weights * each).sum()

    def step(self, usable: bool = True) -> bool:
        """Move its own weights by their gradient, that of all ranks, and forget it. False where that is not finite."""
        own = [weight for weight in self.model.own_parameters().values() if weight.grad is not None]
        finite = True
        if usable and own:  # in a warm start nothing is asked of it
            sum_gradients(own, self.mesh)
            finite = math.isfinite(float(clip_gradients(own, self.cfg.max_grad_norm)))
            if finite:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """`passes` optimizer steps on the returns of these groups; a shared trunk has learnt them with the policy."""
        rollouts = [one for group in groups for one in group.rollouts if one.trained and not one.masked]
        if not rollouts or self.shared:
            return {}
        rows = [Row.of(rollout, inputs=(VALUES, RETURNS)) for rollout in rollouts]
        tokens = sum(row.count for row in rows)

        def accumulate() -> float:
            self.step(usable=False)
            total = 0.0
            for part in map(self._packed, self._shares(rows)):
                loss = value_loss(self._values(part), *self._targets(part), self.cfg.clip).sum() / tokens
                loss.backward()
                total += float(loss.detach())
            return total

        total, skipped = 0.0, 0
        for _ in range(self.cfg.passes):
            total += retry_on_oom(self, self.model.trunk, rows, accumulate) / self.cfg.passes
            skipped += not self.step()
        if skipped:
            warnings.warn(f"the critic's gradient is not finite: {skipped} of its updates were skipped", stacklevel=2)
        loss = sum(self.mesh.all_gather_objects(total)) / self.mesh.tp_size
        return {"critic/loss": loss, "critic/skipped": float(skipped)}

    def save(self, folder: Path) -> None:
        """All ranks together: what lies in parts is gathered, and the main one writes it."""
        reshard(self.model)
        gathered = ((name, full_tensor(value.detach())) for name, value in self.tensors())
        tensors = {name: value.cpu().contiguous() for name, value in gathered if self.mesh.is_main}
        if self.mesh.is_main:
            save_file(tensors, folder / FILE)
            apply_umask(folder / FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """From whatever layout was saved."""
        if not (folder / FILE).exists():
            raise UserError(f"{folder} has no critic, for the run began without one: start a new run to use one")
        reshard(self.model)
        with safe_open(folder / FILE, "pt") as saved:
            for name, weight in self.model.own_parameters().items():
                kinds = [key.partition("|")[2] for key in saved.keys() if key.startswith(f"{name}|")]  # noqa: SIM118
                if kinds:
                    count = torch.zeros((), device=weight.device)  # of steps
                    state = {kind: count.clone() if kind == "step" else torch.zeros_like(weight) for kind in kinds}
                    self.optimizer.state[weight] = state
            wanted = {name: value.detach() for name, value in self.tensors()}
            if is_sharded(self.model):
                load_sharded(folder, wanted)
                return
            for name, value in wanted.items():
                value.copy_(saved.get_tensor(name))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights and moments; a shared trunk's are the policy's."""
        reshard(self.model)
        for name, weight in self.model.own_parameters().items():
            yield name, weight
            for kind, value in self.optimizer.state.get(weight, {}).items():
                yield f"{name}|{kind}", value

    def _targets(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        return part.inputs[VALUES.name], part.inputs[RETURNS.name]

    def _shares(self, rows: Sequence[Row]) -> list[list[Row]]:
        return partition_rows(rows, self.mesh.dp_size, self.mesh.dp_rank, self.token_budget, share_prefixes=True)

    def _packed(self, part: Sequence[Row]) -> MicroBatch:
        return pack(part, self.model.trunk.device, self.model.head.weight.dtype)

    def _values(self, batch: MicroBatch) -> Tensor:
        trunk = self.model.trunk
        with torch.autocast(trunk.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            before, _ = predictors(trunk, batch.ids, batch.lengths, batch.trained, batch.shared)
        return self.model.values(before)


def make_critic(
    cfg: TrainConfig, algo: Algorithm, policy: PolicyModel, mesh: Mesh, dtype: torch.dtype
) -> Critic | None:
    """None where the algorithm has none. To be made before the policy is laid out or compiled."""
    if not algo.needs.values:
        return None
    shared = cfg.critic.trunk == "shared"
    limits = {
        "train.process = 'separate': leave it out": cfg.train.process == "separate",
        "adapters: set lora.rank = 0, or critic.trunk = 'shared'": policy.lora is not None and not shared,
        "models outside the Llama and Qwen families": not isinstance(policy, Decoder),
    }
    for limit in (limit for limit, there in limits.items() if there):
        raise UserError(f"a critic does not go with {limit}, or set algo.critic = false")
    assert isinstance(policy, Decoder)
    model = ValueModel(policy, shared)
    if not shared:
        parallelise(model.trunk, mesh, cfg.parallel.mode, dtype)
        model.trunk.recompute = cfg.train.recompute
    return Critic(model, cfg.critic, cfg.train.token_budget, dtype, mesh)
