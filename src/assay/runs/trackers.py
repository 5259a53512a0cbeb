"""What follows a run: experiment trackers, and hooks of users' code.

Trackers are Weights & Biases, Trackio, MLflow and TensorBoard. Each is imported only if it is used. What is written to
the run directory does not depend on them, and their failures do not end a run.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from assay.config import LogConfig
from assay.runs.console import finite
from assay.runs.directory import Run, flattened
from assay.runs.files import json_line, read_json, write_json
from assay.types import Group, Rollout, UserError, describe_error, describe_user_error, hide_credentials, missing_extra

IDS = "trackers.json"  # in the run directory: the id of the run in each tracker, for a resumed run
COLUMNS = ("step", "prompt", "completion", "answer", "reward", "status")  # of the table of rollouts
Table = Sequence[Sequence[Any]]  # rows with `COLUMNS`
MLFLOW_BATCH = 100  # parameters per request, the maximum
MLFLOW_VALUE = 500  # characters of a parameter


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_rollouts(self, step: int, table: Table) -> None: ...

    def close(self, failed: bool) -> None: ...


class WandbTracker:
    """A run in a W&B project. A resumed run continues its curves."""

    def __init__(self, project: str, run: Run) -> None:
        import wandb

        entity, _, name = project.rpartition("/")
        try:
            self._run = wandb.init(
                entity=entity or None,
                project=name,
                name=run.name,
                id=stored_id(run, "wandb", lambda: f"{run.name}-{secrets.token_hex(4)}"),
                dir=str(run.path),
                config=settings_of(run),
                resume="allow",
            )
        except wandb.Error as error:
            raise UserError(f"Weights & Biases did not start: {error}; log in, or unset log.wandb") from error
        # A separate step axis: the step of W&B must never decrease, and a warm start has its own step numbers.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def log_rollouts(self, step: int, table: Table) -> None:
        import wandb

        self._run.log({"step": step, "rollouts": wandb.Table(columns=list(COLUMNS), data=[list(row) for row in table])})

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioTracker:
    """A run in a project of Trackio, which stores it on this machine (see TRACKIO_DIR)."""

    def __init__(self, project: str, run: Run) -> None:
        import trackio

        name = stored_id(run, "trackio", lambda: f"{run.name}-{secrets.token_hex(4)}")
        self._run = trackio.init(project, name=name, config=settings_of(run), resume="allow", embed=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_rollouts(self, step: int, table: Table) -> None:
        import trackio

        self._run.log({"rollouts": trackio.Table(columns=list(COLUMNS), data=[list(row) for row in table])}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


class MlflowTracker:
    """A run in an MLflow experiment that is named after the task. `uri`: of a server, a database or a folder."""

    def __init__(self, uri: str, run: Run) -> None:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        settings = settings_of(run)
        try:
            self._client = MlflowClient(uri)
            self._id = stored_id(run, "mlflow", lambda: self._create(run, settings))
            self._client.update_run(self._id, status="RUNNING")  # also of a resumed run
        except (MlflowException, OSError) as error:
            raise UserError(f"MLflow did not start: {describe_error(error)}; check or unset log.mlflow") from error

    def _create(self, run: Run, settings: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        name = str(settings.get("task", {}).get("name") or "assay")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        run_id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
        values = [Param(key, str(value)[:MLFLOW_VALUE]) for key, value in flattened(settings).items()]
        for start in range(0, len(values), MLFLOW_BATCH):
            self._client.log_batch(run_id, params=values[start : start + MLFLOW_BATCH])
        return run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        values = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=values)

    def log_rollouts(self, step: int, table: Table) -> None:
        text = "".join(json_line(dict(zip(COLUMNS, row, strict=True))) for row in table)
        self._client.log_text(self._id, text, f"rollouts/step-{step:06d}.jsonl")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class TensorBoardTracker:
    """Event files in the run's `tensorboard` folder."""

    def __init__(self, _: str, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        steps = [row["step"] for row in run.read_metrics()]
        # After a resume, old points of repeated steps are hidden.
        purge = max(steps) + 1 if steps else None
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_rollouts(self, step: int, table: Table) -> None:
        text = json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in table], indent=2, default=str)
        self._writer.add_text("rollouts", f"```json\n{text}\n```", step)

    def close(self, failed: bool) -> None:
        self._writer.close()


# By setting of [log]: title, package and class.
TRACKERS: dict[str, tuple[str, str, Callable[[str, Run], Tracker]]] = {
    "wandb": ("Weights & Biases", "wandb", WandbTracker),
    "trackio": ("Trackio", "trackio", TrackioTracker),
    "mlflow": ("MLflow", "mlflow", MlflowTracker),
    "tensorboard": ("TensorBoard", "tensorboard", TensorBoardTracker),
}


@dataclass
class Trackers:
    """All trackers of a run. One that fails is reported and gets nothing more."""

    active: dict[str, Tracker] = field(default_factory=dict)  # by title
    warn: Callable[[str], object] = print
    rollouts: int = 0  # of each step that are logged as a table

    @classmethod
    def start(cls, cfg: LogConfig, run: Run, warn: Callable[[str], object]) -> Trackers:
        check_trackers(cfg)
        active = {title: make(str(value), run) for title, _, make, value in wanted(cfg)}
        return cls(active, warn, cfg.rollouts)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        numbers = {name: value for name in metrics if (value := finite(metrics, name)) is not None}
        self._each(lambda tracker: tracker.log(step, numbers))

    def log_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        """Log rollouts from all parts of the step."""
        answers = [rollout for group in groups for rollout in group.rollouts]
        count = min(self.rollouts, len(answers))
        if count and self.active:
            chosen = [answers[index * len(answers) // count] for index in range(count)]
            table = [row_of(step, answer) for answer in chosen]
            self._each(lambda tracker: tracker.log_rollouts(step, table))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._each(lambda tracker: tracker.close(failed=kind is not None))
        self.active = {}

    def _each(self, send: Callable[[Tracker], None]) -> None:
        for title, tracker in list(self.active.items()):
            try:
                send(tracker)
            except Exception as error:  # a server that cannot be reached raises any exception
                del self.active[title]
                self.warn(f"{title} failed and gets no more metrics ({describe_error(error)}); the run continues")


def row_of(step: int, answer: Rollout) -> list[Any]:
    status = str(answer.verdict.status) if answer.verdict else ""
    return [step, answer.prompt.question, answer.text, str(answer.prompt.answer), answer.reward, status]


def wanted(cfg: LogConfig) -> list[tuple[str, str, Callable[[str, Run], Tracker], Any]]:
    return [(*TRACKERS[name], value) for name in TRACKERS if (value := getattr(cfg, name))]


def check_trackers(cfg: LogConfig) -> None:
    """Raise if a package is missing, before the run directory is created."""
    for title, package, _, _ in wanted(cfg):
        if importlib.util.find_spec(package) is None:
            raise missing_extra(title, package, f"or disable it in log.{package}")


def stored_id(run: Run, tracker: str, make: Callable[[], str]) -> str:
    """The id of the run in a tracker: made once, and kept for resumed runs."""
    ids = read_json(run.path / IDS)
    if tracker not in ids:
        ids[tracker] = make()
        write_json(run.path / IDS, ids)
    return str(ids[tracker])


def settings_of(run: Run) -> dict[str, Any]:
    return tomllib.loads(hide_credentials(run.config_toml))


class RunHandle(Protocol):
    """What hooks may use of a run."""

    @property
    def path(self) -> Path: ...

    def request_stop(self) -> None: ...


class Callback:
    """Base class with all hooks; override those that you need. With several processes, the main one calls them.

    `run.request_stop()` in a hook ends the run after the current step, with a checkpoint, as Ctrl-C does.
    """

    def on_step(self, run: RunHandle, step: int, metrics: Mapping[str, float]) -> None:
        """After each training step, with its metrics."""

    def on_evaluation(self, run: RunHandle, step: int, metrics: Mapping[str, float]) -> None:
        """After each evaluation: "eval/accuracy" during training, "before/accuracy" and "after/accuracy" around it."""

    def on_checkpoint(self, run: RunHandle, step: int, path: Path) -> None:
        """After each checkpoint; `path` is its folder."""

    def on_stop(self, run: RunHandle, summary: Mapping[str, Any]) -> None:
        """When the run ends, with its summary; the summary is empty if the run was stopped or failed."""


Hook = Callback | Callable[[RunHandle, int, Mapping[str, float]], object]


def as_callback(value: Any) -> Callback:
    """A callback, or a function f(run, step, metrics) that is called after each step."""
    if isinstance(value, Callback):
        return value
    if isinstance(value, type) or not callable(value):
        raise UserError(f"a callback must be a function f(run, step, metrics) or an assay.Callback, not {value!r:.80}")
    callback: Any = Callback()
    callback.on_step = value
    return callback


def notify(callbacks: Sequence[Callback], hook: str, *args: Any) -> None:
    """Call a hook of all callbacks. An error in one of them names it."""
    for callback in callbacks:
        function: Callable[..., None] = getattr(callback, hook)
        try:
            function(*args)
        except UserError:
            raise
        except Exception as error:
            name = getattr(function, "__qualname__", hook)
            raise UserError(f"the callback {name} failed: {describe_user_error(error)}") from error
