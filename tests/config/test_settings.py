from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from assay.build.problems import build_algorithm
from assay.config import AlgoConfig, TrainConfig
from assay.config.settings import RENAMED, keys, load_settings, parse_overrides, to_toml
from assay.types import UserError

ROOT = Path(__file__).resolve().parents[2]


def load(words: str, file: Path | None = None) -> TrainConfig:
    return load_settings(TrainConfig, file, parse_overrides(words.split()))


def write(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, 'seed = 3\n[optim]\nlr = 0.5\nwarmup = 7\n[task]\nname = "abacus"\nargs = {max_steps = 2}\n')
    cfg = load("--optim.lr 1e-4 --task.args.min_steps=1 --eval.temperature 0.7", file)
    assert (cfg.seed, cfg.optim.lr, cfg.optim.warmup, cfg.eval.temperature) == (3, 1e-4, 7, 0.7)
    assert cfg.task.args == {"max_steps": 2, "min_steps": 1}
    assert cfg.optim.eps == TrainConfig().optim.eps


def test_overrides_keep_the_tables_of_the_caller() -> None:
    table = {"steps": 60}
    assert load_settings(TrainConfig, None, {"sft": table, "sft.steps": 5}).sft.steps == 5
    assert table == {"steps": 60}


def test_overrides_read_toml_values_strings_and_bare_switches() -> None:
    words = ["--a.b", "1", "--c=x/y z", "--flag", "--list", "['p', 'q']", "--low", "-3", "--some-key", "true"]
    expected = {"a.b": 1, "c": "x/y z", "flag": True, "list": ["p", "q"], "low": -3, "some_key": True}
    assert parse_overrides(words) == expected
    for words in ("--algo.recompute_logprobs", "--algo.recompute_logprobs true"):
        algo = load(words).algo
        assert algo.recompute_logprobs is True and algo.model_fields_set == {"recompute_logprobs"}
    assert load("").algo.model_fields_set == set()


def test_the_length_of_a_run_on_the_command_line_replaces_another_one_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[train]\nepochs = 2.0\nprompts = 4\n")
    steps = load("--train.steps 3", file).train
    assert (steps.steps, steps.epochs, steps.prompts) == (3, 0.0, 4)
    budget = load("--train.budget 64", file).train
    assert (budget.budget, budget.epochs) == (64, 0.0)
    assert load("--optim.lr 1", file).train.epochs == 2.0
    assert load("--train.steps 0 --train.epochs 1", file).train.epochs == 1.0
    assert load("--train.epochs 1", write(tmp_path, "train.budget = 9")).train.budget == 0
    with pytest.raises(UserError, match=r"^--train.steps and --train.epochs exclude each other: give one of them$"):
        load("--train.steps 3 --train.epochs 1")


def test_a_system_prompt_on_the_command_line_replaces_another_one_of_the_file(tmp_path: Path) -> None:
    prompt = load("--prompt.system_file new.txt", write(tmp_path, 'prompt.system = "old"')).prompt
    assert (prompt.system, prompt.system_file) == ("", "new.txt")


def test_an_invalid_choice_is_explained_by_its_key_and_all_allowed_values() -> None:
    with pytest.raises(UserError, match=r"^bad value for 'eval.final_split' .* 'test' or 'all', not 'tset'$"):
        load("--eval.final_split tset")


def test_former_names_of_keys_are_errors_that_give_all_new_names(tmp_path: Path) -> None:
    file = write(tmp_path, "[engine]\nmemory = 2.0\n[optim]\nfinal = 0.1\n")
    with pytest.raises(UserError, match=r"run\.toml: .*'optim.final' is now 'optim.min_lr_ratio'") as error:
        load("--train.steps 3", file)
    assert "'engine.memory' is now 'engine.kv_cache_gib'" in str(error.value)
    for former, new in RENAMED.items():
        assert new in dict(keys(TrainConfig))
        with pytest.raises(UserError, match=f"on the command line: '{former}' is now '{new}'$"):
            load(f"--{former} 0.5")


def test_short_forms_work_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "folder/a"\ntask = "gsm8k"\n')
    assert load("", file).model.source == "folder/a"
    cfg = load("--model folder/b --model.max_length 64 --task.path data", file)
    assert (cfg.model.source, cfg.model.max_length) == ("folder/b", 64)
    assert (cfg.task.name, cfg.task.path) == ("gsm8k", "data")
    tasks = write(tmp_path, '[task]\nname = "gsm8k"\npath = "old"\nargs = {val_size = 3}\n')
    for words in ("--task jsonl --task.path new", "--task.path new --task jsonl"):  # in any order
        assert load(words, tasks).task.model_dump() == {"name": "jsonl", "path": "new", "args": {}}
    assert load("--task.path new", tasks).task.args == {"val_size": 3}
    cfg = load("--algo dapo --optim muon --engine native --sampling.stop END", write(tmp_path, "[optim]\nlr = 0.5\n"))
    assert (cfg.algo.recipe, cfg.optim.name, cfg.optim.lr, cfg.engine.name) == ("dapo", "muon", 0.5, "native")
    assert cfg.sampling.stop == ["END"]
    with pytest.raises(UserError, match="bad value for 'train'"):
        load("--train fast")
    table = write(tmp_path, '[model]\nsource = "folder/a"\nmax_length = 99\n')
    assert load("--model folder/c", table).model.model_dump()["max_length"] == 99


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--optim.lrr 1", ("'optim.lrr'", "command line", "'optim.lr'")),
        ("--train.lr 1", ("'train.lr'", "'optim.lr'")),
        ("--optim.lr fast", ("'optim.lr'", "number", "'fast'")),
        ("--train.samples 0", ("'train.samples'", "greater than or equal to 1")),
        ("--dtype float8", ("'dtype'", "'bfloat16'", "'float8'")),
        ("--train.steps", ("--train.steps needs a value",)),
        ("--train.process --seed 3", ("--train.process needs a value: one of same, separate",)),
        ("--algo.kl --seed 3", ("--algo.kl needs a value: one of k1, k2, k3",)),
        ("--optim.lr --seed 3", ("--optim.lr needs a value",)),
        ("--seed.more 1", ("'seed'",)),
        ("optim.lr", ("unexpected argument 'optim.lr'",)),
        ("--actor.lr 1", ("'actor.lr'", "did you mean 'optim.lr' or 'critic.lr' or 'sft.lr'?")),
    ],
)
def test_mistakes_on_the_command_line_are_named(words: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        load(words)
    assert all(part in str(error.value) for part in parts), str(error.value)
    assert "\n" not in str(error.value)


def test_mistakes_in_a_file_name_the_file_and_count_the_rest(tmp_path: Path) -> None:
    file = write(tmp_path, "[train]\nstps = 3\n[optim]\nlr = -1\n")
    with pytest.raises(
        UserError, match=r"'train.stps' in .*run.toml: did you mean 'train.steps'\? \(and 1 more problem\)"
    ):
        load("", file)
    with pytest.raises(UserError, match="no config file at"):
        load("", tmp_path / "none.toml")
    with pytest.raises(UserError, match="is not valid TOML"):
        load("", write(tmp_path, "a = = 1"))
    with pytest.raises(UserError, match="is a folder"):
        load("", tmp_path)


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    words = ["--task.args", '{"odd key" = [1, 2.5], deep = {x = "q\\"uote"}}', "--algo.kl_coef", "0.1"]
    cfg = load_settings(TrainConfig, None, parse_overrides([*words, "--sampling.stop", '["\\n\\n"]']))
    assert cfg.task.args == {"odd key": [1, 2.5], "deep": {"x": 'q"uote'}} and cfg.sampling.stop == ["\n\n"]
    assert load("", write(tmp_path, to_toml(cfg))) == cfg


def test_numbers_that_are_not_finite_and_empty_tables_survive_in_the_resolved_config(tmp_path: Path) -> None:
    cfg = load("--algo.clip_high inf --algo.term_args {T={bound=-inf}} --task.args {x={},y=[{z=inf}]}")
    again = load("", write(tmp_path, to_toml(cfg)))
    assert again == cfg and again.algo.clip_high == math.inf
    assert again.task.args == {"x": {}, "y": [{"z": math.inf}]} and again.algo.term_args == {"T": {"bound": -math.inf}}


@pytest.mark.parametrize("args", [{"x": None}, {"x": [{"y": [None]}]}])
def test_none_in_arguments_is_refused_because_a_run_cannot_store_it(args: dict[str, Any]) -> None:
    for key, value in (("task.args", args), ("algo.term_args", {"Term": args})):
        with pytest.raises(UserError, match=rf"{key}.* None, .*leave it out"):
            load_settings(TrainConfig, None, {key: value})


def test_written_settings_leave_to_the_recipe_what_was_left_to_it(tmp_path: Path) -> None:
    """Defaults that were written out would override those of the recipe when the file is read again."""
    cfg = load("--algo.recipe dapo --algo.clip_low 0.2")
    again = load("", write(tmp_path, to_toml(cfg)))
    left = {"recipe", "clip_low", "reference", "refresh_reference", "reference_ema"}  # no recipe has a reference
    assert again.algo.model_fields_set == left
    assert complete(again).clip_high == complete(cfg).clip_high == 0.28
    assert complete(load("--algo.clip_high 0.2", write(tmp_path, to_toml(cfg)))).clip_high == 0.2


def complete(cfg: TrainConfig) -> AlgoConfig:
    return build_algorithm(cfg).settings


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}},
            "unknown key 'optimizer' in the settings: did you mean 'optim'?",
        ),
        ({"optimizer": "adamw"}, "did you mean 'optim'?"),
        ({"evaluation": {"foo": 1}}, "did you mean 'eval'?"),
        ({"trainer": {"total_epochs": 1}}, "verl's trainer.total_epochs is 'train.epochs' here"),
    ],
    ids=str,
)
def test_other_names_of_sections_lead_to_the_section(words: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_settings(TrainConfig, None, words)
    assert message in str(caught.value).replace("on the command line", "in the settings")
