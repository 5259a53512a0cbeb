"""The comparison: one start, as many answers for all, and nothing done twice."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_run import SmallRuns

from assay.cli import bench_recipes
from assay.cli.main import main

WORDS = ("--sft.steps", 3, "--sft.batch", 4, "--eval.every", 1, "--train.budget", 27, "--algo.kl_coef", 0.5)


@pytest.fixture
def small(tmp_path: Path) -> SmallRuns:
    return SmallRuns(tmp_path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs in this process, which takes a second where a process of their own takes ten."""
    calls: list[list[str]] = []

    def launch(words: Sequence[str]) -> int:
        calls.append(list(words))
        return main(words)

    monkeypatch.setattr(bench_recipes, "launch", launch)
    monkeypatch.setattr("assay.train.run.draw_curves", lambda path: None)  # slower than the runs
    return calls


def compare(small: SmallRuns, recipes: str, *words: object) -> int:
    outputs = ("--json", small.folder / "found.json", "--md", small.folder / "found.md")
    return small("bench", "recipes", small.config, "--recipes", recipes, *WORDS, *outputs, *words)


def rows(small: SmallRuns) -> list[dict]:
    return json.loads((small.folder / "found.json").read_text())["rows"]


def test_all_start_from_the_same_weights_and_sample_as_much(
    small: SmallRuns, launched: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(small, "grpo,dapo", "--seeds", 2) == 0
    found = rows(small)
    names = [(row["recipe"], row["seed"]) for row in found]
    assert names == [("grpo", 0), ("dapo", 0), ("grpo", 1), ("dapo", 1)]
    assert all(27 <= row["samples"] < 36 and row["curve"] for row in found)
    assert [row["steps"] for row in found if row["recipe"] == "grpo"] == [3, 3]
    starts = [load_file(small.checkpoint(0, f"small-{r}-{s}") / "model/model.safetensors") for r, s in names]
    warm = load_file(small.checkpoint(0, "small-sft") / "model/model.safetensors")
    assert all(start[key].equal(warm[key]) for start in starts for key in warm)
    assert all("policy/kl" not in row for row in small.metrics("small-grpo-0"))  # of [algo] nothing is taken over
    content = json.loads((small.folder / "found.json").read_text())
    assert content["warm_start"]["algorithm"] == "sft" and len(content["comparisons"]) == 1
    assert {"machine", "versions"} <= content.keys() and "--recipes grpo,dapo --seeds 2" in content["command"]
    table = (small.folder / "found.md").read_text()
    assert "| dapo | 2 |" in table and table in capsys.readouterr().out
    assert len(launched) == 5


def test_what_is_there_is_kept_and_what_is_missing_is_made(
    small: SmallRuns, launched: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(small, "grpo") == 0
    before = small.summary("small-grpo-0")
    assert compare(small, "grpo,rloo") == 0 and len(launched) == 3  # warm start, grpo; then rloo alone
    assert small.summary("small-grpo-0") == before and [row["recipe"] for row in rows(small)] == ["grpo", "rloo"]
    (small.runs / "small-rloo-0" / "summary.json").unlink()  # as if it had been stopped at its last checkpoint
    assert compare(small, "grpo,rloo") == 0
    assert launched[-1] == ["train", "--resume", str(small.runs / "small-rloo-0"), "--trust"] and len(rows(small)) == 2
    capsys.readouterr()
    assert compare(small, "grpo,rloo", "--optim.lr", 5e-4) == 2 and len(launched) == 4
    assert "begun with another optim.lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--recipes", "grpo,grop"), "grop"),
        (("--recipes", "rloo,simple"), "--against"),
        (("--recipes", "grpo", "--seeds", 0), "--seeds"),
        (("--recipes", "grpo", "--train.epochs", 1), "train.budget"),
        (("--recipes", "grpo", "--png", "/nowhere/at/all.png"), "no folder"),
        (("--recipes", "grpo", "--optim.rl", 1), "optim.lr"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_run(
    small: SmallRuns, words: tuple[object, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small("bench", "recipes", small.config, *words) == 2
    error = capsys.readouterr().err
    assert complaint in error and len(error.splitlines()) == 1 and not small.runs.exists()


@pytest.mark.slow
def test_stopped_it_stops_its_run_and_goes_on_with_it_when_called_again(small: SmallRuns) -> None:
    words = ("bench", "recipes", small.config, "--recipes", "grpo", "--train.budget", 9 * 150, "--save.every", 0)
    words = (*words, "--json", small.folder / "found.json", "--png", small.folder / "found.png")
    process = small.process(*words)
    metrics = small.runs / "small-grpo-0" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") > 5):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 130 and not (small.folder / "found.json").exists()
    done = len(metrics.read_text().splitlines())
    assert 5 < done < 150 and small.checkpoint(0, "small-grpo-0").parent.is_dir()
    process = small.process(*words)
    process.communicate(timeout=300)
    (row,) = rows(small)
    assert process.returncode == 0 and row["samples"] == 9 * 150 and row["steps"] == 150
    assert (small.folder / "found.png").is_file()
