"""The run object: what a checkpoint stores of its components, and garbage collection while it is active."""

from __future__ import annotations

import gc
import json
import signal
import time
from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.build.run import new_run
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs import checkpoints
from assay.runs.console import Console
from assay.training import run as train_run
from assay.training.checkpoint import read_state
from assay.training.progress import Stopped
from assay.training.run import GC_THRESHOLD, TrainingRun, gc_threshold
from assay.types import UserError

# As written by the first edition, where one record held the state of all components.
FIRST_EDITION = {
    "step": 2,
    "cursor": 6,
    "tokens": 144,
    "answers": 18,
    "wall_s": 1.5,
    "skipped": 1,
    "best": {"step": 2, "value": 0.5},
    "unmeasured": None,
    "entropy_control": {"coef": 0.01, "entropy": 2.5},
    "pass_rates": {"abacus/train/3": [0.5, 1.0]},
    "facts": {"sft": {"steps": 2, "loss": 0.25, "wall_s": 0.5}},
}


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


def test_state_json_of_the_first_edition_is_converted(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    folder = checkpoints.folder(tmp_path, 2)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(FIRST_EDITION))
    run.load_state_dict(read_state(tmp_path, 2, run.state_dict().keys()))
    assert (run.state.step, run.state.tokens, run.state.answers, run.state.skipped) == (2, 144, 18, 1)
    assert run.source.prompts.cursor == 6 and run.learner.algo.pass_rates.rates == {"abacus/train/3": [0.5, 1.0]}
    rest = {name: value for name, value in FIRST_EDITION.items() if name not in ("entropy_control", "pass_rates")}
    algorithm = {
        "entropy": FIRST_EDITION["entropy_control"],
        "pass_rate": {"rates": FIRST_EDITION["pass_rates"]},
    }
    assert run.state_dict() == rest | {"algorithm": algorithm, "sft_step": 0, "sft_s": 0.0, "weight_sync": {}}
    run.load_state_dict({"step": 3})  # entries that an earlier version did not have yet
    assert run.state.step == 3 and run.source.cursor == 0
