"""Plots of the metrics of a run: curves.png, and comparisons of runs. matplotlib is imported only if it is used.

What the metrics mean is listed in docs/reference/metrics.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.runs.console import FINAL_LABELS, finite, one_line
from assay.runs.directory import RunFiles, read_metrics
from assay.runs.files import atomic_write, read_json


def non_finite_terms(metrics: Mapping[str, Any]) -> str:
    """Terms of the loss whose value is not finite although the log-probabilities are, with their values; empty if
    there are none: then the weights or the learning rate are the cause.
    """
    if not math.isfinite(metrics.get("policy/logprob") or 0.0):
        return ""
    losses = {key.removeprefix("loss/"): value for key, value in metrics.items() if key.startswith("loss/")}
    terms = {name: value for name, value in losses.items() if name != "total" and not math.isfinite(value or 0.0)}
    return " and ".join(f"the loss term '{name}' ({value:g})" for name, value in terms.items())


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACCURACY = "eval/accuracy"
_INK, _MUTED, _GRID = "#22303c", "#6b7885", "#e6eaee"
_LINE, _ACCENT = "#2f6db5", "#d9622b"
_COLORS = ("#2f6db5", "#d9622b", "#2e8b57", "#8a5cb8", "#b8860b", "#c2407a", "#4a9fb5", "#6b7885")  # of several runs
Points = Callable[[str, str], tuple[Collection[float], Collection[float]]]  # of a metric (first) along another one
_LEGEND: dict[str, Any] = {"fontsize": 8, "labelcolor": _MUTED, "edgecolor": "none", "framealpha": 0.85}


@dataclass(frozen=True)
class Panel:
    metric: str
    title: str
    share: bool = False  # a fraction from 0 to 1, shown in per cent
    smooth: bool = True
    x: str = "step"  # key of `X_LABELS`

    @property
    def metrics(self) -> tuple[str, ...]:
        finals = tuple(f"{label}/accuracy" for label in FINAL_LABELS)
        return (self.metric, *finals) if self.metric == ACCURACY else (self.metric,)


X_LABELS = {"step": "step", "sft/step": "step of the warm start", "time/wall": "minutes"}
PANELS = (
    Panel("reward/mean", "Reward (mean)"),
    Panel(ACCURACY, "Evaluation accuracy (95 % interval)", share=True),
    Panel(ACCURACY, "Evaluation accuracy, by time", share=True, x="time/wall"),
    Panel("sft/loss", "Warm start: SFT loss (nats per token)", x="sft/step"),
    Panel("length/mean", "Completion length (tokens)"),
    Panel("length/truncated", "Cut off at the length limit", share=True),
    Panel("turns/mean", "Actions per episode"),
    Panel("policy/entropy", "Entropy (nats per token)"),
    Panel("policy/kl", "KL to the reference"),
    Panel("mismatch/logprob_abs_diff", "Engine/trainer log-probability gap"),
    Panel("critic/loss", "Value loss"),
    Panel("loss/value", "Value loss"),  # of a critic that shares the trunk of the policy
    Panel("critic/explained_variance", "Explained variance of the critic"),
    Panel("optim/grad_norm", "Gradient norm"),
    Panel("optim/lr", "Learning rate", smooth=False),
    Panel("time/step", "Seconds per step"),
)
COLUMNS = 3


def draw_curves(run_path: Path) -> Path | None:
    """Plot every known metric that was logged. None if there is nothing to plot."""
    rows = read_metrics(run_path)
    panels = shown_panels(points_of(rows))
    figure = _new_figure(len(panels), _title(run_path))
    if figure is None:
        return None
    labels, explained = _legend_of(run_path), False
    for axes, panel in zip(_grid(figure, len(panels)), panels, strict=True):
        along = _along(rows, panel.x)
        if panel.metric == ACCURACY:
            _draw_accuracy(axes, along, _ACCENT, _INK, labels)
            axes.legend(**_LEGEND)
        elif _draw_values(axes, panel, along, _LINE) and not explained:
            axes.legend(**_LEGEND)
            explained = True
        _finish_panel(axes, panel, along)
    return _save(figure, run_path / "curves.png")


def draw_comparison(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> Path | None:
    """Plot the metrics of several runs in the same panels. `runs`: lines of metrics.jsonl by the name of the run.

    None if there is nothing to plot, or no matplotlib.
    """
    shown = {panel for rows in runs.values() for panel in shown_panels(points_of(rows))}
    panels = [panel for panel in PANELS if panel in shown]
    figure = _new_figure(len(panels), "")
    if figure is None:
        return None
    for axes, panel in zip(_grid(figure, len(panels)), panels, strict=True):
        drawn = {name: _along(rows, panel.x) for name, rows in runs.items()}
        for index, rows in enumerate(drawn.values()):
            color = _COLORS[index % len(_COLORS)]
            if panel.metric == ACCURACY:
                _draw_accuracy(axes, rows, color, color, {})
            else:
                _draw_values(axes, panel, rows, color)
        _finish_panel(axes, panel, [row for rows in drawn.values() for row in rows])
    labels = [one_line(name, 60).replace("$", r"\$") for name in runs]
    lines = [
        figure.axes[0].plot([], [], color=_COLORS[index % len(_COLORS)], linewidth=3)[0] for index in range(len(runs))
    ]
    figure.legend(lines, labels, loc="outside upper left", ncols=4, fontsize=10, frameon=False, labelcolor=_INK)
    return _save(figure, path)


def _new_figure(panels: int, title: str) -> Figure | None:
    """An empty figure; None without panels or without matplotlib."""
    if not panels:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("matplotlib is not installed: no curves", stacklevel=3)
        return None
    lines = _lines(panels)
    size = (4.4 * max(lines), 2.9 * len(lines) + 0.7)
    figure = Figure(figsize=size, dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK)
    return figure


def _grid(figure: Figure, panels: int) -> Iterator[Axes]:
    """Axes of the panels, line by line; every line fills the width."""
    lines = _lines(panels)
    grid = figure.add_gridspec(len(lines), math.lcm(*lines))
    for line, count in enumerate(lines):
        width = grid.ncols // count
        for index in range(count):
            yield figure.add_subplot(grid[line, index * width : (index + 1) * width])


def _save(figure: Figure, path: Path) -> Path:
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return path


def _lines(count: int) -> list[int]:
    """Number of panels in each line, so that no line has an empty cell; the first lines have the fewest panels."""
    lines = math.ceil(count / COLUMNS)
    return [(count + line) // lines for line in range(lines)]


def shown_panels(points: Points) -> list[Panel]:
    """The panels that have anything to plot. `points(metric, x)`: positions and values of a metric along `x`."""
    return [panel for panel in PANELS if _is_shown(panel, points)]


def _is_shown(panel: Panel, points: Points) -> bool:
    """Whether there is anything to plot. Metrics that are 1 for every task without an environment are left out, and
    accuracies by step if there are no steps, as in supervised fine-tuning: they are plotted by time.
    """
    if panel.metric == "turns/mean":
        return any(value != 1 for value in points(panel.metric, panel.x)[1])
    xs = {x for name in panel.metrics for x in points(name, panel.x)[0]}
    timed = panel.metric == ACCURACY and panel.x == "step" and len(points("time/wall", "step")[0]) > 0
    return bool(xs) and not (timed and xs == {0})


def _along(rows: Sequence[Mapping[str, Any]], x: str) -> list[dict[str, Any]]:
    """The rows that have the metric `x`, with its value (times in minutes) as their step."""
    scale = 1 / 60 if x == "time/wall" else 1
    return [{**row, "step": at * scale} for row in rows if (at := finite(row, x)) is not None]


def _title(run_path: Path) -> str:
    """Name of the run, recipe, task and model: from the summary, or from the settings while the run has none."""
    summary, config = read_json(run_path / "summary.json"), RunFiles(run_path).config()
    known = {"algorithm": ("algo", "recipe"), "task": ("task", "name"), "model": ("model", "source")}
    facts = [str(summary.get(key) or config.get(section, {}).get(name, "")) for key, (section, name) in known.items()]
    facts[-1] = Path(facts[-1]).name
    return "  ·  ".join([run_path.resolve().name, *filter(None, facts)]).replace("$", r"\$")


def _legend_of(run_path: Path) -> dict[str, str]:
    """Labels of evaluations, with the names of their splits in brackets."""
    settings = RunFiles(run_path).config().get("eval", {})
    periodic, final = (f" ({settings[key]})" if settings.get(key) else "" for key in ("split", "final_split"))
    return {
        "eval": "periodic" + periodic,
        "start": "before the warm start" + final,
        "before": "before and after training" + final,
    }


def _draw_values(axes: Axes, panel: Panel, rows: Sequence[Mapping[str, Any]], color: str) -> bool:
    """Returns whether there is a thin line with the values and a thick one with their moving average."""
    steps, values = _points(rows, panel.metric)
    style: dict[str, Any] = {"color": color, "linewidth": 1.9, "marker": "o" if len(steps) < 3 else "", "markersize": 4}
    smoothed = panel.smooth and bool(_reach(values))
    if smoothed:
        axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.35, label="every step")
        axes.plot(steps, _smooth(values), **style, label="moving average (5 % of the steps)")
    else:
        axes.plot(steps, values, **style)
    return smoothed


def _finish_panel(axes: Axes, panel: Panel, rows: Sequence[Mapping[str, Any]]) -> None:
    """Title, axes and grid. `rows`: all that are plotted."""
    axes.set_title(panel.title, loc="left", fontsize=9.5, color=_INK)
    axes.set_xlabel(X_LABELS[panel.x], fontsize=8, color=_MUTED)
    axes.tick_params(labelsize=8, colors=_MUTED, length=0)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    _set_scales(axes, panel, max((row["step"] for row in rows), default=0))


def _set_scales(axes: Axes, panel: Panel, last: float) -> None:
    """Limits and ticks. `last`: the greatest x. Tick labels are complete numbers: no common factor or offset."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

    if last:
        axes.set_xlim(-0.02 * last, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=panel.x != "time/wall"))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    low, high = axes.get_ylim()
    if panel.share:
        high = 1.03 * min(max(high, 0.05), 1.0)
        axes.set_ylim(-0.03 * high, high)  # markers at 0 and 100 % are complete
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        return
    if high - low < 1e-3 * max(abs(low), abs(high)):  # rounding errors of a constant
        axes.set_ylim(low - 0.05 * abs(low), high + 0.05 * abs(high))
    if panel.metric == "optim/lr":
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_accuracy(
    axes: Axes, rows: Sequence[Mapping[str, Any]], color: str, final_color: str, labels: Mapping[str, str]
) -> None:
    """Plot periodic evaluations as a line with a band, and those before and after, on another split, as bars."""
    steps, values = _points(rows, ACCURACY)
    label = labels.get("eval") if steps else None
    axes.plot(steps, values, color=color, linewidth=1.8, marker="o", markersize=4, label=label)
    if bounds := bounds_of(points_of(rows), "eval"):
        lows, highs = zip(*bounds.values(), strict=True)
        axes.fill_between(list(bounds), lows, highs, color=color, alpha=0.15, linewidth=0)
    for name in FINAL_LABELS:
        steps, values = _points(rows, f"{name}/accuracy")
        for step, bound in bounds_of(points_of(rows), name).items():
            axes.plot([step, step], bound, color=final_color, linewidth=1.3)
        face, label = "white" if name == "start" else final_color, labels.get(name) if steps else None
        axes.plot(steps, values, "D", color=final_color, markersize=5, markerfacecolor=face, label=label)


def bounds_of(points: Points, name: str, x: str = "step") -> dict[float, tuple[float, float]]:
    """The 95 % intervals of an evaluation by their position, if both bounds were logged."""
    low, high = (dict(zip(*points(f"{name}/{end}", x), strict=True)) for end in ("low", "high"))
    return {at: (low[at], high[at]) for at in sorted(low.keys() & high.keys())}


def _points(rows: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[float], list[float]]:
    """Steps and values of the metric, if it is finite. If a step has several values, the last one counts."""
    points = {row["step"]: value for row in rows if (value := finite(row, metric)) is not None}
    ordered = sorted(points.items())
    return [step for step, _ in ordered], [value for _, value in ordered]


def points_of(rows: Sequence[Mapping[str, Any]]) -> Points:
    """For `shown_panels`. `rows`: lines of metrics.jsonl."""
    return lambda metric, x: _points(_along(rows, x), metric)


def _reach(values: Sequence[float]) -> int:
    """Values to each side that a moving average over about a twentieth of the run includes."""
    return len(values) // 40


def _smooth(values: Sequence[float]) -> list[float]:
    reach = _reach(values)
    windows = [values[max(index - reach, 0) : index + reach + 1] for index in range(len(values))]
    return [sum(window) / len(window) for window in windows]
