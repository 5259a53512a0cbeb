"""The learner: advantages, updates, learning rate, dynamic reference; and the supervised warm start."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from assay.algos import Algorithm, Scorers
from assay.config import AlgoConfig, OptimConfig, SftConfig, TrainConfig
from assay.mesh import Mesh, reshard
from assay.models import PolicyModel
from assay.text import Renderer
from assay.training.learner.critic import Critic
from assay.training.learner.optim import lr_factor, make_optimizer
from assay.training.learner.pack import Row
from assay.training.learner.update import Updater
from assay.training.non_finite import nonfinite_error, should_abort
from assay.training.progress import RunState, Schedule
from assay.training.sources import PromptStream
from assay.types import Group, Prompt, UserError


@dataclass
class Learner:
    """Computes advantages and updates the policy. `updater` holds the policy, its optimizer and the reference."""

    cfg: TrainConfig
    algo: Algorithm
    updater: Updater
    schedule: Schedule
    critic: Critic | None = None

    @property
    def policy(self) -> PolicyModel:
        return self.updater.policy

    @property
    def mesh(self) -> Mesh:
        return self.updater.mesh

    def credit(self, groups: list[Group]) -> dict[str, float]:
        """Set the advantages of the groups; the algorithm uses the reference and the critic if it needs them."""
        ref_logprobs = partial(self.updater.ref_logprobs, algo=self.algo)
        return self.algo.credit(groups, Scorers(ref_logprobs, self.critic.values if self.critic else None))

    def update(self, batch: list[Group], state: RunState) -> dict[str, float]:
        """Train one step on groups with advantages. Increments `state.step` and updates a dynamic reference."""
        started = time.perf_counter()
        self.updater.expects_more = not self.schedule.done(state, ahead=1)
        lr = self.learning_rate(state)
        metrics = self.updater.update(batch, self.algo, lr, self.cfg.train.passes)
        if self.critic:
            metrics |= self.critic.learn(batch)
        state.step += 1
        self._update_reference(state.step)
        return metrics | {"time/train": time.perf_counter() - started}

    def _update_reference(self, step: int) -> None:
        """After `step` steps: a moving average of the policies, or a copy of the policy every N steps."""
        cfg = self.cfg.algo
        if cfg.reference_ema:
            self.updater.update_reference(cfg.reference_ema)
        elif cfg.refresh_reference and step % cfg.refresh_reference == 0:
            self.updater.update_reference(0.0)

    def learning_rate(self, state: RunState) -> float:
        cfg = self.cfg.optim
        progress, steps = self.schedule.progress(state), self.schedule.total_steps
        return cfg.lr * cfg.lr_scale * lr_factor(cfg.schedule, progress, steps, cfg.warmup, cfg.min_lr_ratio)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Weights of the policy; weights and optimizer state of the critic."""
        reshard(self.policy)
        return chain(self.policy.named_parameters(), self.critic.tensors().items() if self.critic else ())

    def state_dict(self) -> dict[str, Any]:
        """Everything except tensors, which `checkpoint.save` writes."""
        return {"algorithm": self.algo.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.algo.load_state_dict(saved["algorithm"])


# Minus the mean log-probability of the solution's tokens is REINFORCE with an advantage of 1.
SFT = Algorithm(AlgoConfig(advantage="none", policy_loss="reinforce", aggregate="token"))


class WarmStart:
    """Supervised fine-tuning on worked solutions. A checkpoint stores `step` and the state of `optimizer`."""

    def __init__(
        self,
        updater: Updater,
        renderer: Renderer,
        prompts: Sequence[Prompt],
        cfg: SftConfig,
        seed: int,
        max_skipped: int = 0,
        step: int = 0,
    ) -> None:
        """`max_skipped`: number of consecutive skipped steps that ends the run, as in the training loop; 0: no limit.

        `step`: completed steps of a resumed warm start.
        """
        optim = OptimConfig(name=cfg.optimizer, lr=cfg.lr, matrix_lr=cfg.matrix_lr, weight_decay=cfg.weight_decay)
        self.optimizer = make_optimizer(updater.policy, optim, section="sft")
        self.cfg, self.renderer, self.step, self.max_skipped = cfg, renderer, step, max_skipped
        self.updater = replace(updater, optimizer=self.optimizer, temperature=1.0, expects_more=False)
        self.stream = PromptStream(prompts, seed)
        self.stream.cursor = step * cfg.batch
        self.skipped = 0  # consecutive
        self.paused = False

    @property
    def done(self) -> bool:
        return self.step >= self.cfg.steps

    def run(self) -> Iterator[dict[str, float]]:
        """Train, and yield the metrics of each step, until the warm start is done or `paused` is set.

        Weights and optimizer may be saved only after the iteration: until then they can be in another process.
        """
        self.paused = False
        with self.updater.working():
            while not (self.done or self.paused):
                yield self._train_step()
                if self.skipped and should_abort(self.updater.faults, self.skipped, self.max_skipped):
                    raise nonfinite_error(self.updater.faults[-1], self.skipped)

    def _train_step(self) -> dict[str, float]:
        cfg = self.cfg
        rows = solution_rows(self.stream.next(cfg.batch), self.renderer, self.updater.policy.max_length)
        lr = cfg.lr * lr_factor("linear", self.step, cfg.steps, cfg.warmup)
        sums, norm, skipped = self.updater.step(rows, SFT, lr)
        self.step += 1
        self.skipped = self.skipped + 1 if skipped else 0
        return {
            "sft/loss": float(sums.losses["loss/policy"]),
            "sft/grad_norm": norm,
            "sft/lr": lr,
            "sft/skipped": float(skipped),
        }


def solution_rows(prompts: Sequence[Prompt], renderer: Renderer, max_length: int) -> list[Row]:
    """One row per prompt, whose trained tokens are those of the solution."""
    rows = []
    for prompt in prompts:
        if prompt.worked_text is None:
            raise UserError(
                f"prompt {prompt.id} has no worked solution to train on: set sft.steps = 0, or add solutions"
            )
        ids, mask = renderer.worked_example(prompt)
        if not any(mask[:max_length]):
            raise UserError(
                f"prompt {prompt.id} fills the context of {max_length} tokens, without its solution: remove or shorten "
                "it (fewer few-shot examples?), or raise model.max_length"
            )
        rows.append(Row(ids[:max_length], mask[:max_length], [0.0] * min(len(ids), max_length), 1.0, 0.0))
    weights = SFT.token_weights(torch.tensor([sum(row.trained) for row in rows])).tolist()
    return [replace(row, weight=weight) for row, weight in zip(rows, weights, strict=True)]
