"""The run object: what a checkpoint stores of its components, and garbage collection while it is active."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs import checkpoints
from assay.runs.console import Console
from assay.train.build import new_run
from assay.train.checkpoint import read_state
from assay.train.run import GC_THRESHOLD, TrainingRun, gc_threshold

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
    assert run.state_dict() == rest | {"algorithm": algorithm}
    run.load_state_dict({"step": 3})  # entries that an earlier version did not have yet
    assert run.state.step == 3 and run.source.cursor == 0
