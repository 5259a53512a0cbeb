"""Learning curves of recipes, in one picture: means over seeds, with bands from the lowest to the highest."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from assay.bench.recipes import Outcome, by_recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2f6db5", "#d9622b", "#3a9a5b", "#8a56b0", "#c2993a", "#4a5560", "#c2477f", "#35a0a8")
DASHES = ("-", "--", ":")  # for more recipes than colours
INK, MUTED, GRID = "#22303c", "#6b7885", "#e6eaee"
POINTS = 60


def draw_recipes(outcomes: Sequence[Outcome], path: Path, title: str) -> bool:
    """Accuracy against answers sampled, and against seconds of training; False where nothing can be drawn."""
    curves = {recipe: found for recipe, members in by_recipe(outcomes).items() if (found := usable(members))}
    if not curves:
        warnings.warn("no curves to draw: set eval.every to measure along the way", stacklevel=2)
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        warnings.warn("matplotlib is not installed: no picture", stacklevel=2)
        return False
    figure = Figure(figsize=(12.2, 4.2), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    for place, (along, label) in enumerate((("samples", "answers sampled"), ("train_s", "seconds of training")), 1):
        axes = figure.add_subplot(1, 2, place)
        for (dash, colour), (recipe, members) in zip(cycle(product(DASHES, COLOURS)), curves.items(), strict=False):
            draw_recipe(axes, members, along, recipe, colour, dash)
        finish(axes, label)
    # Once, beside the panels: over them it would hide the curves.
    figure.legend(
        *axes.get_legend_handles_labels(), frameon=False, fontsize=8, labelcolor=MUTED, loc="outside right upper"
    )
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return True


def usable(members: Sequence[Outcome]) -> list[Outcome]:
    return [member for member in members if member.curve]


def draw_recipe(axes: Axes, members: Sequence[Outcome], along: str, recipe: str, colour: str, dash: str) -> None:
    """Seeds are measured at places of their own, where groups are resampled: each is read off at common ones."""
    places = [[point[along] for point in member.curve] for member in members]
    values = [[point["accuracy"] for point in member.curve] for member in members]
    grid = np.linspace(max(p[0] for p in places), min(p[-1] for p in places), POINTS)
    seeds = np.array([np.interp(grid, p, v) for p, v in zip(places, values, strict=True)])
    axes.plot(grid, seeds.mean(axis=0), color=colour, linestyle=dash, linewidth=1.9, label=recipe)
    if len(seeds) > 1:
        axes.fill_between(grid, seeds.min(axis=0), seeds.max(axis=0), color=colour, alpha=0.12, linewidth=0)


def finish(axes: Axes, label: str) -> None:
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
