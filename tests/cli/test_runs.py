"""`assay runs`: list and compare runs."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from assay.cli import runs
from assay.runs import Run
from assay.types import UserError

CONFIG = """
name = "{name}"
seed = 7
[task]
name = "abacus"
[model]
source = "preset:tiny"
[algo]
recipe = "grpo"
[optim]
lr = {lr}
[train]
steps = 240
"""
SUMMARY = {
    "task": "abacus",
    "model": "preset:tiny",
    "algorithm": "grpo",
    "steps": 240,
    "wall_s": 190.0,
    "before": {"accuracy": 0.33, "ci95": [0.29, 0.37], "n": 500},
    "after": {"accuracy": 0.67, "ci95": [0.63, 0.71], "n": 500},
    "paired": {"p_value": 1.25e-20, "gained": 180, "lost": 10},
    "seed": 7,
}


def call(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    runs.add_arguments(parser)
    return runs.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    finished = Run.create(tmp_path, "demo", CONFIG.format(name="demo", lr=1e-4))
    finished.log(240, {"reward/mean": 0.7})
    finished.write_summary(SUMMARY)
    finished.close()
    stopped = Run.create(tmp_path, "fast", CONFIG.format(name="fast", lr=4e-4))
    stopped.log(12, {"reward/mean": 0.1})
    stopped.close()
    return tmp_path


def test_list(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--dir", runs_dir) == 0
    title, headings, first, second = capsys.readouterr().out.splitlines()
    assert title == f"Runs in {runs_dir}"
    assert headings.split()[:3] == ["run", "state", "task"]
    for wanted in ("finished", "abacus", "grpo", "240/240", "33.0% [29.0, 37.0]", "67.0% [63.0, 71.0]", "1.2e-20"):
        assert wanted in first
    assert "3m10s" in first
    assert second.split()[:6] == ["fast", "stopped", "abacus", "preset:tiny", "grpo", "12/240"]


def test_compare_shows_settings_that_differ(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", runs_dir / "fast", "--dir", runs_dir) == 0
    out = capsys.readouterr().out
    results, differing = out.split("Settings that differ\n")
    assert "+180 / -10" in results
    assert [line.split() for line in differing.splitlines()] == [["demo", "fast"], ["optim.lr", "0.0001", "0.0004"]]


def test_json(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("--dir", runs_dir, "--json")
    listed = json.loads(capsys.readouterr().out)
    assert [(fact["run"], fact["state"], fact["steps"]) for fact in listed] == [
        ("demo", "finished", 240),
        ("fast", "stopped", 12),
    ]
    assert listed[0]["after"] == SUMMARY["after"]
    call("demo", "fast", "--dir", runs_dir, "--json")
    assert json.loads(capsys.readouterr().out)["differences"] == {"optim.lr": [1e-4, 4e-4]}


def listed(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The cells of the only run in the folder, by heading."""
    assert call("--dir", runs_dir) == 0
    _, headings, cells, *rest = capsys.readouterr().out.splitlines()
    return {**dict(zip(headings.split(), re.split(r" {2,}", cells), strict=True)), "rest": "\n".join(rest)}


def test_a_running_run_shows_reward_and_the_accuracy_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run.create(tmp_path, "now", CONFIG.format(name="now", lr=1e-4)) as run:
        run.write_status("running", 240)
        run.log(0, {"before/accuracy": 0.25, "before/low": 0.2, "before/high": 0.3})
        run.log(12, {"reward/mean": 0.5})
        cells = listed(tmp_path, capsys)
    assert cells["state"] == "running" and cells["steps"] == "12/240" and cells["reward"] == "0.50"
    assert cells["before"] == "25.0% [20.0, 30.0]" and cells["after"] == "-"


@pytest.mark.parametrize(
    "settings, metrics, shown",
    [
        ("[train]\nsteps = 9\nepochs = 2.0\n", {"reward/mean": 0.5}, "12/30"),
        ("[train]\nsteps = 9\nbudget = 1000\n", {"sampling/answers": 384.0}, "12 (384/1000 answers)"),
    ],
)
def test_progress_honours_epochs_and_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, metrics: dict[str, float], shown: str
) -> None:
    with Run.create(tmp_path, "now", settings) as run:
        run.write_status("running", 30)
        run.log(12, metrics)
        assert listed(tmp_path, capsys)["steps"] == shown


def test_progress_of_a_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run.create(tmp_path, "now", "[sft]\nsteps = 600\n[train]\nsteps = 80\n") as run:
        run.write_status("running", 80)
        run.log(0, {"sft/step": 30, "sft/loss": 2.0})
        assert listed(tmp_path, capsys)["steps"] == "warm start 30/600"
        run.log(0, {"sft/step": 600, "sft/loss": 1.0})
        assert listed(tmp_path, capsys)["steps"] == "0/80"


def test_a_killed_run_is_interrupted_and_a_failed_run_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Run.create(tmp_path, "ended", "") as run:
        run.write_status("running", 80)
    assert listed(tmp_path, capsys)["state"] == "interrupted"
    run.write_status("failed", 80, "the judge failed")
    cells = listed(tmp_path, capsys)
    assert cells["state"] == "failed" and cells["rest"] == "ended failed: the judge failed"
    assert call("ended", "--dir", tmp_path) == 0
    assert "the judge failed" in capsys.readouterr().out


def test_plot_draws_the_curves_again(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = runs_dir / "fast" / "curves.png"
    assert call("fast", "--plot", "--dir", runs_dir) == 0
    assert capsys.readouterr().out.strip() == str(picture) and picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="--plot needs the name"):
        call("--plot", "--dir", runs_dir)
    Run.create(runs_dir, "new", "").close()
    with pytest.raises(UserError, match="no metrics yet"):
        call("new", "--plot", "--dir", runs_dir)


def test_state_of_a_running_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Run.create(tmp_path, "now", ""):
        call("--dir", tmp_path, "--json")
    assert json.loads(capsys.readouterr().out)[0]["state"] == "running"


def test_incomplete_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run.create(tmp_path, "sparse", "")
    run.write_summary({"after": {"accuracy": 0.5}, "paired": None})
    run.close()
    assert call("--dir", tmp_path) == 0
    assert "50.0%" in capsys.readouterr().out


def test_a_damaged_run_does_not_hide_the_others(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs_dir / "fast" / "metrics.jsonl").write_text("{\n")
    assert call("--dir", runs_dir) == 0
    out = capsys.readouterr().out
    assert "demo" in out
    assert "damaged" in out
    with pytest.raises(UserError, match="line 1"):
        call("fast", "--dir", runs_dir)


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--dir", tmp_path / "none") == 0
    assert "assay train" in capsys.readouterr().out


def test_unknown_run(runs_dir: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'demo'"):
        call("dmo", "--dir", runs_dir)
