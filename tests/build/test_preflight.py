"""What is wrong with settings, folders and the user's own code is reported before weights are loaded.

The settings of an evaluation (`build.measure`), and errors of a lost peer (`build.execute`).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from permissions import public_folder, without_permission
from small_run import SmallRuns

from assay.build import run as run_module
from assay.build.cost import GIB, disk_warning, try_algorithm
from assay.build.measure import measure_settings
from assay.build.run import is_lost_peer
from assay.cli.main import main
from assay.config import TrainConfig
from assay.runs.directory import check_writable
from assay.tasks import make_task
from assay.types import Status, UserError, Verdict

OWN = """
from assay.algos import LossTerm, TermOutput, TokenInput
from assay.config import Section


class Raises(LossTerm):
    name = "raises"

    def per_token(self, batch):
        raise ValueError("nope")


class Nan(LossTerm):
    name = "nan"

    def per_token(self, batch):
        return TermOutput(batch.logprobs * float("nan"))


class Steep(LossTerm):
    '''Finite, with a gradient that is not.'''
    name = "steep"

    def per_token(self, batch):
        return TermOutput((batch.logprobs - batch.logprobs.detach()).sqrt())


class Uneven(LossTerm):
    name = "uneven"
    inputs = (TokenInput("first", from_rollout=lambda rollout: [1.0]),)

    def per_token(self, batch):
        return TermOutput(batch.logprobs * batch.inputs["first"])


class Longest(LossTerm):
    '''Uses everything that a run provides.'''
    name = "longest"
    inputs = (TokenInput("length", from_rollout=lambda rollout: [float(rollout.length)] * rollout.trained),)

    def per_token(self, batch):
        batch.ref_logprobs + batch.engine_logprobs + batch.entropy
        return TermOutput(batch.logprobs * batch.inputs["length"] * 0.01)


def missing(rewards):
    raise KeyError("x")


def one(rewards):
    return [rewards[0]]


def drops(group):
    return group.nothing


def huge(completion, answer):
    return 1e30 if completion else 0.0


def picky(completion, answer):
    return float(completion[0] == answer)


def flat(logprobs, behaviour_logprobs, advantages, clip_low, clip_high):
    return advantages * 0, {}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRuns:
    """Runs whose weights cannot be loaded."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def load_policy(*args: object) -> None:
        raise AssertionError("the weights are loaded")

    monkeypatch.setattr(run_module, "load_policy", load_policy)
    return SmallRuns(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algo.terms", '["own.py:Raises"]'], "the loss term 'raises' failed: ValueError: nope ("),
        (["--algo.terms", '["own.py:Nan"]'], "the loss term 'nan' (nan) is not finite for invented"),
        (["--algo.terms", '["own.py:Steep"]'], "the loss has a gradient that is not finite"),
        (["--algo.terms", '["own.py:Uneven"]'], "token input 'first' has 1 values for 2 trained tokens"),
        (["--algo.advantage", "own.py:missing"], "the advantage function failed: KeyError: 'x' ("),
        (["--algo.advantage", "own.py:one"], "the advantage function returned 1 group for 2"),
        (["--algo.policy_loss", "own.py:flat"], "the loss has no gradient"),
        (["--algo.filter", "own.py:drops"], "the filter failed: AttributeError"),
        (["--engine.name", "own.py:nothing"], "has no 'nothing'"),
        (["--algo.kl_coef", 0.1, "--algo.kl", "k3", "--algo.reference", "./no"], 'no such folder: "./no"'),
        (["--reward.function", "own.py:huge"], "the reward function returned 1e+30, which is not a finite number"),
        (["--reward.correct", 1e30], "bad value for 'reward.correct' on the command line"),
        (["--train.prompts", 100_000, "--train.samples", 1_000], "are 100,000,000 answers per step"),
        (["--sampling.max_new_tokens", 5_000], "sampling.max_new_tokens = 5,000 is more than the context of 512"),
        (["--eval.max_new_tokens", 513], "eval.max_new_tokens = 513 is more than the context of 512"),
        (["--model.max_length", 16, "--sampling.max_new_tokens", 17], "is more than the context of 16 tokens"),
        (["--lora.rank", 1_000], "lora.rank = 1,000 is above the width of the model, 64"),
        (["--optim.precision", "8bit", "--dtype", "float32"], "needs dtype = 'bfloat16', not 'float32'"),
        (["--optim.precision", "8bit", "--dtype", "bfloat16", "--train.process", "separate"], "one training process"),
        (["--name", "a/b"], "'a/b' cannot name a run"),
        (["--runs_dir", "small.toml"], "small.toml is not writable (not a directory)"),
        (["--train.stop_early", 2], "train.stop_early needs periodic evaluations"),
        (["--train.stop_early", 2, "--eval.every", 1, "--eval.split", "test"], "not the test split"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_before_weights_are_loaded(
    small: SmallRuns, words: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(small.config), "--runs_dir", str(small.runs), *map(str, words)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
    assert not small.runs.exists() or not list(small.runs.iterdir())


def test_too_little_disk_space_counts_every_checkpoint_that_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10 * GIB))
    cfg = TrainConfig.model_validate({"save": {"keep": 2, "best": True}})
    assert disk_warning(cfg, 2 * GIB) == ""  # the first, the best, two, and the next one before the oldest goes
    assert disk_warning(cfg, 2.1 * GIB).startswith("checkpoints need up to 10.5 GiB (2.1 each: the first, the best, ")
    assert disk_warning(cfg.model_copy(update={"save": cfg.save.model_copy(update={"best": False})}), 2.1 * GIB) == ""


def test_a_folder_without_permission_is_not_writable() -> None:
    expected = pytest.raises(UserError, match=r"is not writable \(permission denied\): choose another folder")
    with public_folder() as folder, without_permission(folder), expected:
        check_writable(folder / "runs")


def test_the_new_name_of_a_run_is_shown_before_weights_are_loaded(
    small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    (small.runs / "small").mkdir(parents=True)
    (small.runs / "small" / "config.toml").write_text("")
    with pytest.raises(AssertionError, match="the weights are loaded"):
        small.train()
    assert "small exists: this run is small-2" in capsys.readouterr().out


@pytest.mark.parametrize(("prompts", "warned"), [(24, False), (25, True)])
def test_more_prompts_per_step_than_problems_is_a_warning(
    small: SmallRuns, prompts: int, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="the weights are loaded"):
        small.train("--train.prompts", prompts)
    assert ("but the train split has 24 problems" in capsys.readouterr().out) == warned


def test_a_reward_that_fails_on_some_answers_is_a_warning(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="the weights are loaded"):
        small.train("--reward.function", "own.py:picky")
    assert "warning: judging the answer '' to abacus/train/0 failed (IndexError" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["grpo", "ppo", "dapo", "gspo", "reinforce_pp", "remax"])
def test_own_terms_are_tried_with_everything_that_a_recipe_provides(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    algo = {"recipe": recipe, "terms": [f"{tmp_path}/own.py:Longest"], "kl": "k3", "kl_coef": 0.1}
    algo |= {"recompute_logprobs": True, "entropy_coef": 0.1}
    cfg = TrainConfig.model_validate({"algo": algo, "train": {"samples": 5}})
    prompts = make_task("abacus").prompts("train")[:2]
    try_algorithm(cfg, prompts, Verdict(0.0, Status.WRONG))
    cfg.algo.terms = [f"{tmp_path}/own.py:Nan"]
    with pytest.raises(UserError, match="the loss term 'nan'"):
        try_algorithm(cfg, prompts, Verdict(0.0, Status.WRONG))


# How a run ends


def test_errors_of_a_lost_peer_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_lost_peer(gone)
    assert not is_lost_peer(RuntimeError("shapes do not match")) and not is_lost_peer(ValueError("timed out"))
    monkeypatch.delenv("WORLD_SIZE")
    assert not is_lost_peer(gone)


# Settings of an evaluation


def test_options_replace_settings_of_the_config(tmp_path: Path) -> None:
    config = tmp_path / "train.toml"
    config.write_text(
        '[task]\nname = "jsonl"\npath = "train.jsonl"\nargs = {answer_column = "gold"}\n[env]\nname = "calculator"\n'
        '[prompt]\nstyle = "raw"\ntemplate = "{question} ####"\n[reward]\nextract = "hash"\nwrong = -1\n'
        '[judge]\nurl = "http://127.0.0.1:1"\n[eval]\nfinal_examples = 5\nsamples = 4\n'
    )

    def settings(overrides: dict[str, Any] | None = None, data: str = "") -> Any:
        return measure_settings(["run:none@0"], overrides or {}, data=data, config=config)

    cfg = settings()  # not those of the run
    assert (cfg.task.name, cfg.env.name, cfg.reward.wrong, cfg.eval.samples) == ("jsonl", "calculator", -1, 4)
    assert cfg.judge.url == "http://127.0.0.1:1"  # the config is the user's own
    cfg = settings({"reward.wrong": 0, "prompt": {"system": "Think."}})
    assert (cfg.reward.wrong, cfg.reward.extract) == (0, "hash")
    assert (cfg.prompt.system, cfg.prompt.template, cfg.prompt.style) == ("Think.", "", "auto")
    data = tmp_path / "test.jsonl"
    data.write_text('{"question": "1 + 1", "gold": 2}\n')
    cfg = settings(data=str(data))
    assert (cfg.task.name, cfg.task.path, cfg.task.args) == ("jsonl", str(data), {"answer_column": "gold"})
    assert (cfg.env.name, cfg.reward.wrong, cfg.eval.samples) == ("calculator", -1, 4)
    assert (cfg.eval.final_split, cfg.eval.final_examples) == ("all", 0)
    config.write_text('[task]\nname = "gsm8k"\nargs = {annotations = true}\n[reward]\nwrong = -1\n')
    cfg = settings(data=str(data))
    assert (cfg.task.name, cfg.task.args, cfg.reward.wrong) == ("jsonl", {}, -1)  # gsm8k has another format
