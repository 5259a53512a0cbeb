"""Settings of other libraries: every name leads to a key that exists, or to a reason."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from assay.algos.recipes import complete_settings
from assay.cli.main import main
from assay.config import MeasureConfig, TrainConfig
from assay.config.settings import (
    equivalents,
    explain_foreign,
    keys,
    load_settings,
    nearest_foreign,
    parse_overrides,
)
from assay.types import UserError

KNOWN = [key for key, _ in keys(TrainConfig)]


def error_of(words: str, kind: type = TrainConfig, file: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        load_settings(kind, file, parse_overrides(words.split()))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_equivalent_is_a_key() -> None:
    assert not [row for row in equivalents() if row.key and row.key not in KNOWN]


def test_keys_that_a_remark_names_exist() -> None:
    named = {key for row in equivalents() for key in re.findall(r"\b[a-z]+\.[a-z][a-z_.]*[a-z]", row.remark)}
    files = {"metrics.jsonl", "file.py", "task.args.map"}
    assert named - files <= set(KNOWN)


def test_names_without_an_equivalent_say_why() -> None:
    reasons = ("not needed", "not supported", "not a setting")
    assert all(row.remark.startswith(reasons) for row in equivalents() if not row.key)


@pytest.mark.parametrize("name", ["reward_model.enable", "reward_pretrain", "remote_rm_url"])
def test_reward_models_of_other_libraries_are_judges(name: str) -> None:
    assert "judge." in (explain_foreign(name, KNOWN) or "")


def test_every_name_is_explained_at_the_top_level_and_in_any_section() -> None:
    names = Counter(row.name for row in equivalents())
    assert {row.library for row in equivalents()} == {"TRL", "verl", "OpenRLHF", "nanochat"}
    for library, name, key, remark in equivalents():
        for written in (name, name.upper().replace("_", "-"), f"lora.{name}", f"other.{name}"):
            text = explain_foreign(written, KNOWN)
            assert text is not None, written
            if names[name] == 1:
                assert (f"'{key}'" if key else library) in text and remark in text, written


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--num_generations 8", ("TRL", "'train.samples'")),
        ("--num-generations 8", ("TRL", "'train.samples'")),
        ("--Num_Generations=8", ("TRL", "'train.samples'")),
        ("--train.num_generations 8", ("'train.num_generations'", "'train.samples'")),
        ("--actor_rollout_ref.rollout.n 8", ("verl", "'train.samples'", "on the command line")),
        ("--rollout.n 8", ("actor_rollout_ref.rollout.n", "'train.samples'")),
        ("--model.path x", ("'model.source'",)),  # a key of verl in a section that exists here
        ("--clip_ratio 0.1", ("'algo.clip_low'", "algo.clip_high")),
        ("--examples-per-step 16", ("nanochat", "'train.prompts'")),
        ("--n_samples_per_prompt 16", ("OpenRLHF", "'train.samples'")),
        ("--use_vllm", ("not needed", "engine.name")),
        ("--bf16", ("'dtype'", "bfloat16")),
        ("--num_generatons 8", ("TRL", "'train.samples'")),  # misspelt
        # in a section with a key of that name, it is the one that is meant
        ("--critic.learning_rate 1", ("'critic.lr'",)),
        ("--eval.max_completion_length 8", ("'eval.max_new_tokens'",)),
        ("--save.eval_steps 8", ("'eval.every'",)),
        # a key of ours without its section
        ("--lr 1", ("did you mean 'optim.lr'",)),
        ("--temperature 1", ("did you mean 'sampling.temperature'",)),
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
        "num_generations = 8",
        "num-generations = 8",
        "[train]\nNum_Generations = 8",
        "[grpo]\nsome = 1\nnum_generations = 8",
        "[actor_rollout_ref.rollout]\ntemperature_of_something = 3\nn = 8",
        "[actor_rollout_ref]\nrollout = {n = 8}",
    ],
)
def test_names_in_a_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    message = error_of("", file=file)
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
        assert explain_foreign(name, KNOWN) is None
    assert nearest_foreign("whatever") is None and nearest_foreign("train.Learning-rat") == "learning_rate"
    assert "known: " in error_of("--whatever 3")


def test_a_foreign_name_ends_the_command_with_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    assert main(["train", str(tmp_path / "run.toml"), "--num_generations", "8"]) == 2
    result = capsys.readouterr()
    assert result.err.count("\n") == 1 and "train.samples" in result.err and not result.out
