"""A critic: a second network that learns what states are worth, and gives every token an advantage (PPO)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from assay.algos.gae import gae, value_loss
from assay.algos.returns import token_rewards
from assay.config import CriticConfig, TrainConfig
from assay.mesh import Mesh
from assay.models import Decoder, PolicyModel
from assay.models.export import share
from assay.models.logprobs import predictors
from assay.train.pack import Row, pack, split_rows
from assay.types import Group, Rollout, UserError

FILE = "critic.safetensors"  # in a checkpoint: weights and moments


class ValueModel(nn.Module):
    """A trunk of its own, with one number in place of logits; that number is 0 for every state at first."""

    def __init__(self, policy: Decoder) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy)
        first = next(policy.parameters())
        self.head = nn.Linear(policy.spec.hidden, 1, device=first.device, dtype=first.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


@dataclass
class Lesson:
    """What one answer teaches the critic."""

    row: Row
    values: list[float]  # as credit was given by
    returns: list[float]


@dataclass
class Critic:
    model: ValueModel
    cfg: CriticConfig
    token_budget: int
    dtype: torch.dtype = torch.float32
    lessons: list[Lesson] = field(default_factory=list)

    def __post_init__(self) -> None:
        fused = self.model.trunk.device.type in ("cuda", "cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.cfg.lr, weight_decay=0.0, fused=fused)

    @torch.no_grad()
    def start_from(self, policy: PolicyModel) -> None:
        """The policy as reinforcement finds it."""
        self.model.trunk.load_state_dict(policy.state_dict())

    def credit(self, groups: Sequence[Group], prices: Sequence[Sequence[float]] | None = None) -> dict[str, float]:
        """Advantages of tokens in place of those of answers, from rewards that have been set; whitened if so set.

        `prices`: of the tokens of each rollout, where they pay one by one for their divergence.
        """
        every = [rollout for group in groups for rollout in group.rollouts]
        paid = [None] * len(every) if prices is None else prices
        kept = [(one, token_rewards(one, price)) for one, price in zip(every, paid, strict=True) if not one.masked]
        rollouts = [rollout for rollout, _ in kept]
        rows = [Row.of(rollout) for rollout in rollouts]
        self.lessons = []
        for (rollout, rewards), row, values in zip(kept, rows, self.values(rows), strict=True):
            advantages = gae(values, rewards, self.cfg.gamma, self.cfg.gae_lambda)
            rollout.token_advantages = advantages
            returns = [value + advantage for value, advantage in zip(values, advantages, strict=True)]
            self.lessons.append(Lesson(row, values, returns))
        if self.cfg.normalise:
            whiten(rollouts)
        for rollout in rollouts:
            own = rollout.token_advantages or [0.0]
            rollout.advantage = sum(own) / len(own)
        return self._quality()

    def values(self, rows: Sequence[Row]) -> list[list[float]]:
        """Of the state before each token that each row trains."""
        places = {id(row): place for place, row in enumerate(rows)}
        found: list[list[float]] = [[] for _ in rows]
        with torch.no_grad():
            for part in split_rows(rows, self.token_budget, sharing=True):
                split = self._values(part).cpu().split([sum(row.trained) for row in part])
                for row, values in zip(part, split, strict=True):
                    found[places[id(row)]] = values.tolist()
        return found

    def learn(self) -> dict[str, float]:
        """`passes` optimizer steps on what the last `credit` has told."""
        if not self.lessons:
            return {}
        lesson_of = {id(lesson.row): lesson for lesson in self.lessons}
        tokens = sum(len(lesson.values) for lesson in self.lessons)
        total = 0.0
        for _ in range(self.cfg.passes):
            self.optimizer.zero_grad(set_to_none=True)
            for part in split_rows([lesson.row for lesson in self.lessons], self.token_budget, sharing=True):
                own = [lesson_of[id(row)] for row in part]
                values = self._values(part)
                given = values.new_tensor([v for lesson in own for v in lesson.values])
                returns = values.new_tensor([v for lesson in own for v in lesson.returns])
                loss = value_loss(values, given, returns, self.cfg.clip).sum() / tokens
                loss.backward()
                total += float(loss.detach()) / self.cfg.passes
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"critic/loss": total}

    def save(self, folder: Path) -> None:
        save_file(dict(self._tensors()), folder / FILE)
        share(folder / FILE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        if not (folder / FILE).exists():
            raise UserError(f"{folder} has no critic, for the run began without one: start a new run to use one")
        saved = load_file(folder / FILE)
        for name, weight in self.model.named_parameters():
            weight.copy_(saved[name])
            kinds = [key.partition("|")[2] for key in saved if key.startswith(f"{name}|")]
            if kinds:
                self.optimizer.state[weight] = {kind: saved[f"{name}|{kind}"].to(weight.device) for kind in kinds}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.model.named_parameters():
            yield name, weight.detach().contiguous()
            for kind, value in self.optimizer.state.get(weight, {}).items():
                yield f"{name}|{kind}", value.detach().contiguous()

    def _values(self, part: Sequence[Row]) -> Tensor:
        """[M], in float32 at least."""
        trunk = self.model.trunk
        batch = pack(part, trunk.device)
        with torch.autocast(trunk.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            before, _ = predictors(trunk, batch.ids, batch.lengths, batch.trained, batch.shared)
        weight = self.model.head.weight
        return self.model.head(before.to(weight.dtype)).squeeze(-1)

    def _quality(self) -> dict[str, float]:
        """How well values foretold returns, before anything is learnt from these: 1 is perfectly, 0 not at all."""
        values = torch.tensor([v for lesson in self.lessons for v in lesson.values], dtype=torch.float64)
        returns = torch.tensor([v for lesson in self.lessons for v in lesson.returns], dtype=torch.float64)
        if not len(values):
            return {}
        spread = float(returns.var(correction=0))
        explained = 1.0 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
        return {"critic/value_mean": float(values.mean()), "critic/explained_variance": explained}


def whiten(rollouts: Sequence[Rollout]) -> None:
    """Over all tokens: mean 0 and standard deviation 1."""
    every = torch.tensor([v for r in rollouts for v in r.token_advantages or ()], dtype=torch.float64)
    if len(every) < 2:
        return
    mean, scale = float(every.mean()), float(every.std()) + 1e-8
    for rollout in rollouts:
        rollout.token_advantages = [(value - mean) / scale for value in rollout.token_advantages or ()]


def make_critic(cfg: TrainConfig, policy: PolicyModel, mesh: Mesh, dtype: torch.dtype) -> Critic | None:
    """None where the settings have none. To be made before the policy is laid out or compiled."""
    if not cfg.critic.use:
        return None
    limits = {
        f"{mesh.world} processes: start one": mesh.world > 1,
        "train.process = 'separate': leave it out": cfg.train.process == "separate",
        "adapters: set lora.rank = 0": policy.lora is not None,
        "models outside the Llama and Qwen families": not isinstance(policy, Decoder),
        "replay: set replay.groups = 0": cfg.replay.groups > 0,
        "credit by steps: leave out algo.step_credit and algo.discount": bool(cfg.algo.step_credit)
        or cfg.algo.discount not in (None, 1.0),
    }
    for limit in (limit for limit, there in limits.items() if there):
        raise UserError(f"a critic does not go with {limit}, or leave out critic.use")
    assert isinstance(policy, Decoder)
    return Critic(ValueModel(policy), cfg.critic, cfg.train.token_budget, dtype)
