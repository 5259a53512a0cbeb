"""Logging to Weights & Biases and TensorBoard, which are imported only if they are enabled."""

from __future__ import annotations

import importlib.util
import math
import tomllib
from collections.abc import Mapping
from typing import Any, Protocol

from assay.runs.directory import Run
from assay.types import UserError


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class WandbTracker:
    """Mirrors the metrics to a W&B project."""

    def __init__(self, project: str, run: Run) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("Weights & Biases", "wandb") from error
        settings = tomllib.loads(run.config_toml)
        # With the same id, a resumed run continues its curves.
        try:
            self._run = wandb.init(
                project=project, name=run.name, id=run.name, dir=str(run.path), config=settings, resume="allow"
            )
        except wandb.Error as error:
            raise UserError(f"Weights & Biases did not start: {error}; log in, or unset log.wandb") from error

        # A separate step axis: the step of W&B must never decrease, and a warm start has its own step numbers.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **_numbers(metrics)})

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """Mirrors the metrics to event files in the run's `tensorboard` folder."""

    def __init__(self, run: Run) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("TensorBoard", "tensorboard") from error
        steps = [row["step"] for row in run.read_metrics()]
        # After a resume, old points of repeated steps are hidden.
        purge = max(steps) + 1 if steps else None
        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def make_trackers(wandb_project: str | None, tensorboard: bool, run: Run) -> list[Tracker]:
    """The trackers that are enabled."""
    trackers: list[Tracker] = []
    if wandb_project:
        trackers.append(WandbTracker(wandb_project, run))
    if tensorboard:
        trackers.append(TensorBoardTracker(run))
    return trackers


def check_trackers(wandb_project: str | None, tensorboard: bool) -> None:
    """Raise if a package is missing, before the run directory is created."""
    for title, package, wanted in (
        ("Weights & Biases", "wandb", wandb_project),
        ("TensorBoard", "tensorboard", tensorboard),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise _missing(title, package)


def _missing(title: str, extra: str) -> UserError:
    return UserError(f"{title} is not installed: pip install 'assay[{extra}]', or disable it in log.{extra}")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value) for key, value in metrics.items() if isinstance(value, (int, float)) and math.isfinite(value)
    }
