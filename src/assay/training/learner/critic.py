"""The critic: a value model and its updates. `assay.algos.credit` computes advantages from its values."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
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
from assay.training.learner.optim import allocate_optimizer_state, clip_gradients, optimizer_tensors
from assay.training.learner.pack import MicroBatch, Row, pack, partition_rows, retry_on_oom, score_rows
from assay.training.parallel import load_tensors, parallelise, sum_gradients
from assay.types import Group, Rollout, UserError

FILE = "critic.safetensors"  # in a checkpoint: weights and optimizer state


class ValueModel(nn.Module):
    """One value per state instead of logits, initially 0.

    The trunk is a copy of the policy's, or, if `shared`, the policy's own.
    """

    def __init__(self, policy: Decoder, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.trunk = policy if shared else copy.deepcopy(policy)
        dtype = torch.promote_types(next(policy.parameters()).dtype, torch.float32)
        self.head = nn.Linear(policy.spec.hidden, 1, device=policy.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the critic's optimizer updates: a shared trunk belongs to the policy's optimizer."""
        return {name: p for name, p in self.named_parameters() if not (self.shared and name.startswith("trunk."))}

    def values(self, hidden: Tensor) -> Tensor:
        """Values [M] of hidden states [M, D], in the head's dtype (float32 or float64)."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


@dataclass
class Critic:
    model: ValueModel
    cfg: CriticConfig
    token_budget: int
    dtype: torch.dtype = torch.float32
    mesh: Mesh = field(default_factory=Mesh)  # every rank gets all rollouts of a step and computes its share

    def __post_init__(self) -> None:
        fused = self.model.trunk.device.type in ("cuda", "cpu")
        parameters = self.model.own_parameters().values()
        # The optimizer cannot update sharded and full weights in one parameter group.
        groups = [[p for p in parameters if hasattr(p, "to_local") is sharded] for sharded in (True, False)]
        parameter_groups = [{"params": group} for group in groups if group]
        self.optimizer = torch.optim.AdamW(parameter_groups, lr=self.cfg.lr, weight_decay=0.0, fused=fused)

    @property
    def shared(self) -> bool:
        """Whether it is updated together with the policy, by `loss` and `step`; otherwise by `learn`."""
        return self.model.shared

    @torch.no_grad()
    def start_from(self, policy: PolicyModel) -> None:
        """Copy the policy's weights to the trunk, after a warm start."""
        if not self.shared:
            reshard(policy)
            for trunk_weight, weight in zip(self.model.trunk.parameters(), policy.parameters(), strict=True):
                trunk_weight.copy_(weight)

    def values(self, rollouts: Sequence[Rollout]) -> list[list[float]]:
        """Values of the states before each trained token, one list per rollout; the bootstrap state's comes last."""
        rows = [self._with_bootstrap(rollout) for rollout in rollouts]
        score = torch.no_grad()(self._values)
        return score_rows(self, self.model.trunk, rows, score, self.model.head.weight.dtype, share_prefixes=True)

    def _with_bootstrap(self, rollout: Rollout) -> Row:
        """The row of a rollout. With `bootstrap`, one for a truncated episode ends with the state that follows it.

        An arbitrary token stands for the next action: only the state before it is valued. A full context has no next
        state.
        """
        row, given = Row.of(rollout), rollout.bootstrap_ids
        if not self.cfg.bootstrap or given is None or len(row.ids) + len(given) >= self.model.trunk.max_length:
            return row
        ids, trained = [*row.ids, *given, row.ids[0]], [*row.trained, *[0] * len(given), 1]
        return Row(ids, trained, [0.0] * len(ids), 0.0, 0.0)

    def loss(self, hidden: Tensor, part: MicroBatch) -> Tensor:
        """Its term of the policy's loss of a micro-batch, with the policy's token weights. `hidden`: of the trunk."""
        each = value_loss(self.model.values(hidden), *self._targets(part), self.cfg.clip)
        return self.cfg.coef * (part.weights * each).sum()

    def step(self, usable: bool = True) -> bool:
        """One optimizer step on its own weights; False if the gradient is not finite. Gradients are set to zero.

        `usable`: False discards the gradient.
        """
        weights = [weight for weight in self.model.own_parameters().values() if weight.grad is not None]
        finite = True
        if usable and weights:  # in a warm start it has no gradient
            sum_gradients(weights, self.mesh)
            finite = math.isfinite(float(clip_gradients(weights, self.cfg.max_grad_norm)))
            if finite:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def learn(self, groups: Sequence[Group]) -> dict[str, float]:
        """Make `passes` optimizer steps on the returns of these groups. A shared trunk was updated with the policy."""
        rollouts = [rollout for group in groups for rollout in group.rollouts if rollout.trained and not rollout.masked]
        if not rollouts or self.shared:
            return {}
        rows = [Row.of(rollout, inputs=(VALUES, RETURNS)) for rollout in rollouts]
        tokens = sum(row.count for row in rows)

        def accumulate() -> float:
            self.step(usable=False)
            total = 0.0
            shares = partition_rows(rows, self.mesh.dp_size, self.mesh.dp_rank, self.token_budget, share_prefixes=True)
            for share in shares:
                part = pack(share, self.model.trunk.device, self.model.head.weight.dtype)
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
        """All ranks call this together: shards are gathered, and the main rank writes."""
        reshard(self.model)
        gathered = ((name, full_tensor(value.detach())) for name, value in self.tensors().items())
        tensors = {name: value.cpu().contiguous() for name, value in gathered if self.mesh.is_main}
        if self.mesh.is_main:
            save_file(tensors, folder / FILE)
            apply_umask(folder / FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """From any saved layout."""
        if not (folder / FILE).exists():
            raise UserError(f"{folder} has no critic, because the run started without one: start a new run to use one")
        reshard(self.model)
        with safe_open(folder / FILE, "pt") as saved:
            shapes = {name: saved.get_slice(name).get_shape() for name in saved.keys()}  # noqa: SIM118
        weights = self.model.own_parameters()
        if any(shapes.get(name) != list(weight.shape) for name, weight in weights.items()):
            raise UserError(f"{folder / FILE} does not fit the model: resume with the run's own model")
        state = allocate_optimizer_state(weights.items(), self.optimizer, shapes)
        load_tensors(folder, {name: weight.detach() for name, weight in weights.items()} | state)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer state, without a shared trunk, which belongs to the policy."""
        reshard(self.model)
        weights = self.model.own_parameters()
        return {**weights, **optimizer_tensors(weights.items(), self.optimizer)}

    def _targets(self, part: MicroBatch) -> tuple[Tensor, Tensor]:
        return part.inputs[VALUES.name], part.inputs[RETURNS.name]

    def _values(self, batch: MicroBatch) -> Tensor:
        trunk = self.model.trunk
        with torch.autocast(trunk.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            before, _ = predictors(trunk, batch.ids, batch.lengths, batch.trained, batch.shared)
        return self.model.values(before)


def make_critic(
    cfg: TrainConfig, algo: Algorithm, policy: PolicyModel, mesh: Mesh, dtype: torch.dtype
) -> Critic | None:
    """None if the algorithm needs no values. Must be called before the policy is sharded or compiled."""
    if not algo.needs.values:
        return None
    shared = cfg.critic.trunk == "shared"
    limits = {
        "train.process = 'separate': leave it out": cfg.train.process == "separate",
        "adapters: set lora.rank = 0, or critic.trunk = 'shared'": policy.lora is not None and not shared,
        "models that run through transformers: choose another model": not isinstance(policy, Decoder),
    }
    for limit in (limit for limit, applies in limits.items() if applies):
        raise UserError(f"a critic cannot be combined with {limit}, or set algo.critic = false")
    assert isinstance(policy, Decoder)
    model = ValueModel(policy, shared)
    if not shared:
        parallelise(model.trunk, mesh, cfg.parallel.mode, dtype)
        model.trunk.recompute = cfg.train.activation_checkpointing in (True, "offload")
        model.trunk.offload = cfg.train.activation_checkpointing == "offload"
    return Critic(model, cfg.critic, cfg.train.token_budget, dtype, mesh)
