"""Results of a comparison of recipes (`recipes.py`): statistics, Markdown table and plot.

Two sources of noise are tested separately: the questions (a paired test, with the answers of all seeds to a question
averaged) and the seeds (an interval). A difference is reported only if both support it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.evals import Report, paired_test
from assay.runs.directory import read_metrics
from assay.runs.files import atomic_write, read_json
from assay.runs.rollouts import read_lines
from assay.types import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# 97.5 % quantiles of Student's t for 2, 3, ... seeds; for more than eleven the last one, which is slightly too wide.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
LEVEL = 0.05
HIGHER, LOWER, UNCLEAR = "higher", "lower", "not significant"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    recipe: str
    seed: int
    summary: dict[str, Any]
    after: Report
    curve: list[dict[str, float]]  # periodic evaluations: sampled answers, seconds of training, accuracy

    @classmethod
    def read(cls, path: Path, recipe: str, seed: int) -> Outcome:
        summary = read_json(path / "summary.json")
        if not summary["paired"]:
            raise UserError(f"{path} has no evaluation before training: delete the run and start the comparison again")
        lines = read_lines(path, summary["steps"], "eval", f"after-{summary['split']}")
        return cls(recipe, seed, summary, Report.read(lines), read_curve(path))

    def row(self) -> dict[str, Any]:
        summary = self.summary
        return {
            "recipe": self.recipe,
            "seed": self.seed,
            "before": summary["before"]["accuracy"],
            "after": summary["after"]["accuracy"],
            "ci95": summary["after"]["ci95"],
            "n": summary["after"]["n"],
            "p_value": summary["paired"]["p_value"],
            "wall_s": summary["wall_s"],
            "train_s": summary["train_s"],
            "steps": summary["steps"],
            "samples": summary["answers"],
            "tokens": summary["tokens"],
            "curve": self.curve,
        }


def read_curve(path: Path) -> list[dict[str, float]]:
    points, seconds = [], 0.0
    for row in read_metrics(path):
        seconds += row.get("time/step", 0.0) - (row.get("time/eval", 0.0) if "time/step" in row else 0.0)
        if "eval/accuracy" in row:
            point = {"samples": row["sampling/answers"], "train_s": seconds, "accuracy": row["eval/accuracy"]}
            points.append({key: round(value, 6) for key, value in point.items()})
    return points


def by_recipe(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.recipe, []).append(outcome)
    return groups


def over_seeds(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean by Student's t; None for a single value."""
    if len(values) < 2:
        return None
    half = T_975[min(len(values) - 2, len(T_975) - 1)] * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def compare_recipes(outcomes: Sequence[Outcome], against: str) -> list[dict[str, Any]]:
    """Compare every recipe with `against`: difference, interval over seeds, paired test over questions."""
    groups = by_recipe(outcomes)
    base = {outcome.seed: outcome for outcome in groups.get(against, ())}
    rows: list[dict[str, Any]] = []
    for recipe, members in groups.items():
        pairs = [(base[other.seed], other) for other in members if other.seed in base]
        if recipe == against or not pairs:
            continue
        differences = [other.after.accuracy - one.after.accuracy for one, other in pairs]
        base_means, means = (question_means([pair[side] for pair in pairs]) for side in (0, 1))
        rows.append(
            {
                "recipe": recipe,
                "against": against,
                "seeds": len(pairs),
                "difference": fmean(differences),
                "ci95_seeds": over_seeds(differences),
                "p_value": paired_test(base_means, means, seed=0).p_value,
            }
        )
    for row, p_value in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_holm"] = p_value
        row["verdict"] = verdict(row["difference"], row["ci95_seeds"], p_value)
    return rows


def question_means(outcomes: Sequence[Outcome]) -> np.ndarray:
    """Fraction of correct answers to each question, over all seeds."""
    ids = outcomes[0].after.ids
    if any(outcome.after.ids != ids for outcome in outcomes):
        raise UserError("these runs were not evaluated on the same questions: use another --runs_dir")
    return np.mean([outcome.after.correct.mean(axis=1) for outcome in outcomes], axis=0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for multiple comparisons (Holm 1979): controls the family-wise error rate."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min((len(p_values) - rank) * p_values[index], 1.0))
        adjusted[index] = largest
    return adjusted


def verdict(difference: float, interval: Interval | None, p_value: float) -> str:
    if p_value >= LEVEL or (interval is not None and interval[0] <= 0 <= interval[1]):
        return UNCLEAR
    return HIGHER if difference > 0 else LOWER


def markdown(outcomes: Sequence[Outcome], comparisons: Sequence[dict[str, Any]], against: str) -> str:
    """The table, and remarks on what it shows."""
    compared = {row["recipe"]: row for row in comparisons}
    names = ("recipe", "seeds", "before", "after", "95 % interval", "answers", "steps", "training, s", "total, s")
    lines = [f"| {' | '.join(names)} | vs. {against} |", "|---" * (len(names) + 1) + "|"]
    lines += [table_row(recipe, members, compared.get(recipe)) for recipe, members in by_recipe(outcomes).items()]
    return "\n".join([*lines, "", *remarks(outcomes, comparisons, against)]) + "\n"


def table_row(recipe: str, members: Sequence[Outcome], compared: dict[str, Any] | None) -> str:
    summaries = [member.summary for member in members]
    after = [summary["after"]["accuracy"] for summary in summaries]
    low, high = over_seeds(after) or tuple(summaries[0]["after"]["ci95"])
    cells = [
        recipe,
        str(len(members)),
        percent(fmean(summary["before"]["accuracy"] for summary in summaries)),
        percent(fmean(after)),
        f"{percent(max(low, 0.0))} to {percent(min(high, 1.0))}",
        f"{fmean(summary['answers'] for summary in summaries):,.0f}",
        f"{fmean(summary['steps'] for summary in summaries):.0f}",
        f"{fmean(summary['train_s'] for summary in summaries):.0f}",
        f"{fmean(summary['wall_s'] for summary in summaries):.0f}",
        "" if compared is None else describe_difference(compared),
    ]
    return f"| {' | '.join(cells)} |"


def describe_difference(compared: dict[str, Any]) -> str:
    """+2.1 points (-0.5 to 4.7), p = 0.21: not significant"""
    interval = compared["ci95_seeds"]
    shown = f" ({100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})" if interval else ""
    return f"{100 * compared['difference']:+.1f} points{shown}, p = {compared['p_holm']:.2g}: {compared['verdict']}"


def remarks(outcomes: Sequence[Outcome], comparisons: Sequence[dict[str, Any]], against: str) -> list[str]:
    seeds = min(len(members) for members in by_recipe(outcomes).values())
    unclear = [row["recipe"] for row in comparisons if row["verdict"] == UNCLEAR]
    clear = [f"{row['recipe']} is {row['verdict']}" for row in comparisons if row["verdict"] != UNCLEAR]
    lines = []
    if unclear:
        lines.append(f"No significant difference from {against}: {', '.join(unclear)}.")
    if clear:
        lines.append(f"Compared with {against}: {', '.join(clear)}.")
    questions = f"{outcomes[0].summary['after']['n']:,} questions"
    test = f"p: paired test over {questions}, adjusted for {len(comparisons)} comparisons (Holm)."
    if seeds > 1:
        lines.append(
            f"Intervals: over {seeds} seeds, by Student's t. {test} A difference is significant only if p is below "
            f"{LEVEL} and the interval over seeds excludes 0."
        )
    else:
        lines.append(f"{test} One seed each: another seed may reverse any of these differences.")
    return lines


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


COLOURS = ("#2f6db5", "#d9622b", "#3a9a5b", "#8a56b0", "#c2993a", "#4a5560", "#c2477f", "#35a0a8")
DASHES = ("-", "--", ":")  # for more recipes than colours
INK, MUTED, GRID = "#22303c", "#6b7885", "#e6eaee"
POINTS = 60


def draw_recipes(outcomes: Sequence[Outcome], path: Path, title: str) -> bool:
    """Plot accuracy against sampled answers and seconds of training: means over seeds, with bands from min to max.

    Returns False, with a warning, if nothing can be plotted.
    """
    curves = {
        recipe: usable for recipe, runs in by_recipe(outcomes).items() if (usable := [run for run in runs if run.curve])
    }
    if not curves:
        warnings.warn("no curves to plot: set eval.every to evaluate during training", stacklevel=2)
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("matplotlib is not installed: no plot", stacklevel=2)
        return False
    figure = Figure(figsize=(12.2, 4.2), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    for index, (along, label) in enumerate((("samples", "sampled answers"), ("train_s", "seconds of training")), 1):
        axes = figure.add_subplot(1, 2, index)
        for (dash, colour), (recipe, members) in zip(cycle(product(DASHES, COLOURS)), curves.items(), strict=False):
            draw_recipe(axes, members, along, recipe, colour, dash)
        style_axes(axes, label)
    # One legend beside the panels, where it hides no curve.
    figure.legend(
        *axes.get_legend_handles_labels(), frameon=False, fontsize=8, labelcolor=MUTED, loc="outside right upper"
    )
    with atomic_write(path) as file:
        figure.savefig(file, format="png")
    return True


def draw_recipe(axes: Axes, members: Sequence[Outcome], along: str, recipe: str, colour: str, dash: str) -> None:
    """Interpolate all seeds to a common grid: with resampled groups they are evaluated at different positions."""
    positions = [[point[along] for point in member.curve] for member in members]
    values = [[point["accuracy"] for point in member.curve] for member in members]
    grid = np.linspace(max(p[0] for p in positions), min(p[-1] for p in positions), POINTS)
    seeds = np.array([np.interp(grid, p, v) for p, v in zip(positions, values, strict=True)])
    axes.plot(grid, seeds.mean(axis=0), color=colour, linestyle=dash, linewidth=1.9, label=recipe)
    if len(seeds) > 1:
        axes.fill_between(grid, seeds.min(axis=0), seeds.max(axis=0), color=colour, alpha=0.12, linewidth=0)


def style_axes(axes: Axes, label: str) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.set_title("Validation accuracy", loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(label, fontsize=8, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
