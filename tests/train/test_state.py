"""Length of a run in steps, epochs or a budget of answers, and what the learning rate schedule sees of it."""

from __future__ import annotations

import pytest

from assay.config import LoopConfig
from assay.tasks.base import UNLIMITED
from assay.train.state import RunState, Schedule
from assay.types import UserError


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"steps": 7}, 7),
        ({"steps": 7, "epochs": 2.0}, 8),  # 2 x 31 prompts, 8 per step
        ({"steps": 7, "epochs": 0.5}, 2),
        ({"steps": 7, "budget": 100}, 4),  # 8 x 4 answers per step
        ({"steps": 7, "budget": 96}, 3),
    ],
)
def test_total_steps_by_steps_epochs_or_budget(settings: dict, steps: int) -> None:
    schedule = Schedule.of(LoopConfig(prompts=8, samples=4, **settings), prompts=31)
    assert schedule.total_steps == steps and schedule.answers_per_step == 32


def test_epochs_of_an_endless_split_are_refused() -> None:
    with pytest.raises(UserError, match=r"set train\.steps"):
        Schedule.of(LoopConfig(epochs=1.0), prompts=UNLIMITED)


def test_a_run_is_done_after_its_steps() -> None:
    schedule = Schedule(total_steps=3)
    assert [schedule.done(RunState(step=step)) for step in range(5)] == [False, False, False, True, True]
    assert schedule.done(RunState(step=2), ahead=1) and not schedule.done(RunState(step=1), ahead=1)
    assert not schedule.done(RunState(), answers=10**6)  # without a budget, answers do not count


def test_a_budget_ends_a_run_by_answers_and_drives_the_schedule() -> None:
    schedule = Schedule(total_steps=4, answers_per_step=32, budget=100)
    assert not schedule.done(RunState(step=1, answers=99)) and schedule.done(RunState(step=1, answers=100))
    assert schedule.done(RunState(step=1, answers=60), answers=40)
    assert schedule.done(RunState(step=4))
    answers = (1, 32, 33, 64, 65, 128, 500)
    assert [schedule.progress(RunState(step=9, answers=count)) for count in answers] == [0, 0, 1, 1, 2, 3, 3]
    assert Schedule(total_steps=4).progress(RunState(step=2, answers=500)) == 2


def test_periodic_work_is_due_every_n_steps_and_at_the_end() -> None:
    schedule = Schedule(total_steps=5)
    assert [step for step in range(1, 6) if schedule.due(2, RunState(step=step))] == [2, 4, 5]
    assert [step for step in range(1, 6) if schedule.due(0, RunState(step=step))] == [5]
