"""Settings in the help of commands."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from assay.algos.advantages import ADVANTAGES
from assay.algos.batch import AGGREGATES
from assay.algos.losses import LOSSES
from assay.algos.recipes import RECIPES
from assay.cli.main import main
from assay.config import TrainConfig
from assay.config.sections import BUILT_IN_ENGINES
from assay.config.settings import keys
from assay.envs.registry import ENVS
from assay.tasks.registry import TASKS


@pytest.mark.parametrize("command", ["train", "sft"])
def test_help_lists_every_setting_in_its_group(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
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


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("algo.recipe", RECIPES),
        ("algo.advantage", ADVANTAGES),
        ("algo.policy_loss", LOSSES),
        ("algo.aggregate", AGGREGATES),
        ("task.name", TASKS),
        ("env.name", ENVS),
        ("engine.name", BUILT_IN_ENGINES),
    ],
)
def test_help_lists_the_names_of_a_registry(capsys: pytest.CaptureFixture[str], key: str, names: Iterable[str]) -> None:
    assert main(["train", "--help", key]) == 0
    assert f"built in: {', '.join(names)}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "first", "number"),
    [
        (["train", "-h", "seed"], "--seed", 1),
        (["train", "configs/demo.toml", "--help", "algo.recipe"], "--algo.recipe", 1),
        (["eval", "--help", "engine"], "--engine.name", 9),
        (["eval", "--help", "general"], "--runs_dir", 4),
    ],
)
def test_help_of_a_key_or_a_section(
    capsys: pytest.CaptureFixture[str], words: list[str], first: str, number: int
) -> None:
    assert main(words) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert shown[0] == first and len(shown) == number


@pytest.mark.parametrize(
    ("command", "word", "hint"), [("train", "optm", "'optim'"), ("eval", "optim", "known: general")]
)
def test_help_of_an_unknown_section_is_one_line(
    capsys: pytest.CaptureFixture[str], command: str, word: str, hint: str
) -> None:
    assert main([command, "--help", word]) == 2
    result = capsys.readouterr()
    assert hint in result.err and result.err.count("\n") == 1 and not result.out
