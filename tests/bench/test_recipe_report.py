"""Comparison of recipes: intervals over seeds, tests over questions, table and plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipe_report import Outcome, compare_recipes, draw_recipes, holm, markdown, over_seeds, verdict

from assay.evals.report import Report
from assay.types import Status, UserError


def outcome(recipe: str, seed: int, correct: np.ndarray, ids: list[str] | None = None, **facts: Any) -> Outcome:
    statuses = [[Status.OK if right else Status.WRONG] for right in correct]
    names = ids or [str(number) for number in range(len(correct))]
    column = np.asarray(correct, dtype=bool)[:, None]
    report = Report(names, column, [[None]] * len(names), statuses, np.ones_like(column, int), column & False)
    summary = {"before": {"accuracy": 0.3}, "after": report.summary(), "paired": {"p_value": 0.5}, "split": "test"}
    summary |= {"task": "abacus", "wall_s": 9.0, "train_s": 7.0, "steps": 4, "answers": 36, "tokens": 100} | facts
    curve = [{"samples": 9.0 * i, "train_s": 2.0 * i, "accuracy": 0.1 * i + 0.01 * seed} for i in (1, 2, 3)]
    return Outcome(recipe, seed, summary, report, curve)


def first(count: int, of: int = 200) -> np.ndarray:
    """The first `count` questions are correct."""
    return np.arange(of) < count


def test_interval_over_seeds_is_students_t() -> None:
    low, high = over_seeds([0.5, 0.6, 0.7]) or (0, 0)  # t = 4.303 with two degrees of freedom, sd 0.1
    assert (low, high) == pytest.approx((0.6 - 4.303 * 0.1 / 3**0.5, 0.6 + 4.303 * 0.1 / 3**0.5))
    assert over_seeds([0.5]) is None


def test_holm_adjustment_of_p_values() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_a_difference_is_significant_only_over_questions_and_seeds() -> None:
    base = [outcome("grpo", seed, first(100)) for seed in range(3)]
    better = [outcome("better", seed, first(130 + seed)) for seed in range(3)]
    same = [outcome("same", seed, first(101)) for seed in range(3)]
    lucky = [outcome("lucky", seed, first(count)) for seed, count in enumerate((190, 95, 105))]
    rows = {row["recipe"]: row for row in compare_recipes([*base, *better, *same, *lucky], "grpo")}
    assert rows["better"]["verdict"] == "higher" and rows["better"]["difference"] == pytest.approx(0.155)
    assert rows["same"]["verdict"] == "not significant" and rows["same"]["p_value"] == 1.0
    # One seed makes the difference: significant over questions, but not over seeds.
    assert rows["lucky"]["p_holm"] < 0.05 and rows["lucky"]["ci95_seeds"][0] < 0
    assert rows["lucky"]["verdict"] == "not significant"
    assert "grpo" not in rows and verdict(-0.1, None, 0.01) == "lower"


def test_comparisons_are_paired_by_seed_and_by_question() -> None:
    runs = [outcome("grpo", 0, first(100)), outcome("simple", 0, first(120)), outcome("simple", 1, first(10))]
    (row,) = compare_recipes(runs, "grpo")  # the second seed of grpo has not run yet
    assert row["seeds"] == 1 and row["difference"] == pytest.approx(0.1) and row["ci95_seeds"] is None
    other = outcome("simple", 0, first(120), ids=[f"x{number}" for number in range(200)])
    with pytest.raises(UserError, match="same questions"):
        compare_recipes([outcome("grpo", 0, first(100)), outcome("grpo", 1, first(100)), other, runs[2]], "grpo")


def test_markdown_table_names_what_is_not_significant() -> None:
    runs = [outcome(recipe, seed, first(count)) for recipe, count in (("grpo", 100), ("rloo", 101)) for seed in (0, 1)]
    text = markdown(runs, compare_recipes(runs, "grpo"), "grpo")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({line.count("|") for line in rows}) == 1
    assert rows[3].startswith("| rloo | 2 | 30.0 % | 50.5 % |") and "+0.5 points" in rows[3]
    assert "No significant difference from grpo: rloo." in text and "over 2 seeds" in text
    assert "One seed each" in markdown(runs[::2], compare_recipes(runs[::2], "grpo"), "grpo")


def test_learning_curves_are_plotted_or_a_warning_says_why_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [outcome(recipe, seed, first(5)) for recipe in ("grpo", "dapo") for seed in (0, 1)]
    assert draw_recipes(runs, tmp_path / "curves.png", "a title with $")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    for run in runs:
        run.curve.clear()
    with pytest.warns(UserWarning, match=r"eval\.every"):
        assert not draw_recipes(runs, tmp_path / "none.png", "nothing")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
