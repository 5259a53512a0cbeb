"""`assay runs`: list and compare runs."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from scipy.stats import binomtest

from assay.api.inspection import blocks
from assay.cli import runs
from assay.cli.main import main
from assay.runs import Run, write_rollouts
from assay.types import Completion, Finish, Group, Prompt, Rollout, Status, Turn, UserError, Verdict

CONFIG = """
name = "{name}"
seed = 7
task.name = "abacus"
model.source = "preset:tiny"
algo.recipe = "grpo"
optim.lr = {lr}
train.steps = 240
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


def test_list(runs_dir: Path, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]) -> None:
    title, headings, first, second, resume = stdout_of(call("--dir", runs_dir)).splitlines()
    assert title == f"Runs in {runs_dir}"
    assert headings.split()[:3] == ["run", "state", "task"]
    for wanted in ("finished", "abacus", "grpo", "240/240", "33.0% [29.0, 37.0]", "67.0% [63.0, 71.0]", "1.2e-20"):
        assert wanted in first
    assert "3m10s" in first
    assert second.split()[:6] == ["fast", "stopped", "abacus", "preset:tiny", "grpo", "12/240"]
    assert resume == f"fast was stopped; to resume it: assay train --resume {runs_dir / 'fast'}"
    call("--dir", runs_dir, "--json")
    facts = json.loads(capsys.readouterr().out)
    assert [(fact["run"], fact["state"], fact["steps"]) for fact in facts] == [
        *(("demo", "finished", 240), ("fast", "stopped", 12))
    ]
    assert facts[0]["after"] == SUMMARY["after"]


def test_folders_without_runs_unknown_runs_and_incomplete_summaries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    assert "assay train" in stdout_of(call("--dir", tmp_path / "none"))
    with Run.create(tmp_path, "sparse", "") as run:
        run.write_summary({"after": {"accuracy": 0.5}, "paired": None})
    assert "50.0%" in listed(tmp_path, capsys)["after"]
    with pytest.raises(UserError, match="did you mean 'sparse'"):
        call("sprse", "--dir", tmp_path)


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
        ("[sft]\nsteps = 600\n", {"step": 0, "sft/step": 30, "sft/loss": 2.0}, "warm start 30/600"),
        ("[sft]\nsteps = 600\n", {"step": 0, "sft/step": 600, "sft/loss": 2.0}, "0/30"),
    ],
)
def test_progress_honours_epochs_budget_and_warm_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, metrics: dict[str, float], shown: str
) -> None:
    with Run.create(tmp_path, "now", settings) as run:
        run.write_status("running", 30)
        run.log(12, metrics)  # unless the metrics have a step
        assert listed(tmp_path, capsys)["steps"] == shown


def test_a_killed_run_is_interrupted_and_a_failed_run_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    with Run.create(tmp_path, "ended", "") as run:
        run.write_status("running", 80)
    assert listed(tmp_path, capsys)["state"] == "interrupted"
    run.write_status("failed", 80, "the judge failed")
    cells = listed(tmp_path, capsys)
    assert cells["state"] == "failed" and cells["rest"] == "ended failed: the judge failed"
    assert "the judge failed" in stdout_of(call("ended", "--dir", tmp_path))


def test_plot_draws_the_curves_again(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = runs_dir / "fast" / "curves.png"
    assert call("fast", "--plot", "--dir", runs_dir) == 0
    assert capsys.readouterr().out.strip() == str(picture) and picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="--plot needs the name"):
        call("--plot", "--dir", runs_dir)
    Run.create(runs_dir, "new", "").close()
    with pytest.raises(UserError, match="no metrics yet"):
        call("new", "--plot", "--dir", runs_dir)


def test_a_damaged_run_does_not_hide_the_others(runs_dir: Path, stdout_of: Callable[..., str]) -> None:
    (runs_dir / "fast" / "metrics.jsonl").write_text("{\n")
    out = stdout_of(call("--dir", runs_dir))
    assert "demo" in out
    assert "damaged" in out
    with pytest.raises(UserError, match="line 1"):
        call("fast", "--dir", runs_dir)


# Comparison

COMPARED = '[task]\nname = "abacus"\n[optim]\nlr = {lr}\n'


def answered(question: int, correct: bool, split: str = "test") -> Group:
    prompt = Prompt(f"abacus/{split}/{question}", ({"role": "user", "content": f"1 + {question}?"},), str(question + 1))
    turn = Turn([1], Completion([2], [-0.5], [-0.5], Finish.STOP, 0), "2")
    verdict = Verdict(float(correct), Status.OK if correct else Status.WRONG, "2")
    return Group(prompt, [Rollout(prompt, 0, [turn], verdict, float(correct))])


def make_run(folder: Path, name: str, correct: range, questions: range = range(40), lr: float = 1e-4) -> Path:
    """A finished run that answers the questions in `correct` correctly."""
    with Run.create(folder, name, COMPARED.format(lr=lr)) as run:
        for step in range(1, 101):
            row = {"reward/mean": step / 100, "length/truncated": 0.5, "time/wall": 2.0 * step}
            run.log(step, {**row, "eval/accuracy": step / 200} if step % 20 == 0 else row)
        write_rollouts(run.path, 100, [answered(q, q in correct) for q in questions], "eval", split="after-test")
        run.write_status("finished", 100)
        run.write_summary({"after": {"accuracy": len(correct) / len(questions), "ci95": [0.1, 0.9]}})
    return run.path


def compare(folder: Path, *words: object) -> int:
    return main(["runs", *map(str, words), "--runs_dir", str(folder)])


def line_of(out: str, start: str) -> str:
    return next(line for line in out.splitlines() if line.startswith(start))


def test_comparison_prints_the_paired_test_curves_and_settings(tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    make_run(tmp_path, "one", range(10))
    make_run(tmp_path, "two", range(8, 20), lr=4e-4)
    out = stdout_of(compare(tmp_path, "compare", "one", "two"))
    p_value = binomtest(8, 18).pvalue
    final = line_of(out, "two with one")
    assert "+5.0 [" in final and "+10 / -8" in final and f"{p_value:.2g}" in final and " 40 " in final
    assert line_of(out, "optim.lr").split() == ["optim.lr", "0.0001", "0.0004"]
    assert "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ 0.01 to 1" in out and "length/truncated" in out
    picture = tmp_path / "compare-one-two.png"
    assert out.splitlines()[-1] == f"Picture of the curves: {picture}" and picture.read_bytes().startswith(b"\x89PNG")


def test_json_and_the_place_of_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs", "one", range(10))
    other = make_run(tmp_path / "others", "one", range(8, 20))
    assert compare(tmp_path / "runs", "compare", "one", other, "--json", "-o", tmp_path / "here.png") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["curves"] == str(tmp_path / "here.png") and (tmp_path / "here.png").is_file()
    (final,) = found["final"]
    assert (final["a"], final["b"]) == (str(tmp_path / "runs" / "one"), str(other))  # they share a name
    assert final["lost"] == [f"abacus/test/{q}" for q in range(8)] and final["questions"] == 40 and final["paired"]
    assert final["p_value"] == pytest.approx(binomtest(8, 18).pvalue) and final["ci95"][0] < 0.05 < final["ci95"][1]
    assert compare(tmp_path / "runs", "compare", "one", other, "-o", tmp_path / "no" / "folder.png") == 2
    assert "choose another file with -o" in capsys.readouterr().err


def test_different_questions_are_said_and_common_ones_compared(tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    make_run(tmp_path, "one", range(10), range(20))
    make_run(tmp_path, "two", range(12), range(5, 30))
    make_run(tmp_path, "other", range(50, 54), range(50, 60))
    out = stdout_of(compare(tmp_path, "one", "two", "other"))
    assert "The settings are equal." in out and not list(tmp_path.glob("*.png"))  # only with the word compare
    assert "only the 15 common questions count (5 only in one, 10 only in two)" in out
    assert "one and other have no question in common, so there is no paired test" in out
    assert line_of(out, "other with one").split()[3:6] == ["20", "and", "10"]


@pytest.mark.parametrize(
    "file, content, told",
    [
        ("evals/*", None, "two (finished) has no evaluation after training"),
        ("evals/*", '{"group": 0, "verd', "line 1: is incomplete"),
        ("evals/*", "", "is empty"),
        ("metrics.jsonl", "{\n", "two: metrics.jsonl, line 1: "),
        ("metrics.jsonl", None, "+10 / -8"),
    ],
)
def test_damaged_and_unfinished_runs_are_said(
    tmp_path: Path, stdout_of: Callable[..., str], file: str, content: str | None, told: str
) -> None:
    make_run(tmp_path, "one", range(10))
    (path,) = make_run(tmp_path, "two", range(8, 20)).glob(file)
    path.unlink() if content is None else path.write_text(content)
    assert told in stdout_of(compare(tmp_path, "one", "two"))
    assert json.loads(stdout_of(compare(tmp_path, "two", "one", "--json")))["runs"][1]["run"] == "one"


def test_a_damaged_config_hides_only_the_settings(tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    make_run(tmp_path, "one", range(10))
    (make_run(tmp_path, "two", range(8, 20)) / "config.toml").write_text("= 3")
    make_run(tmp_path, "three", range(10), lr=2e-4)
    out = stdout_of(compare(tmp_path, "compare", "one", "two"))
    assert "+10 / -8" in line_of(out, "two with one") and line_of(out, "state").split() == [
        *("state", "finished", "damaged", "(finished)")
    ]
    assert line_of(out, "after").count("%") == 2 and out.count("▁▁▂▂▃▃▄▄▅▅▆▆▇▇██ 0.01 to 1") == 2
    assert "The settings of two are not compared: its config.toml cannot be read." in out and "equal" not in out
    found = json.loads(stdout_of(compare(tmp_path, "compare", "one", "two", "three", "--json")))
    assert found["differences"] == {"optim.lr": [1e-4, None, 2e-4]}
    assert [bool(run["problems"]) for run in found["runs"]] == [False, True, False]


def test_too_few_names(tmp_path: Path, capsys: pytest.CaptureFixture[str], stderr_of: Callable[..., str]) -> None:
    make_run(tmp_path, "one", range(10))
    for words in (["compare"], ["compare", "one"], ["one", "-o", "x.png"]):
        assert "at least two runs" in stderr_of(compare(tmp_path, *words))
    make_run(tmp_path, "compare", range(10))
    assert compare(tmp_path, "compare") == 0 and "Results" in capsys.readouterr().out


def test_blocks_are_means_on_the_scale_of_all_runs() -> None:
    assert blocks([0.0, 1.0], (0.0, 1.0)) == "▁█ " and blocks([0.5] * 100, (0.0, 1.0)) == "▅" * 16 + " "
    assert blocks([3.0, 3.0], (3.0, 3.0)) == "▁▁ " and blocks([1.0], (0.0, 1.0)) == ""
