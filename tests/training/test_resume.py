"""A run that was stopped and resumed equals, to the last bit, one that was never stopped."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from small_run import SmallRuns, mostly_slow

from assay.runs import checkpoints
from assay.runs.directory import read_metrics
from assay.runs.rollouts import read_rollouts
from assay.training import run
from assay.training.learner.learner import WarmStart
from assay.training.progress import RunState
from assay.training.sources import OnPolicySource, SampledGroups

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
STEPS = 5
SETTINGS = ("--train.steps", STEPS, "--save.every", 2, "--eval.every", 2)
VARIANTS: dict[str, tuple[object, ...]] = {
    "kl, entropy, warm start, cosine": (
        *("--algo.kl_coef", 0.1, "--algo.entropy_coef", 0.01, "--sft.steps", 2, "--sft.batch", 4),
        *("--optim.schedule", "cosine", "--optim.warmup", 2, "--optim.weight_decay", 0.1),
    ),
    "muon, replay": (
        *("--optim.name", "muon", "--optim.matrix_lr", 0.01, "--optim.embedding_lr", 0.02, "--algo.updates", 3),
        *("--optim.schedule", "linear", "--optim.lr_scale", 0.5, "--optim.weight_decay", 0.1),
        *("--replay.groups", 2, "--replay.capacity", 5, "--replay.with_replacement", "true"),
    ),
    "lora, muon, kl, warm start": (
        *("--lora.rank", 2, "--lora.targets", "q_proj", "--algo.kl_coef", 0.1, "--sft.steps", 2, "--sft.batch", 4),
        *("--optim.name", "muon", "--optim.matrix_lr", 0.01),
    ),
    "dapo, a reference that is an average": (
        *("--algo.recipe", "dapo", "--train.passes", 2),
        *("--algo.kl", "k3", "--algo.kl_coef", 0.1, "--algo.reference_ema", 0.9, "--lora.rank", 2),
    ),
    "kl in the reward to a reference that is refreshed": (
        *("--algo.recipe", "rloo", "--algo.reward_kl_coef", 0.1, "--algo.reward_kl_per", "token"),
        *("--algo.refresh_reference", 2),
    ),
    "a critic": ("--algo.critic", "true", "--critic.lr", 1e-3, "--algo.updates", 2, "--sft.steps", 1, "--sft.batch", 4),
    "a critic on the policy's trunk": (
        *("--algo.recipe", "ppo", "--critic.trunk", "shared", "--critic.lr", 1e-2, "--algo.reward_kl_coef", 0.1),
        *("--train.samples", 1, "--sft.steps", 1, "--sft.batch", 4, "--lora.rank", 2),
    ),
    "prompts by pass rate, an entropy target, half precision": (
        *("--algo.pass_rate_low", 0.1, "--algo.pass_rate_high", 0.9, "--algo.pass_rate_retry", 3),
        *("--algo.entropy_target", 99, "--train.max_train_prompts", 6),
        *("--dtype", "bfloat16", "--engine.dtype", "bfloat16", "--algo.kl_coef", 0.1),
    ),
    "weights with remainders, moments in 8 bits, warm start, kl": (
        *("--optim.precision", "8bit", "--dtype", "bfloat16", "--algo.kl_coef", 0.1, "--optim.weight_decay", 0.1),
        *("--sft.steps", 2, "--sft.batch", 4, "--optim.offload", "true"),
    ),
    "weights that are rounded at random": (
        *("--optim.precision", "bfloat16", "--dtype", "bfloat16", "--engine.dtype", "bfloat16", "--algo.updates", 2),
    ),
    "adapters on a base in half precision": ("--lora.rank", 2, "--dtype", "bfloat16", "--algo.kl_coef", 0.1),
    "remax, corrected, clip_cov": (
        *("--algo.recipe", "remax", "--algo.correction", "sequence_truncate", "--algo.updates", 3),
        *("--algo.cov", "clip_cov", "--algo.cov_low", 0, "--algo.cov_fraction", 0.1),
    ),
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


@pytest.mark.parametrize(
    "variant", mostly_slow(VARIANTS, quick=["lora, muon, kl, warm start", "weights that are rounded at random"])
)
def test_a_resumed_run_equals_one_that_was_never_stopped(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
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
    "muon, lora, kl": ("--sft.optimizer", "muon", "--sft.matrix_lr", 0.01, "--lora.rank", 2, "--algo.kl_coef", 0.1),
    "sft only": ("--train.steps", 0),
    "moments in 8 bits": ("--optim.precision", "8bit", "--dtype", "bfloat16"),
}


def interrupt_warm_start(monkeypatch: pytest.MonkeyPatch, step: int, signum: signal.Signals) -> None:
    """The process gets a signal in this step of the warm start."""
    train_step = WarmStart._train_step

    def interrupted(self: WarmStart) -> dict[str, float]:
        if self.step == step:
            os.kill(os.getpid(), signum)
        return train_step(self)

    monkeypatch.setattr(WarmStart, "_train_step", interrupted)


@pytest.mark.parametrize("variant", mostly_slow(WARM_STARTS, quick=["sft only"]))
def test_a_warm_start_that_was_stopped_is_resumed(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
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


def test_a_long_warm_start_is_saved_now_and_then(small: SmallRuns, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_finished_run_is_extended_by_more_steps(small: SmallRuns) -> None:
    assert small.train(*SETTINGS) == 0
    assert small.train("--train.steps", 3, "--save.every", 2, "--eval.every", 2, "--name", "longer") == 0
    assert small.resume("longer", "--train.steps", STEPS) == 0
    first, second = (load_file(small.checkpoint(STEPS, n) / "model/model.safetensors") for n in ("small", "longer"))
    assert all(first[key].equal(second[key]) for key in first)
    assert small.summary("longer")["steps"] == STEPS
    for step in range(1, STEPS + 1):
        rollouts = [r for group in read_rollouts(small.runs / "longer", step) for r in group.rollouts]
        assert {r.turns[0].completion.version for r in rollouts} == {step - 1}  # of the weights that sampled them


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
    finished: SmallRuns, refused: Callable[..., str], name: str
) -> None:
    before = finished.files()
    words, message = REFUSED[name]
    assert message in refused(finished.resume("small", *words))
    unchanged = [file for file in before if not file.endswith(("environment.json", ".lock"))]
    now = finished.files()
    assert {file: now.get(file) for file in unchanged} == {file: before[file] for file in unchanged}


def test_resuming_with_a_config_of_another_model_or_other_settings_is_refused(
    finished: SmallRuns, stderr_of: Callable[..., str]
) -> None:
    other = finished.folder / "other.toml"
    for old, new, named in (("preset:nano", "preset:tiny", "preset:tiny"), ("lr = 1e-3", "lr = 1e-4", "optim.lr")):
        other.write_text(finished.config.read_text().replace(old, new))
        assert named in stderr_of(finished.train("--resume", "small", config=other))


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_changed_settings_are_reported_with_old_and_new_value(
    finished: SmallRuns, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    """Whether they were given as options or edited in config.toml, which may also be damage."""
    run = shutil.copytree(finished.runs / "small", finished.runs / "changed")
    edit(run / "config.toml", "lr = 0.001", "lr = 0.003")
    shown = stdout_of(finished.resume("changed", "--train.steps", 3))
    assert "warning: optim.lr changed since step 2: 0.001 -> 0.003" in shown
    assert "warning: train.steps changed since step 2: 2 -> 3" in shown
    assert shown.count("changed since") == 2
    assert finished.metrics("changed")[-1]["step"] == 3
    finished.lose_summary("changed")
    assert finished.resume("changed") == 0  # the new settings are those of the last checkpoint now
    assert "changed since" not in capsys.readouterr().out


def test_an_edited_fixed_setting_is_refused_and_the_error_names_the_intact_copy(
    finished: SmallRuns, capsys: pytest.CaptureFixture[str], stderr_of: Callable[..., str]
) -> None:
    config = shutil.copytree(finished.runs / "small", finished.runs / "edited") / "config.toml"
    edit(config, "final_examples = 5", "final_examples = 4")
    shown = stderr_of(finished.resume("edited"))
    copy = finished.checkpoint(2, "edited") / "config.toml"
    assert "eval.final_examples (5 -> 4)" in shown and f"restore it from {copy}" in shown and shown.count("\n") == 1
    config.write_bytes(b"\xff")
    assert finished.resume("edited") == 2
    shown = capsys.readouterr().err
    assert f"copy {copy} over it" in shown and shown.count("\n") == 1


def test_resume_warns_of_truncated_or_changed_metrics(finished: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = shutil.copytree(finished.runs / "small", finished.runs / "shorter") / "metrics.jsonl"
    weights = (finished.checkpoint(2) / "model/model.safetensors").read_bytes()
    lines = metrics.read_text().splitlines(keepends=True)
    kept = [lines[0], *lines[2:]]
    metrics.write_text("".join(kept))
    assert finished.resume("shorter") == 0
    assert "metrics.jsonl was truncated or changed" in capsys.readouterr().out
    assert (finished.checkpoint(2, "shorter") / "model/model.safetensors").read_bytes() == weights
    assert metrics.read_text().startswith("".join(line for line in kept if "after/accuracy" not in line))
    # Repeated, and not there twice.
    assert sum("after/accuracy" in row for row in finished.metrics("shorter")) == 1


@pytest.mark.slow
def test_a_damaged_first_evaluation_is_repeated(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    words = (*SETTINGS, "--sft.steps", 2, "--sft.batch", 4, "--lora.rank", 2)
    assert small.train(*words) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stop):
            small.train(*words, "--name", "stopped")
    file = small.runs / "stopped" / "evals" / "step-000000-before-test.jsonl"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"status": "wrong"', b'"status": "ok"   ', 1))
    capsys.readouterr()
    assert "repeating the evaluation with the weights of step 0" in stdout_of(small.resume("stopped"))
    assert file.read_bytes() == content
    small.same_run("small", "stopped", STEPS)


def test_a_run_finishes_without_its_first_evaluation_and_checkpoint(
    finished: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished.runs / "without-first"
    shutil.copytree(finished.runs / "small", run)
    (run / "evals" / "step-000000-before-test.jsonl").unlink()
    shutil.rmtree(finished.checkpoint(0, run.name))
    capsys.readouterr()
    assert finished.resume(run.name) == 0
    assert "is missing and cannot be repeated" in capsys.readouterr().out
    summary = finished.summary(run.name)
    assert summary["before"] is summary["paired"] is None and summary["after"]["n"] == 5
    assert finished("runs") == 0


@pytest.mark.slow
def test_a_run_finishes_without_its_evaluation_before_the_warm_start(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    assert small.train("--name", "source") == 0
    words = ("--model", "run:source@last", "--sft.steps", 1, "--sft.batch", 4)
    assert small.train(*words) == 0 and "paired" in small.summary()["sft"]
    (small.runs / "small" / "evals" / "step-000000-start-test.jsonl").unlink()
    small.lose_summary()
    capsys.readouterr()
    assert "finishing without the comparison with the model before its warm start" in stdout_of(small.resume("small"))
    assert small.summary()["paired"] is not None and "paired" not in small.summary()["sft"]


def test_a_name_given_on_resume_is_refused_unless_it_is_the_runs(
    finished: SmallRuns, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str], refused: Callable[..., str]
) -> None:
    shutil.copytree(finished.runs / "small", finished.runs / "named")
    before = finished.files()
    assert "--name" in refused(finished.resume("named", "--name", "other")) and finished.files() == before
    assert finished.resume("named", "--name", "named") == 0
    before = finished.files()
    capsys.readouterr()
    shown = stdout_of(finished.resume("named", "--optim.lr", 1e-4))  # a finished run stays as it is
    assert "finished (2 steps)" in shown and f"--resume {finished.runs / 'named'} --train.steps 4" in shown
    assert shown.count("\n") == 1 and finished.files() == before


def test_a_run_without_its_settings_names_the_copy_and_one_without_checkpoints_starts_anew(
    small: SmallRuns, stdout_of: Callable[..., str], stderr_of: Callable[..., str]
) -> None:
    assert small.train("--train.steps", 1) == 0
    config = small.runs / "small" / "config.toml"
    config.rename(small.folder / "kept.toml")
    error = stderr_of(small.resume("small"))
    assert f"has no config.toml: copy {small.checkpoint(1)}/config.toml to {config}" in error
    (small.folder / "kept.toml").rename(config)
    shutil.rmtree(small.runs / "small" / "checkpoints")
    small.lose_summary()
    assert "run small has no checkpoint yet: it starts anew, from step 0" in stdout_of(small.resume("small"))
