"""bench/recipes.py and its report: equal starts and budgets, kept runs; intervals, tests, table and plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recipes
from recipe_report import Outcome, compare_recipes, draw_recipes, holm, over_seeds, verdict
from safetensors.torch import load_file
from small_run import SmallRuns

from assay.cli.main import main, run_command
from assay.evals import AnswerOutcome, Report
from assay.types import Status, UserError

WORDS = ("--sft.steps", 3, "--sft.batch", 4, "--eval.every", 1, "--train.budget", 27, "--algo.kl_coef", 0.5)


@pytest.fixture
def small(tmp_path: Path) -> SmallRuns:
    return SmallRuns(tmp_path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, no_curves: None) -> list[list[str]]:
    """Runs are made in this process, which is ten times faster."""
    calls: list[list[str]] = []

    def launch(words: Sequence[str]) -> int:
        calls.append(list(words))
        return main(words)

    monkeypatch.setattr(recipes, "launch", launch)
    return calls


def run_script(small: SmallRuns, *words: object) -> int:
    command = partial(run_command, recipes, recipes.PROGRAM)
    return main([str(small.config), *map(str, words), "--runs_dir", str(small.runs)], command)


def compare(small: SmallRuns, names: str, *words: object) -> int:
    outputs = ("--json", small.folder / "result.json", "--md", small.folder / "result.md")
    return run_script(small, "--recipes", names, *WORDS, *outputs, *words)


def rows(small: SmallRuns) -> list[dict]:
    return json.loads((small.folder / "result.json").read_text())["rows"]


@pytest.mark.slow
def test_all_runs_share_initial_weights_and_budget(
    small: SmallRuns, launched: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(small, "grpo,dapo", "--seeds", 2) == 0
    results = rows(small)
    names = [(row["recipe"], row["seed"]) for row in results]
    assert names == [("grpo", 0), ("dapo", 0), ("grpo", 1), ("dapo", 1)]
    assert all(27 <= row["samples"] < 36 and row["curve"] for row in results)
    assert [row["steps"] for row in results if row["recipe"] == "grpo"] == [3, 3]
    starts = [load_file(small.checkpoint(0, f"small-{r}-{s}") / "model/model.safetensors") for r, s in names]
    warm_start = load_file(small.checkpoint(0, "small-sft") / "model/model.safetensors")
    assert all(start[key].equal(warm_start[key]) for start in starts for key in warm_start)
    assert all("policy/kl" not in row for row in small.metrics("small-grpo-0"))  # [algo] is ignored
    content = json.loads((small.folder / "result.json").read_text())
    assert content["warm_start"]["algorithm"] == "sft" and len(content["comparisons"]) == 1
    assert {"machine", "versions"} <= content.keys() and "--recipes grpo,dapo --seeds 2" in content["command"]
    table = (small.folder / "result.md").read_text()
    assert "| dapo | 2 |" in table and table in capsys.readouterr().out
    assert len(launched) == 5


def test_finished_runs_are_kept_and_missing_ones_are_made(
    small: SmallRuns, launched: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(small, "grpo") == 0
    before = small.summary("small-grpo-0")
    assert compare(small, "grpo,rloo") == 0 and len(launched) == 3  # warm start, grpo; then only rloo
    assert small.summary("small-grpo-0") == before and [row["recipe"] for row in rows(small)] == ["grpo", "rloo"]
    (small.runs / "small-rloo-0" / "summary.json").unlink()  # as if it had been stopped at its last checkpoint
    assert compare(small, "grpo,rloo") == 0
    assert launched[-1] == ["train", "--resume", str(small.runs / "small-rloo-0"), "--trust"] and len(rows(small)) == 2
    capsys.readouterr()
    assert compare(small, "grpo,rloo", "--optim.lr", 5e-4) == 2 and len(launched) == 4
    assert "another optim.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipes", "grpo,grop"), "grop"),
        (("--recipes", "rloo,simple"), "--against"),
        (("--recipes", "grpo", "--seeds", 0), "--seeds"),
        (("--recipes", "grpo", "--train.epochs", 1), "train.budget"),
        (("--recipes", "grpo", "--png", "/nowhere/at/all.png"), "does not exist"),
        (("--recipes", "grpo", "--optim.rl", 1), "optim.lr"),
    ],
)
def test_mistakes_are_reported_before_anything_is_run(
    small: SmallRuns, words: tuple[object, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script(small, *words) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and not small.runs.exists()


def outcome(recipe: str, seed: int, correct: np.ndarray, ids: list[str] | None = None, **facts: Any) -> Outcome:
    names = ids or [str(number) for number in range(len(correct))]
    statuses = [Status.OK if right else Status.WRONG for right in correct]
    answers = [[AnswerOutcome(status, None, 1, False, float(status is Status.OK))] for status in statuses]
    report = Report(names, answers, [""] * len(names))
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
