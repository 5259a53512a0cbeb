"""Settings of other libraries: every name leads to a key that exists, or to a reason."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from assay.algos.recipes import complete_settings
from assay.config import MeasureConfig, TrainConfig, settings
from assay.types import UserError

KNOWN = [key for key, _ in settings.keys(TrainConfig)]


def error_of(words: str, kind: type = TrainConfig, file: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        settings.load_settings(kind, file, settings.parse_overrides(words.split()))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_equivalents_name_keys_that_exist_or_say_why_there_is_none() -> None:
    reasons, files = ("not needed", "not supported", "not a setting"), {"metrics.jsonl", "file.py", "task.args.map"}
    for row in settings.equivalents():
        named = set(re.findall(r"\b[a-z]+\.[a-z][a-z_.]*[a-z]", row.remark)) - files
        assert named <= set(KNOWN) and (row.key in KNOWN or (not row.key and row.remark.startswith(reasons))), row


def test_every_name_is_explained_at_the_top_level_and_in_any_section() -> None:
    names = Counter(row.name for row in settings.equivalents())
    assert {row.library for row in settings.equivalents()} == {"TRL", "verl", "OpenRLHF", "nanochat"}
    for library, name, key, remark in settings.equivalents():
        for written in (name, name.upper().replace("_", "-"), f"lora.{name}", f"other.{name}"):
            text = settings.explain_foreign(written, KNOWN)
            assert text is not None, written
            if names[name] == 1:
                assert (f"'{key}'" if key else library) in text and remark in text, written


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--num-generations 8", ("TRL", "'train.samples'")),
        ("--Num_Generations=8", ("TRL", "'train.samples'")),
        ("--train.num_generations 8", ("'train.num_generations'", "'train.samples'")),
        ("--num_generatons 8", ("TRL", "'train.samples'")),  # misspelt
        ("--rollout.n 8", ("actor_rollout_ref.rollout.n", "'train.samples'", "on the command line")),
        ("--model.path x", ("'model.source'",)),  # a key of verl in a section that exists here
        ("--remote_rm_url x", ("judge.",)),
        # in a section with a key of that name, it is the one that is meant
        ("--critic.learning_rate 1", ("'critic.lr'",)),
        ("--eval.max_completion_length 8", ("'eval.max_new_tokens'",)),
        ("--save.eval_steps 8", ("'eval.every'",)),
        # a key of ours without its section
        ("--lr 1", ("did you mean 'optim.lr'",)),
        ("--path x", ("did you mean 'task.path'",)),  # although verl has a key that ends so
        ("--train.seed 1", ("did you mean 'seed'",)),
        ("--batch_size 1", ("'train.prompts'",)),
    ],
)
def test_names_on_the_command_line(words: str, parts: tuple[str, ...]) -> None:
    message = error_of(words)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "text",
    [
        "[train]\nNum-Generations = 8",
        "[grpo]\nsome = 1\nnum_generations = 8",
        "[actor_rollout_ref.rollout]\ntemperature_of_something = 3\nn = 8",
        "[actor_rollout_ref]\nrollout = {n = 8}",
    ],
)
def test_names_in_a_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    message = error_of("", file=tmp_path / "run.toml")
    assert "'train.samples'" in message and "run.toml" in message


def test_an_evaluation_is_pointed_to_its_own_keys() -> None:
    assert "'eval.samples'" in error_of("--num_generations 8", MeasureConfig)
    assert "'eval.max_new_tokens'" in error_of("--max_completion_length 8", MeasureConfig)
    assert "did you mean 'eval.temperature'" in error_of("--temperature 1", MeasureConfig)
    assert "known: " in error_of("--learning_rate 1", MeasureConfig)  # an evaluation has no equivalent


def test_settings_of_an_algorithm_in_python_are_explained() -> None:
    with pytest.raises(UserError, match="TRL's beta is 'kl_coef' here"):
        complete_settings("grpo", beta=0.1)


def test_unknown_names_are_not_taken_for_others() -> None:
    for name in ("whatever", "train.whatever", "n.x", "", "x"):
        assert settings.explain_foreign(name, KNOWN) is None
    assert (
        settings.nearest_foreign("whatever") is None
        and settings.nearest_foreign("train.Learning-rat") == "learning_rate"
    )
    assert "known: " in error_of("--whatever 3")
