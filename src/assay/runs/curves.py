"""Plots of the metrics of a run: curves.png, and logging to Weights & Biases and TensorBoard.

The plotting packages are imported only if they are used.
"""

from __future__ import annotations

import importlib.util
import math
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from assay.runs.console import FINAL_LABELS, finite
from assay.runs.directory import Run, read_metrics
from assay.runs.files import atomic_write, read_json
from assay.types import UserError, missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCURACY = "eval/accuracy"
_INK, _MUTED, _GRID = "#22303c", "#6b7885", "#e6eaee"
_LINE, _ACCENT = "#2f6db5", "#d9622b"


@dataclass(frozen=True)
class Panel:
    metric: str
    title: str
    share: bool = False  # a fraction from 0 to 1, shown in per cent
    smooth: bool = True
    by_time: bool = False  # against minutes since the start, not against steps

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, "before/accuracy", "after/accuracy") if self.metric == ACCURACY else (self.metric,)


PANELS = (
    Panel("reward/mean", "Reward (mean)"),
    Panel(ACCURACY, "Evaluation accuracy (95 % interval)", share=True),
    Panel(ACCURACY, "Evaluation accuracy, by time", share=True, by_time=True),
    Panel("length/mean", "Completion length (tokens)"),
    Panel("length/truncated", "Cut off at the length limit", share=True),
    Panel("policy/entropy", "Entropy (nats per token)"),
    Panel("policy/kl", "KL to the reference"),
    Panel("mismatch/logprob_abs_diff", "Engine/trainer log-probability gap"),
    Panel("optim/grad_norm", "Gradient norm"),
    Panel("optim/lr", "Learning rate", smooth=False),
    Panel("time/step", "Seconds per step"),
)


def draw_curves(run_path: Path) -> Path | None:
    """Plot every known metric that was logged. None if there is nothing to plot."""
    rows = read_metrics(run_path)
    panels = [panel for panel in PANELS if _has_points(panel, rows)]
    if not panels:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("matplotlib is not installed: no curves.png", stacklevel=2)
        return None
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.4 * columns, 2.9 * lines + 0.7), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(run_path), x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    splits = _splits(run_path)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        shown = _against_time(rows) if panel.by_time else rows
        _draw_panel(axes, panel, shown, splits)
        span = max(row["step"] for row in shown)
        axes.set_xlim(-0.02 * span, 1.02 * span) if span else None
    path = run_path / "curves.png"
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path


def _has_points(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> bool:
    shown = _against_time(rows) if panel.by_time else rows
    return any(_points(shown, name)[0] for name in panel.metrics)


def _against_time(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with minutes where steps would be; those of the warm start have no time."""
    return [{**row, "step": row["time/wall"] / 60} for row in rows if "time/wall" in row]


def _title(run_path: Path) -> str:
    summary = read_json(run_path / "summary.json")
    facts = [str(summary[key]) for key in ("algorithm", "task") if summary.get(key)]
    facts += [Path(summary["model"]).name] if summary.get("model") else []
    return "  ·  ".join([run_path.resolve().name, *facts]).replace("$", r"\$")


def _splits(run_path: Path) -> tuple[str, str]:
    """Names, in brackets, of the split of periodic evaluations and of the split before and after training."""
    try:
        settings = tomllib.loads((run_path / "config.toml").read_text("utf-8")).get("eval", {})
    except (OSError, ValueError, RecursionError):
        settings = {}
    names = (settings.get(key) for key in ("split", "final_split"))
    periodic, final = (f" ({name})" if name else "" for name in names)
    return periodic, final


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[Mapping[str, Any]], splits: tuple[str, str]) -> None:
    steps, values = _points(rows, panel.metric)
    if panel.metric == ACCURACY:
        _draw_accuracy(axes, rows, *splits)
    elif len(steps) < 3:
        axes.plot(steps, values, color=_LINE, linewidth=1.8, marker="o", markersize=4)
    elif panel.smooth:
        axes.plot(steps, values, color=_LINE, linewidth=0.9, alpha=0.35)
        axes.plot(steps, _smooth(values), color=_LINE, linewidth=1.9)
    else:
        axes.plot(steps, values, color=_LINE, linewidth=1.9)
    axes.set_title(panel.title, loc="left", fontsize=9.5, color=_INK)
    axes.set_xlabel("minutes" if panel.by_time else "step", fontsize=8, color=_MUTED)
    axes.tick_params(labelsize=8, colors=_MUTED, length=0)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    if panel.share:
        from matplotlib.ticker import PercentFormatter

        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.metric == "optim/lr":
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:.1e}")


def _draw_accuracy(axes: Axes, rows: Sequence[Mapping[str, Any]], periodic: str, final: str) -> None:
    """Plot periodic evaluations as a line with a band, and those before and after, on another split, as bars."""
    steps, values = _points(rows, ACCURACY)
    if steps:
        axes.plot(steps, values, color=_ACCENT, linewidth=1.8, marker="o", markersize=4, label="periodic" + periodic)
    bounds = _bounds(rows, "eval")
    if bounds:
        lows, highs = zip(*bounds.values(), strict=True)
        axes.fill_between(list(bounds), lows, highs, color=_ACCENT, alpha=0.15, linewidth=0)
    for name in FINAL_LABELS:
        steps, values = _points(rows, f"{name}/accuracy")
        label = "before and after" + final if steps and name == "before" else None
        axes.plot(steps, values, color=_INK, linestyle="", marker="D", markersize=5, label=label)
        for step, (low, high) in _bounds(rows, name).items():
            axes.plot([step, step], [low, high], color=_INK, linewidth=1.3)
    axes.legend(frameon=False, fontsize=8, labelcolor=_MUTED, loc="lower right")


def _bounds(rows: Sequence[Mapping[str, Any]], name: str) -> dict[float, tuple[float, float]]:
    """Interval by step, if both of its bounds were logged."""
    low, high = (dict(zip(*_points(rows, f"{name}/{end}"), strict=True)) for end in ("low", "high"))
    return {step: (low[step], high[step]) for step in sorted(low.keys() & high.keys())}


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of the metric, if it is finite. If a step has several values, the last one counts."""
    points = {row["step"]: value for row in rows if (value := finite(row, metric)) is not None}
    ordered = sorted(points.items())
    return [step for step, _ in ordered], [value for _, value in ordered]


def _smooth(values: Sequence[float]) -> list[float]:
    """Moving average over about a twentieth of the run."""
    reach = len(values) // 40
    windows = [values[max(index - reach, 0) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]


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
    trackers: list[Tracker] = [WandbTracker(wandb_project, run)] if wandb_project else []
    return [*trackers, TensorBoardTracker(run)] if tensorboard else trackers


def check_trackers(wandb_project: str | None, tensorboard: bool) -> None:
    """Raise if a package is missing, before the run directory is created."""
    for title, package, wanted in (
        ("Weights & Biases", "wandb", wandb_project),
        ("TensorBoard", "tensorboard", tensorboard),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise _missing(title, package)


def _missing(title: str, extra: str) -> UserError:
    return missing_extra(title, extra, f"or disable it in log.{extra}")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name in metrics if (value := finite(metrics, name)) is not None}
