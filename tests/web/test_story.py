"""The learning story of a question: at which times it was answered, and which answers are shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from web_parts import answer, make_run, prompt_of, standard_run

from assay.runs import write_rollouts
from assay.types import Group, Status
from assay.web.app import StoryQuery, default_times, story
from assay.web.data import RunView

OK, WRONG = Status.OK, Status.WRONG


def run_of(folder: Path, *steps: list[Status]) -> RunView:
    """A run in which one question is answered in each step."""
    path, prompt = make_run(folder, steps=len(steps)), prompt_of("p")
    for step, statuses in enumerate(steps, start=1):
        rollouts = [answer(prompt, n, f"step {step} answer {n}", status) for n, status in enumerate(statuses)]
        write_rollouts(path, step, [Group(prompt, rollouts)])
    return RunView("one", path)


def test_the_story_has_the_majority_and_the_first_correct_answer(tmp_path: Path) -> None:
    view = run_of(tmp_path, [WRONG, WRONG, WRONG], [WRONG, WRONG, OK], [OK, WRONG, WRONG], [WRONG, OK, OK])
    found = story(view, StoryQuery(prompt="p"))
    assert [(time["step"], time["correct"], time["count"]) for time in found["times"]] == [
        *((1, 0, 3), (2, 1, 3), (3, 1, 3), (4, 2, 3))
    ]
    assert [one["text"] for one in found["answers"]] == [
        *("step 1 answer 0", "step 2 answer 2", "step 3 answer 1", "step 4 answer 1")
    ]
    assert found["first_correct"] == 1 and [one["is_first_correct"] for one in found["answers"]] == [0, 1, 0, 0]
    assert found["prompt"]["messages"][-1]["content"] == "what is p?"


def test_chosen_times_are_shown_in_the_order_of_the_run(tmp_path: Path) -> None:
    view = run_of(tmp_path, [WRONG], [WRONG], [OK])
    found = story(view, StoryQuery.model_validate({"prompt": "p", "at": "3,1,99"}))
    assert [one["step"] for one in found["answers"]] == [1, 3] and len(found["times"]) == 3


def test_evaluations_are_times_of_the_story(tmp_path: Path) -> None:
    found = story(RunView("one", standard_run(tmp_path)), StoryQuery(prompt="q1"))
    assert [(time["at"], time["label"], time["correct"]) for time in found["times"]] == [
        ("step-000000-before-test", "before", 0),
        ("step-000003-after-test", "after", 1),
    ]


def test_a_question_without_answers_has_no_times(tmp_path: Path) -> None:
    found = story(RunView("one", standard_run(tmp_path)), StoryQuery(prompt="unknown"))
    assert found["times"] == found["answers"] == [] and found["first_correct"] is None


@pytest.mark.parametrize("first", [None, 0, 7, 99])
def test_the_first_the_last_and_the_first_correct_time_are_shown_by_default(first: int | None) -> None:
    keys = [str(number) for number in range(100)]
    chosen = default_times(keys, first)
    assert {"0", "99"} <= chosen and (first is None or str(first) in chosen) and 6 <= len(chosen) <= 7
