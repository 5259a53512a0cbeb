"""Facts about a run: from its summary, or from its config and metrics while it has none."""

from __future__ import annotations

from assay.config import TrainConfig
from assay.runs.facts import RunParts, default_settings, facts_of, flattened, lookup


def test_a_run_in_progress_is_described_by_its_config_and_metrics() -> None:
    rows = [
        {"step": 0, "before/accuracy": 0.25, "before/low": 0.1, "before/high": 0.5},
        {"step": 4, "reward/mean": 0.5, "sampling/answers": 32.0, "time/wall": 12.5},
        {"step": 5, "reward/mean": float("nan")},
    ]
    facts = facts_of(RunParts("running", {"seed": 3, "train": {"steps": 9}}, rows), "one", "runs/one")
    assert (facts["state"], facts["steps"], facts["steps_planned"], facts["seed"]) == ("running", 5, 9, 3)
    assert facts["reward"] == 0.5  # the last finite one
    assert facts["before"] == {"accuracy": 0.25, "ci95": [0.1, 0.5]} and facts["after"] is None
    assert facts["wall_s"] == 12.5


def test_the_summary_comes_first() -> None:
    summary = {"task": "mix", "model": "m", "algorithm": "ppo", "seed": 0, "steps": 7, "wall_s": 2.5}
    facts = facts_of(RunParts("finished", {"seed": 3, "task": {"name": "abacus"}}, summary=summary), "x", "runs/x")
    assert (facts["task"], facts["seed"], facts["steps"], facts["wall_s"]) == ("mix", 0, 7, 2.5)


def test_lookup_of_a_value_that_is_no_table() -> None:
    assert lookup({"a": {"b": 1}}, "a", "b") == 1
    assert lookup({"a": 3}, "a", "b") is None


def test_a_config_with_defaults_only_equals_the_default_settings() -> None:
    """Values are compared as they are read from config.toml: lists, not tuples."""
    defaults = default_settings()
    assert defaults["optim.lr"] == TrainConfig().optim.lr and isinstance(defaults["optim.betas"], list)
    assert flattened({"a": {"b": 1, "c": {"d": [2]}}, "e": None}) == {"a.b": 1, "a.c.d": [2], "e": None}
