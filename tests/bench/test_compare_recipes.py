"""bench/recipes.py: the same initial weights and number of answers for all recipes; finished runs are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import recipes
from safetensors.torch import load_file
from small_run import SmallRuns

from assay.cli.main import main, run_command
from assay.training import run as train_run

WORDS = ("--sft.steps", 3, "--sft.batch", 4, "--eval.every", 1, "--train.budget", 27, "--algo.kl_coef", 0.5)


@pytest.fixture
def small(tmp_path: Path) -> SmallRuns:
    return SmallRuns(tmp_path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs are made in this process, which is ten times faster."""
    calls: list[list[str]] = []

    def launch(words: Sequence[str]) -> int:
        calls.append(list(words))
        return main(words)

    monkeypatch.setattr(recipes, "launch", launch)
    monkeypatch.setattr(train_run, "draw_curves", lambda path: None)  # slower than the runs
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
