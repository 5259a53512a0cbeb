from __future__ import annotations

import sys
from pathlib import Path

import pytest

from assay.runs import Run
from assay.runs.trackers import make_trackers
from assay.types import UserError


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path, "tracked", "seed = 1\n")


def test_no_trackers_by_default(run: Run) -> None:
    assert make_trackers(None, False, run) == make_trackers("", False, run) == []


def test_missing_packages_name_their_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"assay\[wandb\]"):
        make_trackers("project", False, run)
    with pytest.raises(UserError, match=r"assay\[tensorboard\]"):
        make_trackers(None, True, run)


@pytest.mark.slow
def test_tensorboard_files_hold_the_numbers(run: Run) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = make_trackers(None, True, run)
    tracker.log(3, {"reward/mean": 0.5, "bad": float("nan"), "text": "x"})
    tracker.close()
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.5)]


@pytest.mark.slow
def test_wandb_offline(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tracker,) = make_trackers("project", False, run)
    tracker.log(1, {"reward/mean": 0.5})
    tracker.close()
    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))
