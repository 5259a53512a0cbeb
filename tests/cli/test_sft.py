"""`assay sft`: the warm start as a separate run."""

from __future__ import annotations

import pytest
from small_run import SmallRuns

from assay.cli.main import main
from assay.runs.metrics import draw_curves
from assay.training import run

STEPS = 40


@pytest.mark.slow
def test_sft_learns_the_format_of_the_solutions(small: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "draw_curves", draw_curves)
    words = ("--sft.steps", STEPS, "--sft.batch", 16, "--sft.lr", 1e-2, "--reward.function", "")
    assert small("sft", small.config, *words, "--sampling.max_new_tokens", 24) == 0
    summary = small.summary("small-sft")
    # The format of the solutions is learned long before the arithmetic.
    assert summary["before"]["format"] < summary["after"]["format"]
    fall = losses(small, "small-sft")
    assert len(fall) == STEPS and fall[-1] < 0.5 * fall[0]
    assert (small.runs / "small-sft" / "curves.png").is_file()


def losses(small: SmallRuns, name: str) -> list[float]:
    return [row["sft/loss"] for row in small.metrics(name) if "sft/loss" in row]


def test_rl_starts_from_the_sft_checkpoint_which_equals_the_warm_start_of_a_training_run(small: SmallRuns) -> None:
    assert small("sft", small.config, "--sft.steps", 2, "--sft.batch", 4) == 0
    summary = small.summary("small-sft")
    assert (summary["algorithm"], summary["steps"], summary["tokens"]) == ("sft", 0, 0)
    assert summary["before"]["n"] == summary["after"]["n"] == 5 and summary["sft"]["steps"] == 2
    keys = ("before/accuracy", "sft/loss", "after/accuracy")
    order = [key for row in small.metrics("small-sft") for key in keys if key in row]
    assert order == ["before/accuracy", "sft/loss", "sft/loss", "after/accuracy"]
    assert small.train("--model", "run:small-sft@last", "--train.steps", 1) == 0
    begun = (small.checkpoint(0) / "model/model.safetensors").read_bytes()
    assert begun == (small.checkpoint(0, "small-sft") / "model/model.safetensors").read_bytes()
    assert small.train("--sft.steps", 2, "--sft.batch", 4, "--train.steps", 1, "--name", "warm") == 0
    assert begun == (small.checkpoint(0, "warm") / "model/model.safetensors").read_bytes()
    assert losses(small, "warm") == losses(small, "small-sft")


def test_solutions_have_their_own_task_arguments(small: SmallRuns) -> None:
    """And all settings can be given without a config file."""
    words = ("--model", "preset:nano", "--task", "abacus", "--task.args", "{train_size = 9}", "--reward.workers", 0)
    limits = ("--sft.steps", 1, "--sft.batch", 8, "--eval.final_examples", 2, "--sampling.max_new_tokens", 2)
    for name, args in (("clean", "{}"), ("sloppy", "{noise = 1.0}")):
        assert small("sft", *words, *limits, "--name", name, "--sft.args", args) == 0
    assert losses(small, "clean") != losses(small, "sloppy")


def test_mistakes_are_reported_in_one_line(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    (small.folder / "rows.py").write_text(
        "rows = {s: [{'question': f'{n} {s}', 'answer': n} for n in range(9)] for s in ('train', 'validation', 'test')}"
    )
    unsolved = ("--task", f"{small.folder}/rows.py:rows", "--task.args", "{}", "--model.tokenizer", "characters")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((small.config,), "set sft.steps"),
        ((small.config, "--sft.steps", 1, *unsolved), "no worked solution"),
        ((small.config, "--sft.steps", 1, "--sft.args.noize", 1), "did you mean 'noise'"),
        ((small.folder / "none.toml", "--sft.steps", 1), "no config file"),
    ]
    for words, message in cases:
        capsys.readouterr()
        assert small("sft", *words) == 2, words
        output = capsys.readouterr().err
        assert message in output and output.count("\n") == 1


def test_a_dry_run_trains_nothing(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    assert small("sft", small.config, "--sft.steps", 7, "--dry-run") == 0
    output = capsys.readouterr().out
    assert "all checks passed" in output and "warm start: 7 steps" in output and not small.runs.exists()
    assert main(["sft", "--help"]) == 0
