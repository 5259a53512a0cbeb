"""A training run: its settings, its state, and its components. `assay.build.run` creates it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from assay.checks import as_facts
from assay.config import TrainConfig
from assay.config.settings import to_toml
from assay.mesh import Mesh
from assay.models.device import deterministic
from assay.rollout import Collector
from assay.runs import Run, checkpoints
from assay.runs.metrics import draw_curves
from assay.runs.resolve import resume_command
from assay.runs.trackers import Callback, notify
from assay.text import Tokenizer
from assay.training import checkpoint
from assay.training.learner.learner import Learner, WarmStart, freeze_reference
from assay.training.learner.update import NonFiniteError, check_faults, check_finite, not_finite
from assay.training.progress import RunState, Schedule, Stopped, Stopping
from assay.training.recorder import CURVES_PAUSE_S, Recorder, RunEvaluator, memory_metrics, rollout_metrics
from assay.training.sources import OnPolicySource, Replay, SampledGroups
from assay.training.sync import WeightSync
from assay.types import Group, Prompt, UserError, describe_error

T = TypeVar("T")

# With Python's default of 700 there would be dozens of collections per step, each of which visits the rollouts of the
# step: tens of thousands of objects without reference cycles, which are freed without any collection.
GC_THRESHOLD = 50_000
PAUSES_S = (0.5, 10.0)  # shortest and longest pause between two attempts to reach a server, after all have failed
MAX_RECOVERIES = 3  # of the same work: if servers fail on it again and again, it is the cause
CURVES_SHARE = 0.02  # of the time of a run may be spent on drawing curves.png at evaluations
WARM_START_SAVE_S = 300.0  # seconds between two checkpoints of a warm start


@dataclass
class TrainingRun:
    """The state and the components that the training loop works with.

    With several ranks, all of them call every method, and the main rank writes files.
    """

    cfg: TrainConfig
    directory: Run
    schedule: Schedule
    collector: Collector
    source: OnPolicySource
    learner: Learner
    replay: Replay
    weight_sync: WeightSync
    evaluator: RunEvaluator
    recorder: Recorder
    stopping: Stopping
    demonstrations: Sequence[Prompt] = ()  # for the warm start
    warm_start: WarmStart | None = None  # while it is not finished
    state: RunState = field(default_factory=RunState)
    resumed: bool = False  # whether the warm start and the first evaluation are done already
    callbacks: Sequence[Callback] = ()

    @property
    def mesh(self) -> Mesh:
        return self.learner.mesh

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def tokenizer(self) -> Tokenizer:
        return self.collector.renderer.tokenizer

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hold the run directory, judge and environment. A stop request saves a checkpoint and ends the run."""
        with (
            deterministic(self.cfg.train.deterministic, self.mesh.device),
            self.directory,
            self._status(),
            self.recorder.trackers,
            self._explaining_nonfinite(),
            self.collector,
            closing(self.source),
            gc_threshold(GC_THRESHOLD),
            self.stopping.watching(),
        ):
            try:
                yield
            except Stopped as stopped:
                if not stopped.at_once:
                    self._save_unsaved()
                    self._draw_curves()
                    self._notify("on_stop", {})
                raise
            except Exception:
                self._draw_curves()
                self._notify("on_stop", {})
                raise

    @contextmanager
    def _explaining_nonfinite(self) -> Iterator[None]:
        """If values that are not finite end the run, add the command that continues it to the error.

        It resumes from the last checkpoint, whose weights are finite (`check_finite`). Weights that have become NaN are
        usually noticed by the engine, which cannot sample with them.
        """
        try:
            yield
        except UserError as error:
            cfg, step, problem = self.cfg, self.state.step, str(error)
            if not isinstance(error, NonFiniteError):
                if not (names := not_finite(self.learner.policy.named_parameters())):
                    raise
                problem = f"the weight {names[0]} is not finite after step {step}"
            key, lr = ("optim.lr", cfg.optim.lr) if step or not cfg.sft.steps else ("sft.lr", cfg.sft.lr)
            saved = checkpoints.last(self.path)
            start = "the start" if saved is None else f"the checkpoint of step {saved}, whose weights are finite,"
            command = resume_command(self.path)
            if isinstance(error, NonFiniteError) and error.of_term:
                raise UserError(f"{problem}: fix it, and resume from {start} with {command}") from error
            command += f" --{key} {lr / 10:g}"
            raise UserError(
                f"{problem}: resume from {start} with a lower learning rate, e.g. {command}, or with "
                "dtype = 'float32', and check the model, and custom rewards, advantages or losses"
            ) from error

    @contextmanager
    def _status(self) -> Iterator[None]:
        """Record in status.json that the run is running, and how it ends. A process that is killed records nothing."""
        write = partial(self.directory.write_status, total_steps=self.schedule.total_steps)
        if self.mesh.is_main:
            write("running")
        try:
            yield
        except KeyboardInterrupt:
            if self.mesh.is_main:
                write("stopped")
            raise
        except Exception as error:
            # The rank that fails first knows the cause; the others only lose their connection to it.
            with suppress(OSError):
                if self.directory.read_status().get("state") == "running":
                    write("failed", error=str(error) if isinstance(error, UserError) else describe_error(error))
            raise

    def begin(self) -> None:
        """Do what comes before the first step, or finish the last step of a resumed run."""
        if not self.resumed:
            self.weight_sync.verify(self.state.step)
            self._start()
        self.recorder.step_started = time.perf_counter()
        if self.state.unmeasured is not None:  # the evaluation of the last step was interrupted
            self._end_step(self.state.unmeasured)
        self.recorder.console.start(self.schedule.total_steps, self.directory.name, self.state.step)

    def done(self) -> bool:
        return self.schedule.done(self.state)

    def request_stop(self) -> None:
        """End the run after the current step, with a checkpoint."""
        self.stopping.request()

    def _notify(self, hook: str, *args: Any) -> None:
        if self.mesh.is_main:
            notify(self.callbacks, hook, self, *args)

    def sample(self) -> SampledGroups:
        """The groups of the next step, judged and filtered."""
        return self._recovering(lambda: self.source.next(self.state))

    def sync(self) -> dict[str, float]:
        """Copy the policy's weights to the engine, and verify the copy.

        If all servers have failed, the step is recorded without them: whatever needs them next waits for them.
        """
        started = time.perf_counter()
        try:
            metrics = self.weight_sync.sync(self.state.step)
        except UserError:
            if not self._servers_lost():
                raise
            metrics = {}
        return metrics | self.weight_sync.engine.server_metrics() | {"time/sync": time.perf_counter() - started}

    def record(self, sampled: SampledGroups, batch: Sequence[Group], metrics: Mapping[str, float]) -> None:
        """End a step that sampled `sampled` and trained on `batch`: write files; evaluate and save when due."""
        groups, step = sampled.all_groups, self.state.step
        metrics = {**metrics, **rollout_metrics(sampled, self.learner.algo, self.collector.engine.info.capabilities)}
        metrics |= self.learner.algo.end_step(step, groups, metrics) | memory_metrics(self.mesh.device)
        self.recorder.write_rollouts(step, groups)
        self.recorder.dump_faults(self.state, batch, self.learner.updater.faults)
        self._end_step(metrics)

    def finish(self) -> dict[str, Any]:
        """Run the final evaluation, write the summary and the curves. Ranks other than the main one return {}."""
        cfg, state, recorder = self.cfg, self.state, self.recorder
        recorder.console.stop()
        if why := self.schedule.early_stop(state):
            recorder.console.note(why)
        self._save_unsaved()  # a custom loop may end before the last step
        self._measure_and_log("after")
        trains = self.schedule.total_steps > 0
        results = self._recovering(lambda: self.evaluator.results(self.learner.policy, state.step, repeatable=trains))
        if not self.mesh.is_main:
            return {}
        state.facts.get("sft", {}).update(results.pop("warm_start", {}))
        summary = {
            "run": self.directory.name,
            "task": " ".join(filter(None, (cfg.env.name, cfg.task.name))),
            "model": cfg.model.source,
            "algorithm": cfg.algo.recipe if self.schedule.total_steps else "sft",
            "steps": state.step,
            "wall_s": round(time.perf_counter() - recorder.started, 2),
            "train_s": round(recorder.training_seconds(), 2),
            "split": cfg.eval.final_split,
            **results,
            "tokens": state.tokens,
            "answers": state.answers,
            "seed": cfg.seed,
            **({"deterministic": True} if cfg.train.deterministic else {}),
            **state.facts,
            **({"stopped_early": why} if why else {}),
        }
        summary |= as_facts(recorder.diagnose(summary))
        self.directory.write_summary(summary)
        self._draw_curves()
        self.directory.write_status("finished", self.schedule.total_steps)
        self._notify("on_stop", summary)
        return summary

    def save(self, metrics: Mapping[str, float] | None = None) -> None:
        """Write a checkpoint. If `metrics` contain the best evaluation so far, it is marked as the best."""
        path, state, learner = self.path, self.state, self.learner
        show = partial(self.recorder.console.progress, f"saving the checkpoint of step {state.step}")
        show(0, 1)
        best = self.recorder.is_best(metrics or {})
        state.wall_s = time.perf_counter() - self.recorder.started
        if metrics and best:
            state.best = {"step": state.step, "value": metrics["eval/accuracy"]}
        check_finite(learner.named_tensors(), self.mesh, state.step)
        checkpoint.save(
            path,
            self.state_dict(),
            learner.policy,
            self.warm_start.optimizer if self.warm_start else learner.updater.optimizer,
            self.tokenizer,
            self.mesh,
            learner.updater.reference if self.cfg.algo.dynamic_reference else None,
            self.replay.buffer,
            learner.critic,
            to_toml(self.cfg),
            self.source.saved_groups(),
        )
        if self.mesh.is_main:
            if best and state.best:
                checkpoints.set_best(path, **state.best)
            checkpoints.prune(path, self.cfg.save.keep)
        show(1, 1)
        self._notify("on_checkpoint", state.step, checkpoints.folder(path, state.step))

    def state_dict(self) -> dict[str, Any]:
        """The content of `state.json`: everything in a checkpoint except tensors and the replay buffer."""
        parts = {"algorithm": self.learner.algo.state_dict(), "weight_sync": self.weight_sync.state_dict()}
        return asdict(self.state) | self.source.state_dict() | parts

    def load_state_dict(self, saved: Mapping[str, Any], groups: Sequence[Group] = ()) -> None:
        """`groups`: those that the source had saved."""
        self.state = RunState(**{state_field.name: saved[state_field.name] for state_field in fields(RunState)})
        self.source.load_state_dict(saved, groups)
        self.learner.algo.load_state_dict(saved["algorithm"])
        self.weight_sync.load_state_dict(saved["weight_sync"])

    def _start(self) -> None:
        """Do the warm start, if there is one, and the evaluation "before".

        A pretrained model is also evaluated before its warm start ("start"). A run that consists of a warm start only
        is evaluated before it and at the end.
        """
        state, learner, trains = self.state, self.learner, self.schedule.total_steps > 0
        first = state.unmeasured is None and not state.sft_step  # nothing is saved yet
        if learner.policy.lora is not None and first:  # else a checkpoint uses it already
            checkpoint.save_base(self.path, learner.policy, self.tokenizer, self.mesh.is_main)
        if trains and self.cfg.sft.steps and "sft" not in state.facts:  # present if the evaluation was interrupted
            if "start" in self.evaluator.prompts and first:
                self._measure_and_log("start")
            self._sft_warm_start()
        state.unmeasured = {} if trains else None
        if trains or first:
            self._measure_and_log("before")
        if not trains:
            self._sft_warm_start()
        elif learner.algo.needs.reference:
            freeze_reference(learner.updater, self.cfg, self.path)
        if learner.critic is not None:
            learner.critic.start_from(learner.policy)
        state.unmeasured = None
        self.save()

    def begin_warm_start(self) -> WarmStart:
        """Create the warm start, after the steps that are done already."""
        cfg, updater, renderer = self.cfg, self.learner.updater, self.collector.renderer
        self.warm_start = WarmStart(
            updater, renderer, self.demonstrations, cfg.sft, cfg.seed, cfg.train.max_skipped, self.state.sft_step
        )
        return self.warm_start

    def _sft_warm_start(self) -> None:
        """Supervised fine-tuning on the worked solutions of the demonstrations. A stopped or killed one is resumed."""
        state, console, warm_start = self.state, self.recorder.console, self.warm_start or self.begin_warm_start()
        earlier_s, started, metrics = state.sft_s, time.perf_counter(), dict[str, float]()
        console.start(self.cfg.sft.steps, f"{self.directory.name}: warm start", state.sft_step)
        while not warm_start.done:
            save_at = time.perf_counter() + WARM_START_SAVE_S
            for metrics in warm_start.run():
                self.recorder.log_warm_start(warm_start.step, metrics)
                state.sft_step, state.sft_s = warm_start.step, earlier_s + time.perf_counter() - started
                must_pause = self.stopping.signum is not None or time.perf_counter() > save_at
                warm_start.paused = bool(self.mesh.max_over_ranks(int(must_pause)))
            self.stopping.check()
            if not warm_start.done:
                self.save()
        console.stop()
        self.learner.updater.token_budget = warm_start.updater.token_budget
        state.facts["sft"] = {
            "steps": self.cfg.sft.steps,
            "loss": metrics.get("sft/loss"),
            "wall_s": round(state.sft_s, 2),
        }
        self.warm_start, state.sft_step, state.sft_s = None, 0, 0.0
        self.sync()

    def _end_step(self, metrics: dict[str, float]) -> None:
        """Evaluate when due, log, save when due. An interrupted evaluation is repeated by the resumed run."""
        state, recorder = self.state, self.recorder
        state.unmeasured = metrics
        if self.cfg.eval.every and self.schedule.due(self.cfg.eval.every, state):
            metrics = metrics | self._measure("eval")
            self.schedule.record_evaluation(state, metrics)
        state.unmeasured = None
        recorder.log(state, metrics | {"time/step": time.perf_counter() - recorder.step_started})
        self._notify("on_step", state.step, metrics)
        if "eval/accuracy" in metrics:
            self._notify("on_evaluation", state.step, metrics)
        check_faults(self.learner.updater.faults, state.skipped, self.cfg.train.max_skipped, self.path)
        if self.schedule.due(self.cfg.save.every, state) or (self.cfg.save.best and recorder.is_best(metrics)):
            self.save(metrics)
        if "eval/accuracy" in metrics:
            self._draw_curves(if_due=True)
        recorder.step_started = time.perf_counter()

    def _measure(self, label: str) -> dict[str, float]:
        return self._recovering(lambda: self.evaluator.measure(label, self.state.step))

    def _servers_lost(self) -> bool:
        """Whether all servers of the engine have failed, and may come back."""
        return self.mesh.any(self.weight_sync.engine.lost)

    def _recovering(self, work: Callable[[], T]) -> T:
        """The result of `work`, which samples. It is repeated if all servers fail meanwhile and one comes back.

        If none comes back, the run is saved: an interrupted `work` has changed nothing that is saved.
        """
        recoveries = 0
        while True:
            try:
                return work()
            except UserError as error:
                if not self._servers_lost():
                    raise
                if recoveries == MAX_RECOVERIES or not self._recover():
                    self._save_unsaved()
                    command = resume_command(self.path)
                    raise UserError(f"{error}; the run is saved: when its servers run again, use {command}") from error
                recoveries += 1

    def _recover(self) -> bool:
        """Wait until a server has the current weights again; False if none has them in time.

        Groups that were being sampled are sampled again, with the same seeds, as in a resumed run.
        """
        engine = self.weight_sync.engine
        deadline, (pause_s, longest_s) = time.monotonic() + engine.recover_s, PAUSES_S
        self.recorder.console.warn(f"all servers have failed: waiting up to {engine.recover_s:g} s for one of them")
        while True:
            self.stopping.check()
            try:
                engine.update_weights(self.learner.policy, self.state.step)
                self.weight_sync.verify(self.state.step)
                break
            except UserError:
                if not self._servers_lost():
                    raise
            left_s = deadline - time.monotonic()
            if self.mesh.any(left_s < 0):
                return False
            time.sleep(min(pause_s, max(left_s, 0.0)))
            pause_s = min(2 * pause_s, longest_s)
        self.source.load_state_dict(self.source.state_dict(), self.source.saved_groups())
        return True

    def _measure_and_log(self, label: str) -> None:
        metrics = self._measure(label)
        self.recorder.log(self.state, metrics)
        self._notify("on_evaluation", self.state.step, metrics)
        if label != "after":  # `finish` draws
            self._draw_curves(if_due=True)

    def _draw_curves(self, if_due: bool = False) -> None:
        """Draw curves.png. `if_due`: only if the last drawing was long ago. A failure is a warning."""
        recorder, started = self.recorder, time.perf_counter()
        if not self.mesh.is_main or (if_due and started < recorder.curves_due):
            return
        try:
            draw_curves(self.path)
        except Exception as error:  # whatever it is: a picture must not end a run
            recorder.console.warn(f"curves.png could not be drawn ({describe_error(error)})")
        now = time.perf_counter()
        recorder.curves_due = now + max(CURVES_PAUSE_S, (now - started) / CURVES_SHARE)

    def _save_unsaved(self) -> None:
        """Save the last step if that is not done yet. Before any training and evaluation there is nothing to save."""
        saved = self.mesh.broadcast_object(checkpoints.last(self.path))
        begun = saved is not None or self.state.unmeasured is not None
        if (self.warm_start is not None and self.state.sft_step) or (begun and saved != self.state.step):
            self.save()


@contextmanager
def gc_threshold(objects: int) -> Iterator[None]:
    """Raise the threshold of Python's garbage collection; collection that is disabled stays disabled."""
    before = gc.get_threshold()
    gc.set_threshold(max(objects, before[0]) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
