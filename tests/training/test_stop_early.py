"""A run stops early if its periodic evaluations no longer improve, also after it was killed and resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from small_run import SmallRuns, inject

import assay
from assay.config import LoopConfig
from assay.runs import checkpoints
from assay.runs.resolve import resolve_model
from assay.training.progress import RunState, Schedule
from assay.training.sources import OnPolicySource
from assay.types import UserError


class Killed(Exception):
    pass


def kill() -> None:
    raise Killed


WORDS = ("--train.steps", 12, "--eval.every", 2, "--train.stop_early", 2, "--save.every", 1)


@pytest.mark.parametrize(
    ("results", "patience", "stopped"),
    [
        ([(0.5, 0.6)] * 4, 2, 3),
        ([(0.5, 0.6)] * 4, 4, None),
        ([(0.5, 0.6)] * 4, 0, None),
        ([(0.5, 0.6), (0.55, 0.65), (0.6, 0.7), (0.61, 0.71), (0.7, 0.8), (0.71, 0.81)], 3, None),  # slow progress
        ([(0.5, 0.6), (0.61, 0.71), (0.4, 0.5), (0.7, 0.8)], 2, 4),  # better than before, but within the interval
        ([(0.9, 1.0), (1.0, 1.0), (1.0, 1.0)], 2, 3),
    ],
)
def test_patience_is_counted_from_the_last_evaluation_above_the_interval(
    results: Sequence[tuple[float, float]], patience: int, stopped: int | None
) -> None:
    """`results`: accuracy and upper end of the interval of each evaluation."""
    schedule, state = Schedule.of(LoopConfig(steps=1_000, stop_early=patience), 100), RunState()
    for accuracy, high in results[:stopped]:
        assert not schedule.done(state)
        state.step += 1
        schedule.record_evaluation(state, {"eval/accuracy": accuracy, "eval/high": high})
    assert schedule.done(state) == (stopped is not None)


@pytest.mark.usefixtures("no_curves", "one_thread")
def test_a_killed_run_that_is_resumed_stops_early_at_the_same_step(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch, stdout_of: Callable[..., str]
) -> None:
    printed = stdout_of(small.train(*WORDS))
    summary = small.summary()
    assert summary["steps"] == 6 and summary["stop_early"]["evaluations"] == 2
    reason = "stopped early (train.stop_early = 2): 2 evaluations in a row did not exceed"
    assert summary["stopped_early"].startswith(reason) and reason in printed
    last, best = checkpoints.last(small.runs / "small"), checkpoints.read_best(small.runs / "small")
    assert last == 6 and best is not None and resolve_model("run:small@best", small.runs)
    with monkeypatch.context() as patch:
        inject(patch, OnPolicySource, "next", 6, kill)  # between the second and the third evaluation
        with pytest.raises(Killed):
            small.train(*WORDS, "--name", "killed")
    assert small.resume("killed") == 0
    small.same_run("small", "killed", 6)


@pytest.mark.usefixtures("no_curves", "one_thread")
def test_a_run_that_stopped_early_is_complete_and_can_be_continued(
    small: SmallRuns, stdout_of: Callable[..., str]
) -> None:
    assert small.train(*WORDS) == 0
    note = stdout_of(small.resume("small")).splitlines()[-1]
    assert "run small is finished (6 steps; stopped early" in note and "--train.stop_early 0" in note
    with pytest.raises(UserError, match=r"resume=.*, train=\{'stop_early': 0\}"):
        assay.train(resume="small", runs_dir=small.runs)
    assert small.resume("small", "--train.stop_early", 0, "--train.steps", 7) == 0
    assert small.summary()["steps"] == 7 and "stopped_early" not in small.summary()
