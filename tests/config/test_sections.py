"""The sections of settings: help texts, shipped configs, and values that a section rejects."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.config import MeasureConfig, TrainConfig
from assay.config.settings import keys, literals, load_settings, parse_overrides
from assay.types import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_every_setting_has_a_help_text() -> None:
    for kind in (TrainConfig, MeasureConfig):
        assert not [key for key, field in keys(kind) if not field.description]


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("optim.schedule", ["constant", "linear", "cosine"]),
        ("algo.kl", ["k1", "k2", "k3"]),  # or none
        ("reward.extract", ["boxed", "hash", "answer-tag", "last-number"]),  # or empty
        ("eval.final_split", ["train", "validation", "test", "all"]),
        ("optim.lr", []),
        ("train.activation_checkpointing", ["partial", "offload"]),  # or a boolean
    ],
)
def test_names_of_settings_with_a_literal_type(key: str, names: list[str]) -> None:
    assert literals(dict(keys(TrainConfig))[key].annotation) == names


def test_every_shipped_config_is_valid() -> None:
    for file in sorted((ROOT / "configs").rglob("*.toml")):
        cfg = load_settings(TrainConfig, file, {})
        assert cfg.model.source and cfg.task.name, file


def test_an_evaluation_has_the_sections_of_a_training_run() -> None:
    for name, field in MeasureConfig.model_fields.items():
        if name == "engine":  # training accepts fewer engines
            assert issubclass(TrainConfig.model_fields[name].annotation, field.annotation)
        elif name != "openai":  # the section of an engine that cannot train
            assert field.annotation is TrainConfig.model_fields[name].annotation


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--engine.name vlm", "engine.name"),
        ("--sampling.temperature 0", "sampling.temperature"),
        ("--optim.betas [0.9,1.0]", "optim.betas"),
        ("--lora.targets []", "lora.targets"),
    ],
)
def test_values_out_of_range_are_reported_with_their_key(words: str, key: str) -> None:
    with pytest.raises(UserError, match=f"bad value for '{key}"):
        load_settings(TrainConfig, None, parse_overrides(words.split()))
