"""Settings in the help of commands."""

from __future__ import annotations

import pytest

from assay.algos.recipes import RECIPES
from assay.cli.main import main
from assay.config import TrainConfig
from assay.config.sections import BUILT_IN_ENGINES
from assay.config.settings import keys
from assay.envs.registry import ENVS
from assay.tasks.registry import TASKS


def test_help_lists_every_setting_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert "general:" in lines
    for key, field in keys(TrainConfig):
        (line,) = [number for number, text in enumerate(lines) if text.startswith(f"  --{key} ")]
        assert (field.description or "").split()[0] in lines[line]
        section = key.rpartition(".")[0]
        heading = next(text for text in reversed(lines[:line]) if text and not text.startswith(" "))
        assert heading.startswith(f"{section}: " if section else "general:")
    assert max(map(len, lines)) <= 120
    assert "[300.0]" in output  # defaults are shown


def test_help_of_one_section_lists_its_keys_and_allowed_values(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("optim", "--optim"):
        assert main(["train", "--help", word]) == 0
        lines = capsys.readouterr().out.splitlines()
        shown = [line.split()[0] for line in lines if line.startswith("  --")]
        assert shown == [f"--{key}" for key, _ in keys(TrainConfig) if key.startswith("optim.")]
        assert any("one of constant, linear, cosine" in line for line in lines)
        assert not any(line.startswith("usage") for line in lines)


def test_help_lists_the_names_of_registries(capsys: pytest.CaptureFixture[str]) -> None:
    registries = {"algo.recipe": RECIPES, "task.name": TASKS, "env.name": ENVS, "engine.name": BUILT_IN_ENGINES}
    for key, names in registries.items():
        assert main(["train", "--help", key]) == 0
        assert f"built in: {', '.join(names)}" in " ".join(capsys.readouterr().out.split())


def test_help_of_a_key_and_of_general_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for words, keys_shown in (
        (["train", "configs/demo.toml", "-h", "seed"], ["--seed"]),
        (["eval", "--help", "general"], ["--runs_dir", "--seed", "--threads", "--device"]),
    ):
        assert main(words) == 0
        shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
        assert set(shown) == set(keys_shown)


def test_help_of_an_unknown_section_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command, word, hint in (("train", "optm", "'optim'"), ("eval", "optim", "known: general")):
        assert main([command, "--help", word]) == 2
        result = capsys.readouterr()
        assert hint in result.err and result.err.count("\n") == 1 and not result.out
