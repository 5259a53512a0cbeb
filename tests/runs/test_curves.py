"""curves.png, Weights & Biases and TensorBoard."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from assay.runs import Run
from assay.runs.directory import read_metrics
from assay.runs.metrics import _along, _legend_of, _lines, _points, _smooth, draw_curves, shown_panels


def test_curves_of_a_full_run(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "demo", "")
    noise = np.random.default_rng(0)
    run.log(0, {"before/accuracy": 0.32, "before/low": 0.28, "before/high": 0.36})
    for step in range(1, 101):
        progress = 1 - math.exp(-step / 60)
        metrics = {
            "reward/mean": 0.3 + 0.4 * progress + 0.05 * noise.normal(),
            "length/mean": 30 + 5 * noise.normal(),
            "length/truncated": 0.1 * (1 - progress),
            "policy/entropy": 0.8 - 0.5 * progress,
            "policy/kl": 0.02 * progress,
            "mismatch/logprob_abs_diff": 1e-6,
            "optim/grad_norm": math.nan if step == 50 else 1 + 0.3 * noise.normal(),
            "optim/lr": 1e-4 * min(1, step / 10),
            "time/step": 0.6,
            "time/wall": 0.6 * step,
        }
        if step % 40 == 0:
            accuracy = 0.3 + 0.4 * progress
            metrics |= {"eval/accuracy": accuracy, "eval/low": accuracy - 0.04, "eval/high": accuracy + 0.04}
        run.log(step, metrics)
    run.log(200, {"after/accuracy": 0.67, "after/low": 0.63, "after/high": 0.71})
    run.write_summary({"task": "abacus", "model": "a_$b$_{", "algorithm": "grpo"})
    path = draw_curves(run.path)
    assert path == run.path / "curves.png"
    image = imread(path)
    height, width = image.shape[:2]
    assert width > height > 500
    assert (image[..., :3] < 0.9).any(axis=-1).mean() > 0.01  # ink, not a blank sheet
    assert not list(run.path.glob(".curves*"))


def test_accuracy_is_also_plotted_by_time(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "timed", "")
    for step, wall in ((0, 30.0), (10, 90.0), (20, 240.0)):
        run.log(step, {"eval/accuracy": 0.1 * step, "time/wall": wall})
    run.log(20, {"sft/step": 1})
    rows = read_metrics(run.path)
    assert _points(_along(rows, "time/wall"), "eval/accuracy") == ([0.5, 1.5, 4.0], [0.0, 1.0, 2.0])
    assert "eval/accuracy by time/wall" in shown(rows)
    assert shown([{"step": 1, "eval/accuracy": 0.5}]) == ["eval/accuracy by step"]


def test_every_line_of_panels_is_full() -> None:
    assert [_lines(count) for count in (1, 2, 3, 4, 7, 11)] == [[1], [2], [3], [2, 2], [2, 2, 3], [2, 3, 3, 3]]


def shown(rows: list[dict[str, object]]) -> list[str]:
    panels = shown_panels(lambda metric, x: _points(_along(rows, x), metric))
    return [f"{panel.metric} by {panel.x}" for panel in panels]


def test_the_loss_of_a_warm_start_is_plotted_by_its_own_steps() -> None:
    rows: list[dict[str, object]] = [{"step": 0, "sft/step": step, "sft/loss": 1 / step} for step in (1, 2)]
    assert _points(_along(rows, "sft/step"), "sft/loss") == ([1, 2], [1.0, 0.5])
    assert shown([*rows, {"step": 1, "reward/mean": 0.5}]) == ["reward/mean by step", "sft/loss by sft/step"]


def test_accuracies_of_supervised_fine_tuning_are_plotted_by_time_only() -> None:
    rows: list[dict[str, object]] = [
        {"step": 0, "before/accuracy": 0.1, "time/wall": 1.0},
        {"step": 0, "after/accuracy": 0.2, "time/wall": 9.0},
    ]
    assert shown(rows) == ["eval/accuracy by time/wall"]


def test_no_curves_without_metrics(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "none", "")
    assert draw_curves(run.path) is None
    run.log(1, {"odd": 1, "reward/mean": math.nan})
    assert draw_curves(run.path) is None


def test_points_skip_missing_values_and_use_the_last_value_of_a_step() -> None:
    rows: list[dict[str, object]] = [
        {"step": 2, "reward/mean": 1.0},
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 2.0},
        {"step": 3, "reward/mean": None},
        {"step": 4, "reward/mean": math.inf},
        {"step": 5, "reward/mean": "text"},
    ]
    assert _points(rows, "reward/mean") == ([1, 2], [0.5, 2.0])


def test_smoothing_keeps_a_straight_line() -> None:
    line = [0.5 * n for n in range(100)]
    assert _smooth(line)[2:-2] == pytest.approx(line[2:-2])
    assert _smooth(line[:10]) == line[:10]
    assert np.std(_smooth([(-1.0) ** n for n in range(200)])) < 0.3


def test_the_legend_names_the_splits(tmp_path: Path) -> None:
    run = Run.create(tmp_path, "named", '[eval]\nsplit = "validation"\nfinal_split = "test"\n')
    labels = _legend_of(run.path)
    assert "(validation)" in labels["eval"] and "(test)" in labels["before"] and "(test)" in labels["start"]
    assert not any("(" in label for label in _legend_of(tmp_path).values())
