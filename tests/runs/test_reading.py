"""Reading of runs in which some files cannot be read, and facts about a run."""

from __future__ import annotations

from pathlib import Path

from assay.config import TrainConfig
from assay.runs.directory import RunFiles, default_settings, facts_of, flattened


def test_readable_lines_are_returned_and_the_others_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "x": "NaN"}\nbroken\n[]\n{"step": "2"}\n{"step": 3}\n{"step": 4, "r'
    )
    files = RunFiles(tmp_path)
    first, last = files.metrics()
    assert first["step"] == 1 and first["x"] != first["x"] and last == {"step": 3}
    assert files.problems == ["metrics.jsonl: 2 of 5 lines cannot be read"]  # the incomplete last line is no problem


def test_folders_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    assert RunFiles(tmp_path).problems == ["rollouts cannot be listed (not a directory)"]


def test_a_run_in_progress_is_described_by_its_config_and_metrics() -> None:
    rows = [
        {"step": 0, "before/accuracy": 0.25, "before/low": 0.1, "before/high": 0.5},
        {"step": 4, "reward/mean": 0.5, "sampling/answers": 32.0, "time/wall": 12.5},
        {"step": 5, "reward/mean": float("nan")},
    ]
    facts = facts_of("one", "runs/one", "running", rows, {"seed": 3, "train": {"steps": 9}})
    assert (facts["state"], facts["steps"], facts["steps_planned"], facts["seed"]) == ("running", 5, 9, 3)
    assert facts["reward"] == 0.5  # the last finite one
    assert facts["before"] == {"accuracy": 0.25, "ci95": [0.1, 0.5]} and facts["after"] is None
    assert facts["wall_s"] == 12.5


def test_the_summary_comes_first() -> None:
    summary = {"task": "mix", "model": "m", "algorithm": "ppo", "seed": 0, "steps": 7, "wall_s": 2.5}
    facts = facts_of("x", "runs/x", "finished", config={"seed": 3, "task": {"name": "abacus"}}, summary=summary)
    assert (facts["task"], facts["seed"], facts["steps"], facts["wall_s"]) == ("mix", 0, 7, 2.5)


def test_a_config_with_defaults_only_equals_the_default_settings() -> None:
    """Values are compared as they are read from config.toml: lists, not tuples."""
    defaults = default_settings()
    assert defaults["optim.lr"] == TrainConfig().optim.lr and isinstance(defaults["optim.betas"], list)
    assert flattened({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}
