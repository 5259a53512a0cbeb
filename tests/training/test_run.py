"""The run object: what a checkpoint stores of its components, and garbage collection while it is active."""

from __future__ import annotations

import gc
import signal
import time
from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.build.run import new_run
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs.console import Console
from assay.training import run as train_run
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
