"""A run that was stopped and resumed equals, to the last bit, one that was never stopped."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_run import SmallRuns, mostly_slow

from assay.runs import checkpoints
from assay.runs.directory import read_metrics
from assay.runs.rollouts import read_rollouts
from assay.train import run
from assay.train.learner.learner import WarmStart
from assay.train.progress import RunState
from assay.train.sources import OnPolicySource, SampledGroups

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS = 5
SETTINGS = ("--train.steps", STEPS, "--save.every", 2, "--eval.every", 2)
VARIANTS: dict[str, tuple[object, ...]] = {
    "grpo": (),
    "kl, entropy, warm start, cosine": (
        *("--algo.kl_coef", 0.1, "--algo.entropy_coef", 0.01, "--sft.steps", 2, "--sft.batch", 4),
        *("--optim.schedule", "cosine", "--optim.warmup", 2, "--optim.weight_decay", 0.1),
    ),
    "muon": (
        *(
            "--optim.name",
            "muon",
            "--optim.matrix_lr",
            0.01,
            "--optim.embedding_lr",
            0.02,
            "--optim.schedule",
            "linear",
        ),
        *("--optim.lr_scale", 0.5, "--optim.weight_decay", 0.1, "--algo.updates", 3),
    ),
    "lora, kl": ("--lora.rank", 2, "--algo.kl_coef", 0.1, "--algo.updates", 3),
    "lora, muon, kl, warm start": (
        *("--lora.rank", 2, "--lora.targets", "q_proj", "--algo.kl_coef", 0.1, "--sft.steps", 2, "--sft.batch", 4),
        *("--optim.name", "muon", "--optim.matrix_lr", 0.01),
    ),
    "a reference refreshed": ("--algo.kl_coef", 0.1, "--algo.refresh_reference", 3),
    "a reference that is an average": ("--algo.kl_coef", 0.1, "--algo.reference_ema", 0.9, "--lora.rank", 2),
    "kl in the reward": (
        *("--algo.recipe", "rloo", "--algo.reward_kl_coef", 0.1, "--algo.reward_kl_per", "token"),
        *("--algo.refresh_reference", 2),
    ),
    "replay": ("--replay.groups", 2, "--replay.capacity", 5, "--algo.updates", 2, "--replay.with_replacement", "true"),
    "a critic": ("--algo.critic", "true", "--critic.lr", 1e-3, "--algo.updates", 2, "--sft.steps", 1, "--sft.batch", 4),
    "a critic on the policy's trunk": (
        *("--algo.recipe", "ppo", "--critic.trunk", "shared", "--critic.lr", 1e-2, "--algo.reward_kl_coef", 0.1),
        *("--train.samples", 1, "--sft.steps", 1, "--sft.batch", 4, "--lora.rank", 2),
    ),
    "dapo": ("--algo.recipe", "dapo", "--train.passes", 2),
    "prompts by pass rate, an entropy target": (
        *("--algo.pass_rate_low", 0.1, "--algo.pass_rate_high", 0.9, "--algo.pass_rate_retry", 3),
        *("--algo.entropy_target", 99, "--train.max_train_prompts", 6),
    ),
    "remax, corrected, clip_cov": (
        *("--algo.recipe", "remax", "--algo.correction", "sequence_truncate", "--algo.updates", 3),
        *("--algo.cov", "clip_cov", "--algo.cov_low", 0, "--algo.cov_fraction", 0.1),
    ),
    "half precision": ("--dtype", "bfloat16", "--engine.dtype", "bfloat16", "--algo.kl_coef", 0.1),
}


class Stop(Exception):
    pass


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The process dies while it samples for the step after `step`."""
    sample = OnPolicySource.next

    def stopped(self: OnPolicySource, state: RunState) -> SampledGroups:
        if state.step == step:
            raise Stop
        return sample(self, state)

    monkeypatch.setattr(OnPolicySource, "next", stopped)


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, quick=["lora, muon, kl, warm start"]))
def test_a_resumed_run_equals_one_that_was_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    small = SmallRuns(tmp_path)
    words = (*SETTINGS, *VARIANTS[variant])
    assert small.train(*words) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)  # one step after the checkpoint: it is deleted and repeated
        with pytest.raises(Stop):
            small.train(*words, "--name", "stopped")
    assert checkpoints.last(small.runs / "stopped") == 2
    assert not (small.runs / "stopped" / "summary.json").exists()
    assert small.resume("stopped") == 0
    small.same_run("small", "stopped", STEPS)
    assert small.summary("stopped")["steps"] == STEPS


WARM_STARTS: dict[str, tuple[object, ...]] = {
    "muon": ("--sft.optimizer", "muon", "--sft.matrix_lr", 0.01),
    "lora, kl": ("--lora.rank", 2, "--algo.kl_coef", 0.1),
    "separate process": ("--train.process", "separate"),
    "sft only": ("--train.steps", 0),
}


def interrupt_warm_start(monkeypatch: pytest.MonkeyPatch, step: int, signum: signal.Signals) -> None:
    """The process gets a signal in this step of the warm start."""
    train_step = WarmStart._train_step

    def interrupted(self: WarmStart) -> dict[str, float]:
        if self.step == step:
            os.kill(os.getpid(), signum)
        return train_step(self)

    monkeypatch.setattr(WarmStart, "_train_step", interrupted)


@pytest.mark.parametrize("variant", mostly_slow(WARM_STARTS, quick=["muon", "sft only"]))
def test_a_warm_start_that_was_stopped_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    small = SmallRuns(tmp_path)
    words = ("--train.steps", 2, "--sft.steps", 6, "--sft.batch", 4, *WARM_STARTS[variant])
    assert small.train(*words) == 0
    with monkeypatch.context() as patch:
        interrupt_warm_start(patch, 3, signal.SIGTERM)
        assert small.train(*words, "--name", "stopped") == 128 + signal.SIGTERM
    assert "of 6 of the warm start; to resume from there" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        interrupt_warm_start(patch, 2, signal.SIGKILL)  # would end this process if the step were repeated
        assert small.resume("stopped") == 0
    steps = [line["sft/step"] for line in read_metrics(small.runs / "stopped") if "sft/step" in line]
    assert steps == [1, 2, 3, 4, 5, 6]
    if variant == "sft only":
        weights = [small.checkpoint(0, name) / "model/model.safetensors" for name in ("small", "stopped")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
        assert small.timeless("small") == small.timeless("stopped")
    else:
        small.same_run("small", "stopped", 2)
    assert small.summary("stopped")["sft"]["loss"] == small.summary()["sft"]["loss"]


def test_a_long_warm_start_is_saved_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallRuns(tmp_path)
    words = ("--train.steps", 2, "--sft.steps", 3, "--sft.batch", 4)
    assert small.train(*words) == 0
    monkeypatch.setattr(run, "WARM_START_SAVE_S", 0.0)
    train_step = WarmStart._train_step

    def dies(self: WarmStart) -> dict[str, float]:
        if self.step == 2:
            raise Stop
        return train_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(WarmStart, "_train_step", dies)
        with pytest.raises(Stop):
            small.train(*words, "--name", "stopped")
    assert checkpoints.last(small.runs / "stopped") == 0
    assert small.resume("stopped") == 0
    small.same_run("small", "stopped", 2)


@pytest.mark.slow
def test_a_run_without_checkpoints_is_resumed_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallRuns(tmp_path)
    words = (*SETTINGS, "--algo.kl_coef", 0.1)
    assert small.train(*words) == 0
    assert small.train(*words, "--name", "stopped") == 0
    stopped = small.runs / "stopped"
    for part in ("checkpoints", "rollouts"):
        shutil.rmtree(stopped / part)
    (stopped / "reference" / "model.safetensors").write_bytes(b"half")  # as if the process died while writing it
    (stopped / "summary.json").unlink()
    assert small.resume("stopped") == 0
    small.same_run("small", "stopped", STEPS)


@pytest.mark.slow
def test_resume_skips_damaged_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = SmallRuns(tmp_path)
    assert small.train(*SETTINGS, "--save.keep", 9) == 0
    assert small.train(*SETTINGS, "--save.keep", 9, "--name", "stopped") == 0
    for step in (4, STEPS):
        file = small.checkpoint(step, "stopped") / "optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-4] + b"oops")  # the same size
    capsys.readouterr()
    assert small.resume("stopped") == 0
    shown = capsys.readouterr().out
    assert "is damaged" in shown and "from step 2" in shown
    small.same_run("small", "stopped", STEPS)


@pytest.mark.slow
def test_a_finished_run_is_extended_by_more_steps(tmp_path: Path) -> None:
    small = SmallRuns(tmp_path)
    assert small.train(*SETTINGS) == 0
    assert small.train("--train.steps", 3, "--save.every", 2, "--eval.every", 2, "--name", "longer") == 0
    assert small.resume("longer", "--train.steps", STEPS) == 0
    first, second = (load_file(small.checkpoint(STEPS, n) / "model/model.safetensors") for n in ("small", "longer"))
    assert all(first[key].equal(second[key]) for key in first)
    assert small.summary("longer")["steps"] == STEPS


@pytest.mark.slow
def test_resuming_a_run_that_died_before_its_summary_only_repeats_its_final_evaluation(tmp_path: Path) -> None:
    small = SmallRuns(tmp_path)
    assert small.train() == 0
    summary, metrics = small.summary(), small.timeless()
    weights = (small.checkpoint(2) / "model/model.safetensors").read_bytes()
    small.lose_summary()
    assert small.resume("small") == 0
    again = small.summary()
    assert again.pop("wall_s") > 0 and summary.pop("wall_s") > 0
    assert again == summary and small.timeless() == metrics
    assert (small.checkpoint(2) / "model/model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_rollouts_carry_the_weights_version_that_sampled_them(tmp_path: Path) -> None:
    small = SmallRuns(tmp_path)
    assert small.train("--train.steps", 2) == 0
    assert small.resume("small", "--train.steps", 4) == 0
    for step in range(1, 5):
        versions = {
            r.turns[0].completion.version for g in read_rollouts(small.runs / "small", step) for r in g.rollouts
        }
        assert versions == {step - 1}


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "another model": (("--model", "preset:tiny"), "trains preset:nano, not preset:tiny"),
    "another tokenizer": (("--model.tokenizer", "characters"), "resume without changing the model"),
    "another task": (("--task.args.max_steps", 4), "task.args"),
    "other test problems": (("--eval.final_examples", 6), "eval.final_examples"),
    "a KL term without a reference": (("--algo.kl_coef", 0.1), "algo.reference"),
    "a reference that moves": (("--algo.refresh_reference", 2, "--algo.kl_coef", 0.1), "algo.refresh_reference"),
    "bad settings": (("--optim.lr", -1), "optim.lr"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> SmallRuns:
    """A run with all of its steps, but without its summary: it can be resumed."""
    small = SmallRuns(tmp_path_factory.mktemp("finished"))
    assert small.train() == 0
    small.lose_summary()
    return small


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_are_fixed_cannot_be_changed_on_resume(
    finished: SmallRuns, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = finished.files()
    words, message = REFUSED[name]
    assert finished.resume("small", *words) == 2
    shown = capsys.readouterr().err
    assert message in shown and shown.count("\n") == 1
    unchanged = [file for file in before if not file.endswith(("environment.json", ".lock"))]
    now = finished.files()
    assert {file: now.get(file) for file in unchanged} == {file: before[file] for file in unchanged}


def test_resuming_with_a_config_of_another_model_or_other_settings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallRuns(tmp_path)
    assert small.train() == 0
    other = tmp_path / "other.toml"
    other.write_text(small.config.read_text().replace("preset:nano", "preset:tiny"))
    assert small.train("--resume", "small", config=other) == 2
    assert "trains preset:nano, not preset:tiny" in capsys.readouterr().err
    other.write_text(small.config.read_text().replace("lr = 1e-3", "lr = 1e-4"))
    assert small.train("--resume", "small", config=other) == 2
    assert "optim.lr" in capsys.readouterr().err
    assert small.train("--resume", "small") == 0  # with its own config


def test_an_unknown_run_name_is_refused_with_suggestions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = SmallRuns(tmp_path)
    assert small.resume("nothing") == 2
    assert "has no runs yet" in capsys.readouterr().err
    assert small.train() == 0
    assert small.resume("smal") == 2
    assert "did you mean 'small'?" in capsys.readouterr().err


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


@pytest.mark.slow
def test_changed_settings_are_reported_with_old_and_new_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether they were given as options or edited in config.toml, which may also be damage."""
    small = SmallRuns(tmp_path)
    assert small.train() == 0
    edit(small.runs / "small" / "config.toml", "lr = 0.001", "lr = 0.003")
    capsys.readouterr()
    assert small.resume("small", "--train.steps", 3) == 0
    shown = capsys.readouterr().out
    assert "warning: optim.lr changed since step 2: 0.001 -> 0.003" in shown
    assert "warning: train.steps changed since step 2: 2 -> 3" in shown
    assert shown.count("changed since") == 2
    assert small.metrics()[-1]["step"] == 3
    small.lose_summary()
    assert small.resume("small") == 0  # the new settings are those of the last checkpoint now
    assert "changed since" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_edited_fixed_setting_is_refused_and_the_error_names_the_intact_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallRuns(tmp_path)
    assert small.train() == 0
    config = small.runs / "small" / "config.toml"
    small.lose_summary()
    edit(config, "final_examples = 5", "final_examples = 4")
    assert small.resume("small") == 2
    shown = capsys.readouterr().err
    copy = small.checkpoint(2) / "config.toml"
    assert "eval.final_examples (5 -> 4)" in shown and f"restore it from {copy}" in shown and shown.count("\n") == 1
    config.write_bytes(b"\xff")
    assert small.resume("small") == 2
    shown = capsys.readouterr().err
    assert f"copy {copy} over it" in shown and shown.count("\n") == 1
    shutil.copy(copy, config)
    assert small.resume("small") == 0


@pytest.mark.parametrize("damage", mostly_slow(["cut", "lost", "line deleted", "changed"], quick=["line deleted"]))
def test_resume_warns_of_truncated_or_changed_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    small = SmallRuns(tmp_path)
    assert small.train("--eval.every", 1) == 0
    metrics, weights = (
        small.runs / "small" / "metrics.jsonl",
        load_file(small.checkpoint(2) / "model/model.safetensors"),
    )
    lines = metrics.read_text().splitlines(keepends=True)
    kept = {
        "cut": lines[:1],
        "lost": [],
        "line deleted": [lines[0], *lines[2:]],
        "changed": [lines[0], lines[1].replace("reward/mean", "reward/meaN"), *lines[2:]],
    }[damage]
    metrics.write_text("".join(kept))
    if damage == "lost":
        metrics.unlink()
    small.lose_summary()
    capsys.readouterr()
    assert small.resume("small") == 0
    assert "metrics.jsonl was truncated or changed" in capsys.readouterr().out
    after = load_file(small.checkpoint(2) / "model/model.safetensors")
    assert all(weights[key].equal(after[key]) for key in weights)
    assert metrics.read_text().startswith("".join(line for line in kept if "after/accuracy" not in line))
    assert sum("after/accuracy" in row for row in small.metrics()) == 1  # repeated, and not there twice


@pytest.mark.parametrize("damage", mostly_slow(["lost", "cut", "flipped"], quick=[]))
def test_a_lost_or_damaged_first_evaluation_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    small = SmallRuns(tmp_path)
    words = (*SETTINGS, "--sft.steps", 2, "--sft.batch", 4, "--lora.rank", 2)
    assert small.train(*words) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stop):
            small.train(*words, "--name", "stopped")
    file = small.runs / "stopped" / "evals" / "step-000000-before-test.jsonl"
    content = file.read_bytes()
    damaged = {"lost": b"", "cut": b"".join(content.splitlines(True)[:-1]), "flipped": content}[damage]
    file.write_bytes(damaged.replace(b'"status": "wrong"', b'"status": "ok"   ', 1))
    if damage == "lost":
        file.unlink()
    capsys.readouterr()
    assert small.resume("stopped") == 0
    assert "repeating the evaluation with the weights of step 0" in capsys.readouterr().out
    assert file.read_bytes() == content
    small.same_run("small", "stopped", STEPS)


def test_a_run_finishes_without_its_first_evaluation_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallRuns(tmp_path)
    assert small.train() == 0
    whole = small.summary()
    (small.runs / "small" / "evals" / "step-000000-before-test.jsonl").unlink()
    shutil.rmtree(small.checkpoint(0))
    small.lose_summary()
    capsys.readouterr()
    assert small.resume("small") == 0
    shown = capsys.readouterr().out
    assert "is missing and cannot be repeated" in shown
    assert small.summary()["before"] is small.summary()["paired"] is None and small.summary()["after"] == whole["after"]
    assert small("runs") == 0


@pytest.mark.slow
def test_a_run_finishes_without_its_evaluation_before_the_warm_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallRuns(tmp_path)
    assert small.train("--name", "source") == 0
    words = ("--model", "run:source@last", "--sft.steps", 1, "--sft.batch", 4)
    assert small.train(*words) == 0 and "paired" in small.summary()["sft"]
    (small.runs / "small" / "evals" / "step-000000-start-test.jsonl").unlink()
    small.lose_summary()
    capsys.readouterr()
    assert small.resume("small") == 0
    assert "finishing without the comparison with the model before its warm start" in capsys.readouterr().out
    assert small.summary()["paired"] is not None and "paired" not in small.summary()["sft"]


def test_a_name_given_on_resume_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = SmallRuns(tmp_path)
    assert small.train() == 0
    before = small.files()
    assert small.resume("small", "--name", "other") == 2
    shown = capsys.readouterr().err
    assert "--name cannot rename a run that is resumed: rename the folder" in shown and shown.count("\n") == 1
    assert small.files() == before
    small.lose_summary()
    assert small.resume("small", "--name", "small") == 0


def test_resuming_a_finished_run_says_so_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = SmallRuns(tmp_path)
    assert small.train("--train.steps", 1) == 0
    before = small.files()
    capsys.readouterr()
    assert small.resume("small", "--optim.lr", 1e-4) == 0
    shown = capsys.readouterr().out
    assert "finished (1 step)" in shown and f"--resume {small.runs / 'small'} --train.steps 2" in shown
    assert shown.count("\n") == 1 and small.files() == before
