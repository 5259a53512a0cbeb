"""The run object: status, curves, garbage collection; what a checkpoint stores; and errors in callbacks."""

from __future__ import annotations

import gc
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import SmallRuns
from train_parts import make_adamw, make_groups, tiny_decoder, weights_of

from assay.algos import make_algorithm
from assay.build.run import new_run
from assay.config import OptimConfig, TrainConfig
from assay.config.settings import load_settings
from assay.models import Decoder, PolicyModel, load_model
from assay.runs import checkpoints
from assay.runs.console import Console
from assay.runs.trackers import Callback, as_callback, notify
from assay.text import char_tokenizer
from assay.training import run as train_run
from assay.training.checkpoint import load_optimizer, read_state, save
from assay.training.learner.optim import make_optimizer
from assay.training.learner.update import Updater
from assay.training.progress import Stopped
from assay.training.run import GC_THRESHOLD, TrainingRun, gc_threshold
from assay.types import UserError


@pytest.mark.parametrize("own, meanwhile", [(700, GC_THRESHOLD), (2 * GC_THRESHOLD, 2 * GC_THRESHOLD), (0, 0)])
def test_gc_threshold_is_raised_and_restored(own: int, meanwhile: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(own, 7, 9)
    try:
        with pytest.raises(ZeroDivisionError), gc_threshold(GC_THRESHOLD):
            assert gc.get_threshold() == (meanwhile, 7, 9)
            _ = 1 / 0
        assert gc.get_threshold() == (own, 7, 9)
    finally:
        gc.set_threshold(*before)


def make_run(tmp_path: Path) -> TrainingRun:
    small = SmallRuns(tmp_path)
    settings = {"runs_dir": str(small.runs), "algo.entropy_target": 2.0, "algo.pass_rate_high": 0.9}
    return new_run(load_settings(TrainConfig, small.config, settings), Console(quiet=True))


def test_status_and_curves_of_a_run_that_stops_fails_or_cannot_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, drawn = make_run(tmp_path), []
    monkeypatch.setattr(train_run, "draw_curves", drawn.append)
    with pytest.raises(Stopped), run.active():
        assert run.directory.read_status() == {"state": "running", "total_steps": 2, "error": ""}
        raise Stopped(signal.SIGTERM)
    assert run.directory.state == "stopped" and drawn == [run.directory.path]
    with pytest.raises(ZeroDivisionError), run.active():
        raise ZeroDivisionError("no divisor")
    assert run.directory.state == "failed" and run.directory.read_status()["error"] == "ZeroDivisionError: no divisor"
    with pytest.raises(UserError), run.active():
        raise UserError("the judge failed")
    assert run.directory.read_status()["error"] == "the judge failed" and len(drawn) == 3

    def fails(path: Path) -> None:
        raise RuntimeError("no fonts")

    monkeypatch.setattr(train_run, "draw_curves", fails)
    with pytest.raises(Stopped), run.active():
        raise Stopped(signal.SIGTERM)
    assert "no fonts" in capsys.readouterr().out and run.directory.state == "stopped"


def test_curves_are_drawn_at_evaluations_after_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, drawn = make_run(tmp_path), []
    monkeypatch.setattr(train_run, "draw_curves", drawn.append)
    monkeypatch.setattr(run.recorder, "curves_due", 0.0)
    with run.active():
        run.begin()  # evaluates
        assert drawn == [run.directory.path]
        run._measure_and_log("before")
        assert len(drawn) == 1 and run.recorder.curves_due > time.perf_counter() + 1


STATE = {"step": 3, "cursor": 17, "tokens": 123456789012, "wall_s": 1.5, "facts": {"sft": {"loss": 0.25, "steps": 2}}}


ADAMW = OptimConfig(lr=1e-2, weight_decay=0.1)
MUON = OptimConfig(name="muon", lr=1e-2, matrix_lr=3e-2, weight_decay=0.1)


def trained(steps: int = 3, optim: OptimConfig = ADAMW) -> Updater:
    policy = tiny_decoder(dtype=torch.float32)
    updater = Updater(policy, make_optimizer(policy, optim))
    more(updater, steps)
    return updater


def more(updater: Updater, steps: int) -> None:
    algo = make_algorithm("grpo")
    groups = make_groups(tiny_decoder(), seed=4)
    algo.credit(groups)
    for _ in range(steps):
        updater.update(groups, algo, 1e-2)


def reloaded(path: Path, optim: OptimConfig = ADAMW) -> Updater:
    policy = load_model(str(checkpoints.folder(path, 3) / "model"))
    updater = Updater(policy, make_optimizer(policy, optim))
    load_optimizer(path, 3, policy, updater.optimizer)
    return updater


@pytest.mark.parametrize(("optim", "file_bytes"), [(ADAMW, 10**9), (MUON, 2_000)], ids=["one file", "many files"])
def test_a_checkpoint_restores_weights_and_optimizer_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optim: OptimConfig, file_bytes: int
) -> None:
    monkeypatch.setattr("assay.training.checkpoint.FILE_BYTES", file_bytes)
    original = trained(optim=optim)
    save(tmp_path, STATE, original.policy, original.optimizer, char_tokenizer())
    files = list(checkpoints.folder(tmp_path, 3).rglob("*.safetensors"))
    assert len(files) == 2 if file_bytes > 10**6 else len(files) > 10
    assert len({file.stat().st_mode for file in files}) == 1
    restored = reloaded(tmp_path, optim)
    assert isinstance(restored.policy, Decoder)
    assert read_state(tmp_path, 3, STATE) == STATE
    assert torch.equal(weights_of(original.policy), weights_of(restored.policy))
    assert len(moments(original)) > 20 and moments(original).keys() == moments(restored).keys()
    assert all(torch.equal(value, moments(restored)[key]) for key, value in moments(original).items())
    more(original, 2)
    more(restored, 2)
    assert torch.equal(weights_of(original.policy), weights_of(restored.policy))


def moments(updater: Updater) -> dict[str, torch.Tensor]:
    state = updater.optimizer.state
    return {f"{n}|{kind}": v for n, p in updater.policy.named_parameters() for kind, v in state[p].items()}


def test_the_first_checkpoint_has_no_optimizer_state(tmp_path: Path) -> None:
    policy = tiny_decoder(dtype=torch.float32)
    save(tmp_path, {"step": 3}, policy, make_adamw(policy, 1e-2), char_tokenizer())
    assert not reloaded(tmp_path).optimizer.state
    assert read_state(tmp_path, 3, {"step"}) == {"step": 3}


def test_moments_of_another_shape_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from train_parts import SPEC

    original = trained(1)
    save(tmp_path, STATE, original.policy, original.optimizer, char_tokenizer())
    other: PolicyModel = tiny_decoder(dtype=torch.float32, spec=replace(SPEC, hidden=32))
    with pytest.raises(UserError, match="does not fit"):
        load_optimizer(tmp_path, 3, other, make_adamw(other, 1e-2))


@pytest.mark.parametrize("content", ["[1, 2]", '{"step": 3}', json.dumps(STATE | {"colour": 3}), "{"])
def test_an_invalid_state_json_is_refused(tmp_path: Path, content: str) -> None:
    folder = checkpoints.folder(tmp_path, 3)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state\.json is not the state of a run"):
        read_state(tmp_path, 3, STATE)


# Callbacks: which objects are accepted, and errors in them. How runs call them is tested with the Python API


def test_functions_are_called_after_steps_and_errors_name_the_hook() -> None:
    calls: list[Any] = []
    hooks = [as_callback(lambda *args: calls.append(args)), Callback()]
    notify(hooks, "on_step", "run", 1, {"a": 2.0})
    notify(hooks, "on_stop", "run", {})
    assert calls == [("run", 1, {"a": 2.0})]

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("no")

    with pytest.raises(UserError, match="broken failed: ZeroDivisionError: no"):
        notify([as_callback(broken)], "on_step", "run", 1, {})
    for wrong in (3, Callback):
        with pytest.raises(UserError, match="must be a function"):
            as_callback(wrong)
