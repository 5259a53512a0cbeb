"""The metrics of a run and what they mean: the one list of them, from which the reference is generated; and their
plots.

In a name, a part in capitals stands for several: `status/NAME` for `status/ok` and so on, N and K for numbers.

The plots are curves.png, and comparisons of runs. matplotlib is imported only if it is used.
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

METRICS: dict[str, dict[str, str]] = {
    "Rewards and groups": {
        "reward/mean": "mean reward of all answers of the step, after shaping, including dropped groups",
        "reward/std": "standard deviation of these rewards",
        "reward/range": "highest minus lowest reward of all answers of the step, before shaping",
        "reward/correct": "fraction of answers with status `ok`",
        "reward/greedy": "with `algo.greedy_baseline`: mean reward of the greedy answers",
        "reward/kl": "with a KL term in the reward: mean over answers of log(policy / reference)",
        "parts/NAME": "mean of a part of the reward before weighting: `accuracy`, `format`, a reward function, ...",
        "task/LABEL/NAME": "with the task `mix`: `reward` and `correct` of one of its tasks",
        "status/NAME": "fraction of answers with this status",
        "advantage/zero": "fraction of answers whose advantages are all 0, including dropped groups",
        "groups/zero_variance": "fraction of sampled groups, including dropped ones, in which the judge gave all "
        "answers the same reward (with `algo.discount` or `algo.step_credit`: the same returns)",
        "groups/dropped": "number of groups that a filter removed",
        "prompts/too_long": "number of generated prompts replaced because of `train.max_prompt_tokens`; only if any",
        "prompts/known": "with a filter by pass rate: number of prompts with a known rate",
        "prompts/within_reach": "with a filter by pass rate: fraction of the known prompts within the bounds",
    },
    "Sampling": {
        "length/mean": "mean number of sampled tokens per answer",
        "length/max": "largest number of sampled tokens of an answer",
        "length/truncated": "fraction of answers that were cut off",
        "turns/mean": "actions per episode",
        "turns/masked": "fraction of actions that environments left out of the loss; only if there are any",
        "sampling/answers": "number of answers sampled so far, including those of dropped groups",
        "sampling/entropy": "nats per token over all answers, by the engine, at `sampling.temperature`, before "
        "truncation; only if the engine reports it",
        "sampling/logprob": "mean log-probability of the sampled tokens, by the engine, at `sampling.temperature`, "
        "before truncation",
        "sampling/kept_mass": "mean probability of the tokens that could be sampled: those that top-k, top-p, min-p "
        "and `sampling.min_new_tokens` keep; 1 without these settings; only if the engine reports it",
        "sampling/truncation_kl": "estimate in nats of the KL divergence that these settings cause: mean over tokens "
        "of `sampling_logprobs` minus `engine_logprobs`; omitted if 0",
    },
    "Training": {
        "loss/total": "loss, mean over the updates of the step",
        "loss/NAME": "a term of the loss: `policy`, `kl`, `entropy`, `value`, or your own",
        "policy/entropy": "nats per token of the trained tokens, by the trainer, at the sampling temperature",
        "policy/entropy_coef": "with `algo.entropy_target`: the current entropy coefficient",
        "policy/logprob": "mean log-probability of the trained tokens under the policy, by the trainer in each update",
        "policy/kl": "with a KL term in the loss: its mean per token",
        "policy/ratio_mean": "mean importance ratio",
        "policy/ratio_max": "largest importance ratio",
        "policy/clip_fraction": "with `ppo_clip` or `cispo`: fraction of clipped tokens",
        "policy/clip_low_fraction": "with `ppo_clip` or `cispo`: fraction of tokens clipped at the lower bound",
        "policy/clip_high_fraction": "with `ppo_clip` or `cispo`: fraction of tokens clipped at the upper bound",
        "policy/dual_clip_fraction": "with `algo.dual_clip`: fraction of tokens whose ratio was limited",
        "policy/marked_fraction": "with `algo.cov`: fraction of tokens that it restrains",
        "policy/NAME": "a statistic of your own policy loss",
        "mismatch/logprob_abs_diff": "mean absolute difference between the log-probabilities of engine and trainer; "
        "for answers sampled by earlier weights it includes the change of the policy",
        "mismatch/logprob_abs_diff_max": "the largest of these differences",
        "mismatch/kl": "estimate of the KL divergence between engine and trainer, nats per token",
        "mismatch/weight": "with `algo.correction`: mean weight",
        "mismatch/held_fraction": "with `algo.correction`: fraction of tokens that were truncated or masked",
        "optim/lr": "`optim.lr` after the schedule; rates of other kinds of weights keep their ratio to it",
        "optim/grad_norm": "gradient norm before clipping",
        "optim/updates": "number of updates, one per mini-batch and pass, including skipped ones",
        "optim/skipped": "number of updates skipped because the gradient was not finite or 0",
        "optim/non_finite": "number of updates skipped because loss or gradient was not finite",
    },
    "Weight sync and servers": {
        "weights/changed": "1 if the engine's weights differ from those of the previous step, else 0; only with "
        "fingerprints",
        "sync/probe_gap": "with `engine.verify = probe`: root mean square difference between the "
        "log-probabilities of engine and trainer on the probe tokens",
        "sync/probe_limit": "the gap at which the run stops",
        "sync/probe_change": "root mean square change of the trainer's log-probabilities of the probe since the start",
        "servers/serving": "with several servers: how many of them get requests",
        "servers/failures": "how often a server has failed since the start of the process",
        "servers/retries": "number of requests that were sent again since the start of the process",
    },
    "Critic and replay": {
        "critic/loss": "loss of a critic with a separate trunk (shared trunk: `loss/value`)",
        "critic/value_mean": "mean predicted value",
        "critic/explained_variance": "1: values predict the returns; 0: nothing; below 0: worse than a constant",
        "critic/skipped": "separate trunk: updates skipped because the gradient was not finite",
        "replay/size": "number of groups in the buffer",
        "replay/age": "their mean age in steps",
        "replay/share": "replayed fraction of the batch",
    },
    "Asynchronous training": {
        "async/staleness": "mean staleness of the groups of the step, in versions of the weights",
        "async/staleness_max": "largest staleness of a group",
        "async/staleness_N": "fraction of groups with staleness N",
        "async/queued": "groups that are finished and wait, after the batch was taken",
        "async/running": "groups that are being sampled, after the batch was taken",
        "async/engine_idle": "fraction of the time since the last batch in which nothing was sampled",
        "async/learner_idle": "fraction of the time since the last batch in which the learner waited for groups",
        "async/tokens_per_s": "sampled tokens of finished groups per second",
        "async/restarted": "answers that were sampled again",
        "async/restarted_qN": "the same by length, in quarters of `sampling.max_new_tokens`",
        "async/cancelled": "answers of groups that `source.cancel_stale` has dropped",
        "async/cancelled_qN": "the same by length, in quarters of `sampling.max_new_tokens`",
        "async/expired": "finished groups that were too stale and were sampled again",
    },
    "Evaluation": {
        "eval/accuracy": "accuracy of the periodic evaluation",
        "eval/low": "lower bound of its 95 % interval",
        "eval/high": "upper bound of its 95 % interval",
        "eval/length": "mean number of tokens",
        "eval/truncated": "fraction of answers that were cut off",
        "eval/format": "fraction of answers that could be parsed",
        "eval/pass@K": "with `eval.samples` above 1: unbiased estimate",
        "eval/majority@K": "the same for majority votes; only if the judge parses answers",
        "eval/accuracy/LABEL": "with the task `mix`: accuracy of one of its tasks",
        "start/NAME": "as `eval/NAME`: before a warm start, on the final split",
        "before/NAME": "as `eval/NAME`: before RL, on the final split",
        "after/NAME": "as `eval/NAME`: after training, on the final split",
    },
    "Warm start": {
        "sft/step": "step of the warm start; lines of a warm start have step 0",
        "sft/loss": "negative mean log-probability of the tokens of the solutions",
        "sft/grad_norm": "gradient norm before clipping",
        "sft/lr": "learning rate",
        "sft/skipped": "number of skipped updates",
    },
    "Time and memory": {
        "time/wall": "seconds since the start of the run, over all resumes",
        "time/step": "seconds of the step",
        "time/NAME": "seconds of a part of the step: `sample`, `generate`, `judge`, `train`, `sync`, `eval`",
        "time/tokens_per_s": "tokens that the engine sampled per second of `time/generate`",
        "memory/gpu": "fraction of the GPU's memory in use at the peak so far, with other processes; CUDA only",
        "memory/host": "fraction of main memory in use at the end of the step, of the machine or its container, "
        "without file cache; omitted where `/proc` does not exist",
    },
}


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
