"""Progress and length of a run, and stop requests by signal: Ctrl-C (SIGINT), SIGTERM from a scheduler, SIGHUP from a
closed terminal.

After the first signal, the run finishes its step, saves a checkpoint and ends. If the step takes longer than the grace
time, work that changes no weights (sampling, evaluation) is interrupted. A second Ctrl-C stops the run at once, a third
ends the process. Further SIGTERM or SIGHUP signals are ignored: schedulers repeat them, and a checkpoint may be in
progress. With several ranks, a signal to one of them is enough: the ranks agree between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from assay.config import LoopConfig
from assay.mesh import Mesh
from assay.tasks.base import UNLIMITED
from assay.types import UserError, plural

STOP_EARLY = "stop_early"  # entry of `RunState.facts`: the best evaluation, and the number of evaluations since then


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
    sft_step: int = 0  # completed steps of a warm start that is not finished
    sft_s: float = 0.0  # seconds that these steps took
    facts: dict[str, Any] = field(default_factory=dict)  # entries for the summary, e.g. about the warm start


@dataclass(frozen=True)
class Schedule:
    """Length of a run: a number of steps, or a budget of sampled answers; or less, if it stops early."""

    total_steps: int
    answers_per_step: int = 1
    budget: int = 0  # answers; 0: the number of steps alone decides
    patience: int = 0  # evaluations without improvement after which the run stops early; 0: never

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
        return cls(steps, answers, cfg.budget, cfg.stop_early)

    def done(self, state: RunState, answers: int = 0, ahead: int = 0) -> bool:
        """Whether the run is complete; with `answers` more answers, or `ahead` more steps, where given."""
        complete = state.step + ahead >= self.total_steps or 0 < self.budget <= state.answers + answers
        return complete or bool(self.early_stop(state))

    def record_evaluation(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Count the periodic evaluations since the last one above the interval of the best one before it."""
        if not self.patience:
            return
        best = state.facts.get(STOP_EARLY)
        accuracy, high = metrics["eval/accuracy"], metrics["eval/high"]
        if best is None or accuracy > best["high"]:
            state.facts[STOP_EARLY] = {"step": state.step, "accuracy": accuracy, "high": high, "evaluations": 0}
        else:
            state.facts[STOP_EARLY] = {**best, "evaluations": best["evaluations"] + 1}

    def early_stop(self, state: RunState) -> str:
        """Why the run stops early; empty if it does not."""
        best = state.facts.get(STOP_EARLY)
        if best is None or not 0 < self.patience <= best["evaluations"]:
            return ""
        return (
            f"stopped early (train.stop_early = {self.patience}): {plural(best['evaluations'], 'evaluation')} in a row "
            f"did not exceed {best['high']:.3f}, the upper end of the 95 % interval of step {best['step']} "
            f"(accuracy {best['accuracy']:.3f})"
        )

    def due(self, every: int, state: RunState) -> bool:
        """Whether periodic work is due: every `every` steps (0: never) and at the end of the run."""
        return self.done(state) or (every > 0 and state.step % every == 0)

    def progress(self, state: RunState) -> int:
        """Steps completed before this one; with a budget, the number of steps that the sampled answers amount to."""
        if not self.budget:
            return state.step
        return min((state.answers - 1) // self.answers_per_step, self.total_steps - 1)


T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ECHO_S = 0.3  # launchers forward a signal that the terminal has sent to this process as well: it counts once


class Stopped(KeyboardInterrupt):
    """The run was asked to stop. Not an `Exception`, so that `except Exception` does not catch it."""

    def __init__(self, signum: int, at_once: bool = False) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum, self.at_once = signum, at_once


class Stopping:
    """Records stop requests, and whether the current work can be interrupted."""

    def __init__(self, grace_s: float, mesh: Mesh | None = None) -> None:
        self.grace_s, self.mesh = grace_s, mesh or Mesh()
        self.signum: int | None = None
        self.by_program = False  # whether a callback has asked for it, not a signal
        self._requested_at = 0.0
        self._interruptible = False
        self._watched: tuple[signal.Signals, ...] = ()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle signals until the block ends. Other threads than the main one cannot, and do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._watched = tuple(signum for signum in SIGNALS if not (nohup and signum == signal.SIGHUP))
        before = {signum: signal.signal(signum, self._on_signal) for signum in self._watched}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_grace_timeout)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def request(self) -> None:
        """Ask the run to stop after its current step, as a signal does."""
        if self.signum is None:
            self.signum, self.by_program, self._requested_at = signal.SIGINT, True, time.monotonic()

    def check(self) -> None:
        """Raise `Stopped` if any rank was asked to stop. Called between two steps, on all ranks."""
        signum = self.mesh.max_over_ranks(self.signum or 0)
        if signum:
            raise Stopped(signum)

    def interruptible(self, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None if it was interrupted, which can happen once the grace time is over.

        `work` must change nothing that is saved, and must not communicate with other ranks. Call `check` afterwards.
        """
        if self.signum is not None and time.monotonic() - self._requested_at >= self.grace_s:
            return None
        try:
            self._interruptible = True
            return work()
        except Stopped as stopped:
            if stopped.at_once:
                raise
            return None
        finally:
            self._interruptible = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._requested_at = signum, time.monotonic()
            # The timer repeats, in case an exception handler catches the first `Stopped`.
            signal.setitimer(signal.ITIMER_REAL, max(self.grace_s, 1e-6), 1.0)
            # Not through the console: the signal may have arrived while its lock was held.
            with suppress(OSError):
                if self.mesh.is_main:
                    os.write(2, b"\nassay: finishing the step, then saving; another Ctrl-C stops at once\n")
        elif signum == signal.SIGINT and time.monotonic() - self._requested_at > ECHO_S:
            for watched in self._watched:
                signal.signal(watched, signal.SIG_DFL)
            raise Stopped(signum, at_once=True)

    def _on_grace_timeout(self, signum: int, frame: FrameType | None) -> None:
        if self._interruptible and self.signum is not None:
            raise Stopped(self.signum)
