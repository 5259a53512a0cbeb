"""Training alone: what is trained on, and what the updater is told to do with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from assay.algos import make_algorithm
from assay.bench import step
from assay.bench.step import TABLE, Sequences, measure_training
from assay.bench.trainer import StepOptions, row_id
from assay.train.learner.pack import rows_of
from assay.train.learner.update import Updater
from assay.types import UserError

TINY = Sequences(shape="tiny", sequences=4, tokens=16)
OPTIONS = StepOptions(device="cpu", dtype="float32", steps=2)


def test_all_tokens_but_the_first_are_trained_on() -> None:
    group = TINY.group(512, run=0)
    rows = rows_of([group], make_algorithm("grpo"))
    assert [row.trained for row in rows] == [[0] + [1] * 15] * 4
    assert all(len(row.ids) == 16 and row.weight > 0 for row in rows)
    assert sorted(row.advantage for row in rows) == [-1, -1, 1, 1]
    assert rows[0].ids == TINY.group(512, run=0).rollouts[0].token_ids != TINY.group(512, run=1).rollouts[0].token_ids


def test_a_row_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(step, "now", lambda device: next(times))
    seen: list[int] = []
    update = Updater.update

    def counted(self: Updater, groups, algo, lr, passes=1):
        seen.append(self.token_budget)
        return update(self, groups, algo, lr, passes)

    monkeypatch.setattr(Updater, "update", counted)
    options = replace(OPTIONS, set=("token_budget=32",))
    (row,) = measure_training(TINY, options)
    assert row["id"] == row_id("train-tiny-4x16", options) and "-token_budget32" in row["id"]
    assert (row["runs"], row["tokens_per_s"], row["first_run_tokens_per_s"]) == ([32.0, 64.0], 48.0, 7.1)
    assert seen == [32] * 3 and row["token_budget"] == 32 and row["trained_tokens"] == 60
    words = "--train-only --shape tiny --sequences 4 --tokens 16 --device cpu --dtype float32 --steps 2"
    assert row["command"] == f"assay bench step {words} --set token_budget=32"


def test_the_trainings_of_the_table() -> None:
    assert [work.id for work in TABLE] == ["train-0.5b-16x1024", "train-1.5b-16x1024"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"shape": "7b"}, "known: 0.5b"),
        ({"sequences": 0}, "--sequences must be at least 1"),
        ({"tokens": 1}, "--tokens at least 2"),
        ({"tokens": 40_000}, "more than the 32768 of tiny"),
    ],
)
def test_wrong_sequences_are_named(wrong: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        measure_training(replace(TINY, **wrong), OPTIONS)
