"""Progress of a run, as a checkpoint stores it, and the length of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from assay.config import LoopConfig
from assay.tasks.base import UNLIMITED
from assay.types import UserError


@dataclass
class RunState:
    """Counters and facts of a run. Random draws are keyed by seed and step, so there is no generator state to save."""

    step: int = 0  # completed training steps
    tokens: int = 0  # sampled in training
    answers: int = 0  # sampled in training, including those of dropped groups
    wall_s: float = 0.0  # seconds since the start, summed over all sessions
    skipped: int = 0  # consecutive steps with a loss or gradient that was not finite
    best: dict[str, Any] | None = None  # step and value of the best checkpoint so far
    unmeasured: dict[str, float] | None = None  # metrics of a step whose evaluation was interrupted by a stop request
    facts: dict[str, Any] = field(default_factory=dict)  # entries for the summary, e.g. about the warm start


@dataclass(frozen=True)
class Schedule:
    """Length of a run: a number of steps, or a budget of sampled answers."""

    total_steps: int
    answers_per_step: int = 1
    budget: int = 0  # answers; 0: the number of steps alone decides

    @classmethod
    def of(cls, cfg: LoopConfig, prompts: int) -> Schedule:
        """`prompts`: size of the train split."""
        answers = cfg.prompts * cfg.samples
        if cfg.epochs and prompts >= UNLIMITED:
            raise UserError(
                "an endless train split has no epochs: set train.steps, or train.max_train_prompts to bound it"
            )
        steps = cfg.steps
        if cfg.budget:
            steps = -(-cfg.budget // answers)
        elif cfg.epochs:
            steps = -(-int(cfg.epochs * prompts) // cfg.prompts)
        return cls(steps, answers, cfg.budget)

    def done(self, state: RunState, answers: int = 0, ahead: int = 0) -> bool:
        """Whether the run is complete; with `answers` more answers, or `ahead` more steps, where given."""
        return state.step + ahead >= self.total_steps or 0 < self.budget <= state.answers + answers

    def due(self, every: int, state: RunState) -> bool:
        """Whether periodic work is due: every `every` steps (0: never) and at the end of the run."""
        return self.done(state) or (every > 0 and state.step % every == 0)

    def progress(self, state: RunState) -> int:
        """Steps completed before this one; with a budget, the number of steps that the sampled answers amount to."""
        if not self.budget:
            return state.step
        return min((state.answers - 1) // self.answers_per_step, self.total_steps - 1)
