"""Rules on settings alone."""

from __future__ import annotations

from typing import Any

import pytest

from assay.checks.settings import LARGE, REASONABLE, diagnose_settings
from assay.config import TrainConfig


def found(parameters: int | None = None, **changes: Any) -> list[tuple[str, str]]:
    config = TrainConfig.model_validate(changes).model_dump()
    return [(cause.name, str(cause)) for cause in diagnose_settings(config, parameters)]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"reward": {"accuracy": 0.0}}, "reward.accuracy"),
        ({"reward": {"correct": 0.0}}, "reward.correct"),
        ({"reward": {"functions": ["task", "a.py:f"], "weights": [0.0, 0.0]}}, "reward.weights"),
        ({"train": {"samples": 1}, "algo": {"drop_zero_variance": True}}, "train.samples (now 1)"),
    ],
)
def test_a_loss_that_is_zero_by_construction_is_an_error(changes: dict[str, Any], key: str) -> None:
    ((name, text),) = found(1_000_000, **changes)
    assert name == "zero_loss" and key in text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reward": {"accuracy": 0.0, "format": 1.0}},
        {"reward": {"correct": 0.0, "wrong": -1.0}},
        {"reward": {"accuracy": 0.0, "function": "a.py:f"}},
        {"reward": {"accuracy": 0.0}, "env": {"name": "guess"}},
        {"reward": {"functions": ["task"]}},
        {"train": {"samples": 1}},
        {"train": {"steps": 3, "epochs": 2.0}, "optim": {"warmup": 10}},
    ],
)
def test_settings_that_can_learn_are_silent(changes: dict[str, Any]) -> None:
    assert found(1_000_000, **changes) == []


def test_few_answers_per_step_are_noted_for_models_that_are_not_small() -> None:
    few, replayed = {"train": {"prompts": 8, "samples": 8}}, {"replay": {"groups": 8}}
    for parameters in (LARGE, None):  # None: a model on the hub
        ((name, text),) = found(parameters, **few)
        assert name == "small_batch" and "64 answers" in text and "train.prompts (now 8)" in text
    assert not found(LARGE - 1, **few) and not found(LARGE, **few, **replayed)


def test_a_warm_up_that_is_not_shorter_than_the_run_is_reported() -> None:
    ((name, text),) = found(train={"steps": 10}, optim={"warmup": 10})
    assert name == "learning_rate_low" and "optim.warmup (now 10)" in text
    assert not found(train={"steps": 10}, optim={"warmup": 9})


@pytest.mark.parametrize("case", REASONABLE)
def test_learning_rates_are_compared_with_the_range_of_their_kind(case: tuple[str, bool]) -> None:
    kind, large = case
    low, high = REASONABLE[case]
    parameters = LARGE if large else LARGE - 1
    for value, name in ((low, None), (high, None), (low / 2, "learning_rate_low"), (high * 2, "learning_rate_high")):
        changes: dict[str, Any] = {"train": {"steps": 10}, "optim": {"lr": 1e-5}}
        if kind == "sft":
            changes["sft"] = {"steps": 5, "lr": value}
        elif kind == "muon":
            changes["optim"] |= {"name": "muon", "matrix_lr": value}
        else:
            changes["optim"] = {"lr": value}
            changes["lora"] = {"rank": 8 if kind == "lora" else 0}
        assert [one for one, _ in found(parameters, **changes)] == ([name] if name else [])


def test_the_repository_s_configs_are_within_the_ranges() -> None:
    """Of models with the sizes of their names."""
    from pathlib import Path

    from assay.config.settings import load_settings

    folder = Path(__file__).resolve().parents[2] / "configs"
    checked = 0
    for file in sorted(folder.glob("*.toml")):
        cfg = load_settings(TrainConfig, file, {})
        large = not cfg.model.source.startswith("preset:")
        assert not list(diagnose_settings(cfg.model_dump(), 135_000_000 if large else 200_000)), file
        checked += 1
    assert checked >= 6
