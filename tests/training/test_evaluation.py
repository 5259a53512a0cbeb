"""The evaluations of a run."""

from __future__ import annotations

import json

import pytest
from small_run import SmallRuns, gpt2_folder

from assay.cli.main import main
from assay.runs.rollouts import read_lines


def test_every_evaluation_writes_its_answers_and_several_samples_give_pass_at_k(small: SmallRuns) -> None:
    assert small.train("--eval.every", 1, "--eval.samples", 3, "--eval.temperature", 1) == 0
    path = small.runs / "small"
    assert len(read_lines(path, 0, "eval", "before-test")) == 15
    assert len(read_lines(path, 1, "eval", "eval-validation")) == 12
    right = sum(line["verdict"]["status"] == "ok" for line in read_lines(path, 2, "eval", "after-test"))
    after = small.summary()["after"]
    assert after["accuracy"] == pytest.approx(right / 15) == pytest.approx(after["pass_at_k"]["1"])
    assert after["samples"] == 3 and set(after["pass_at_k"]) == {"1", "2", "3"} == set(after["majority_at_k"])
    assert after["pass_at_k"]["1"] <= after["pass_at_k"]["2"] <= after["pass_at_k"]["3"]
    assert any("eval/pass@3" in row for row in small.metrics())
    assert json.loads((path / "environment.json").read_text())["versions"]["torch"]


@pytest.mark.slow
def test_only_periodic_evaluations_need_validation_problems(
    small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    data = small.folder / "data"
    assert main(["data", "prepare", "abacus", "--out", str(data), "--train-size", "6", "--val-size", "0"]) == 0
    words = ("--task", "jsonl", "--task.path", data, "--model.tokenizer", "characters", "--train.steps", 1)
    assert small.train(*words, "--eval.every", 0) == 0
    capsys.readouterr()
    assert small.train(*words, "--eval.every", 1, "--name", "periodic") == 2
    assert "no validation problems" in (error := capsys.readouterr().err) and "eval.every = 0" in error
    assert error.count("\n") == 1


def test_a_pretrained_model_is_also_evaluated_before_its_warm_start(small: SmallRuns) -> None:
    warm = ("--sft.steps", 60, "--sft.batch", 8, "--sft.lr", 1e-2)
    warm = (*warm, "--reward.function", "", "--sampling.max_new_tokens", 30)
    assert small.train(*warm, "--sft.steps", 1, "--train.steps", 0, "--name", "fresh") == 0
    assert "before" not in small.summary("fresh")["sft"]  # of a fresh model there is nothing to know
    folder = gpt2_folder(small.folder / "gpt2")
    assert small.train(*warm, "--model", folder) == 0
    summary, rows = small.summary(), small.metrics()
    start, before = (next(row for row in rows if f"{label}/accuracy" in row) for label in ("start", "before"))
    assert rows.index(start) < next(i for i, row in enumerate(rows) if "sft/loss" in row) < rows.index(before)
    assert summary["sft"]["before"]["n"] == summary["before"]["n"] == 5
    assert summary["sft"]["before"]["accuracy"] == start["start/accuracy"] and start["start/format"] == 0
    assert before["before/format"] > 0  # the warm start taught the form
    assert summary["sft"]["paired"]["gained"] - summary["sft"]["paired"]["lost"] == round(5 * before["before/accuracy"])
    assert len(read_lines(small.runs / "small", 0, "eval", "start-test")) == 5
