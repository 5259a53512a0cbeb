from __future__ import annotations

from typing import Any

import torch

from assay.engine.base import Request, SamplingParams
from assay.engine.running_batch import Rows
from assay.engine.sampler import noise_keys, signed
from assay.engine.sequence import (
    FORBIDDEN_SLOTS,
    STOP_SLOTS,
    WIDTH,
    Column,
    Job,
    Modes,
    RowState,
    Sample,
    assign_slot,
)

CPU = torch.device("cpu")


def job(index: int, tokens: list[int], limit: int = 9, seed: int = 0, **params: Any) -> Job:
    return Job(index, Request(tokens, SamplingParams(**params), seed=seed), tokens, limit)


def entered(rows: Rows, samples: list[Sample]) -> list[Sample]:
    running: list[Sample] = []
    for sample in samples:
        assign_slot(sample, running, 0)
    rows.enter(samples)
    rows.update_modes(running)
    return running


def stops_of(rows: Rows, row: int) -> list[int]:
    return rows.ints[row, Column.STOPS :].tolist()


def test_enter_fills_only_the_rows_of_new_samples() -> None:
    rows = Rows(5, 3, CPU)
    one = job(
        0, [7, 8, 9], seed=-3, temperature=0.5, top_k=4, top_p=0.25, stop_token_ids=(6, 2, 6, 5), min_new_tokens=2
    )
    other = job(1, [4], limit=2, seed=2**64 + 5, forbidden_token_ids=(5, 3, 5), stop_token_ids=(3, 1), min_p=0.125)
    entered(rows, [Sample(one, 0), Sample(one, 1), Sample(other, 3)])
    assert rows.ints.shape == (5, WIDTH)
    for row, index in ((0, 0), (1, 1)):
        expected = {
            Column.TOKEN: 9,
            Column.POSITION: 2,
            Column.STORED: 3,
            Column.COUNT: 0,
            Column.LIMIT: 9,
            Column.MIN_NEW: 2,
            Column.KEY: int(noise_keys(torch.tensor([-3]), torch.tensor([index]))),
            Column.TOP_K: 4,
            Column.STATE: RowState.RUNNING,
            Column.FORBIDDEN: 0,
        }
        assert rows.ints[row, : Column.STOPS].tolist() == [expected[Column(place)] for place in range(Column.STOPS)]
        assert stops_of(rows, row) == [2, 5, 6] + [-1] * (STOP_SLOTS - 3)
        assert rows.floats[row].tolist() == [0.5, 0.25, 0.0, 0.0]
    assert rows.ints[2, Column.KEY] == noise_keys(torch.tensor([signed(5)]), torch.tensor([3]))[0]
    assert rows.ints[2, Column.FORBIDDEN] == 2
    assert rows.forbidden[2].tolist() == [3, 5] + [-1] * (FORBIDDEN_SLOTS - 2)
    assert stops_of(rows, 2) == [1] + [-1] * (STOP_SLOTS - 1)  # forbidden tokens are no stop tokens
    assert rows.floats[2].tolist() == [1.0, 1.0, 0.125, 0.0]
    assert rows.ints[3:, Column.STATE].tolist() == [RowState.IDLE] * 2 and not rows.ints[3:, Column.TOKEN].any()


def test_modes_follow_the_parameters_of_running_rows() -> None:
    rows = Rows(4, 1, CPU)
    cases = [
        ({}, Modes(random=True)),
        ({"temperature": 0.0, "top_p": 0.5}, Modes(greedy=True)),
        ({"top_k": 2}, Modes(random=True, truncate=True)),
        ({"min_p": 0.1}, Modes(random=True, truncate=True)),
        ({"top_p": 0.9}, Modes(random=True, truncate=True)),
        ({"forbidden_token_ids": (1,)}, Modes(random=True, forbids=True)),
        ({"min_new_tokens": 2, "stop_token_ids": (1,)}, Modes(random=True, forbids=True)),
        ({"min_new_tokens": 2}, Modes(random=True)),
    ]
    for params, expected in cases:
        rows.update_modes([Sample(job(0, [1], **params), 0)])  # type: ignore[arg-type]
        assert rows.modes == expected
    rows.update_modes([Sample(job(0, [1], temperature=0.0), 0), Sample(job(1, [1], top_k=2), 0)])
    assert rows.modes == Modes(greedy=True, random=True, truncate=True)


def test_block_tables_are_uploaded_only_after_changes() -> None:
    rows = Rows(3, 4, CPU)
    samples = [Sample(job(i, [1]), 0, blocks=[i + 1]) for i in range(2)]
    entered(rows, samples)
    rows.add_blocks(samples)
    rows.write_tables(2, 1)
    assert rows.tables.tolist() == [[1, 0, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    samples[1].blocks = [2, 7, 8]
    rows.add_blocks(samples[1:])
    rows.write_tables(2, 3)
    assert rows.tables.tolist() == [[1, 0, 0, 0], [2, 7, 8, 0], [0, 0, 0, 0]]
    rows.tables.zero_()
    rows.add_blocks([])
    rows.write_tables(2, 3)  # no changes
    assert not rows.tables.any()
