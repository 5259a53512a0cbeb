"""The learning story of a question: its answers at some times of a run, in training and in evaluations."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from assay.web.data import RunView
from assay.web.index import SKIPPED, TRAIN, Place
from assay.web.table import OK, Names, RolloutTable, Text

DEFAULT_TIMES = 6  # that are shown without a choice
MAX_TIMES = 24


class StoryQuery(BaseModel):
    """A prompt by its id, and the times whose answers are shown: steps of training, or names of evaluations."""

    prompt: Text
    at: Annotated[Names, Field(max_length=MAX_TIMES)] = ()


def story(view: RunView, query: StoryQuery) -> dict[str, Any]:
    """All times at which the question was answered, and one answer of each chosen time.

    It is an answer of the majority, correct or not; the correct one at the time of the first correct answer.
    """
    table = view.current_table()
    times = times_of(table, query.prompt)
    first = next((number for number, time in enumerate(times) if time["correct"]), None)
    keys = query.at or default_times([time["at"] for time in times], first)
    answers, lines = [], []
    for number, time in enumerate(times):
        rows = time.pop("rows")
        if time["at"] not in keys:
            continue
        correct = number == first or 2 * time["correct"] >= time["count"]
        row = next(row for row in rows if (table.rows["status"][row] == OK) == correct)
        file, index = table.files[table.file[row]], int(table.rows["index"][row])
        (line,) = view.lines(file, [index])
        lines.append((file, index, line))
        answers.append({**time, **view.answer(file, index, line), "is_first_correct": number == first})
    view.add_pieces(lines, answers)
    known = lines[0][2] if lines else {}
    asked = {name: known.get(name) for name in ("messages", "answer")}
    return {"prompt": {"id": query.prompt, **asked}, "times": times, "answers": answers, "first_correct": first}


def times_of(table: RolloutTable, prompt: str) -> list[dict[str, Any]]:
    """Times at which a prompt was answered, the earliest first: numbers of correct and of all answers, and its rows."""
    rows = np.flatnonzero(table.prompt == table.prompt_numbers.get(prompt, -1))
    found = []
    for number in np.unique(table.file[rows]).tolist():
        part = rows[table.file[rows] == number]
        place = table.files[number].place
        if place.source == SKIPPED:
            continue
        correct = int((table.rows["status"][part] == OK).sum())
        facts = {"at": time_key(place), "step": place.step, "source": place.source, "label": place.label or "training"}
        found.append(
            (place.step, place.order, {**facts, "correct": correct, "count": len(part), "rows": part.tolist()})
        )
    return [time for _, _, time in sorted(found, key=lambda entry: entry[:2])]


def time_key(place: Place) -> str:
    return str(place.step) if place.source == TRAIN else place.source


def default_times(keys: list[str], first_correct: int | None) -> set[str]:
    """The first and the last time, the first correct answer, and some between them."""
    if not keys:
        return set()
    chosen = set(np.linspace(0, len(keys) - 1, min(DEFAULT_TIMES, len(keys))).round().astype(int).tolist())
    return {keys[number] for number in chosen | ({first_correct} if first_correct is not None else set())}
