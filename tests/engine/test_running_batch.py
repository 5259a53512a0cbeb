from __future__ import annotations

from typing import Any

import numpy as np
import torch

from assay.engine.base import Request, SamplingParams
from assay.engine.running_batch import LOG_STEPS, Rows
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
    close_gaps,
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


def test_preempted_sample_continues_after_its_last_token() -> None:
    rows = Rows(1, 1, CPU)
    sample = Sample(job(0, [7, 8, 9]), 0, drawn=[20, 21])
    entered(rows, [sample])
    assert rows.ints[0, [Column.TOKEN, Column.POSITION, Column.STORED, Column.COUNT]].tolist() == [21, 4, 5, 2]


def test_reused_row_keeps_no_values_of_the_previous_sample() -> None:
    rows = Rows(1, 1, CPU)
    entered(rows, [Sample(job(0, [1], forbidden_token_ids=(1, 2), stop_token_ids=(4,), top_k=3), 0)])
    entered(rows, [Sample(job(0, [1]), 0)])
    clean = Rows(1, 1, CPU)
    entered(clean, [Sample(job(0, [1]), 0)])
    assert rows.ints.tolist() == clean.ints.tolist() and rows.floats.tolist() == clean.floats.tolist()
    logits = torch.zeros(1, 3)
    for _ in range(9):
        rows.draw(logits)
    assert set(rows.log_tokens[:9, 0].tolist()) == {0, 1, 2}  # nothing is forbidden any more


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


def test_move_copies_all_values_of_a_row() -> None:
    rows = Rows(6, 3, CPU)
    jobs = [job(i, [i] * (i + 1), seed=i, top_k=i, temperature=1.0 + i, forbidden_token_ids=(i,)) for i in range(6)]
    samples = [Sample(one, 0, blocks=[10 * i, 10 * i + 1]) for i, one in enumerate(jobs)]
    running = entered(rows, samples)
    rows.add_blocks(samples)
    before = [rows.ints.clone(), rows.floats.clone(), rows.forbidden.clone()]
    gone = [samples[0], samples[2], samples[5]]
    rows.move(close_gaps(running, gone, 1), len(running), 6)
    assert len(running) == 3 and {sample.row for sample in running} == {0, 1, 2}
    rows.write_tables(3, 2)
    for sample in running:
        for table, old in zip((rows.ints, rows.floats, rows.forbidden), before, strict=True):
            assert table[sample.row].tolist() == old[sample.job.id].tolist()
        assert rows.tables[sample.row, :2].tolist() == sample.blocks
    assert rows.ints[:, Column.STATE].tolist() == [RowState.RUNNING] * 3 + [RowState.IDLE] * 3


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


def test_read_returns_results_across_the_wraparound_of_the_log() -> None:
    rows = Rows(3, 1, CPU)
    running = entered(
        rows, [Sample(job(i, [1], limit=LOG_STEPS + 5 if i else 3, temperature=0.0), 0) for i in range(2)]
    )
    drawn: list[list[int]] = []
    draw = np.random.default_rng(0)
    for step in range(LOG_STEPS + 5):
        logits = torch.from_numpy(draw.normal(size=(2, 50))).float()
        before = rows.ints[:2, Column.STATE] == RowState.RUNNING
        rows.draw(logits)
        expected = logits.log_softmax(-1).amax(-1)
        look = rows.read(list(running), step, 1)
        assert look.samples == running and look.tokens.shape == (1, 2) and look.scores.shape == (4, 1, 2)
        drawn.append(logits.argmax(-1).tolist())
        for row in range(2):
            if before[row]:
                assert look.tokens[0, row] == drawn[-1][row]
                assert torch.allclose(look.scores[:2, 0, row], torch.tensor([float(expected[row]), 0.0]), atol=1e-6)
    assert look.after.tolist() == [[3, LOG_STEPS + 5], [RowState.LENGTH, RowState.LENGTH]]
    window = rows.read(list(running), LOG_STEPS, 5)
    assert window.tokens[:, 1].tolist() == [tokens[1] for tokens in drawn[-5:]]
    assert rows.ints[:2, Column.POSITION].tolist() == [3, LOG_STEPS + 5]
    assert rows.ints[0, Column.TOKEN] == drawn[2][0]  # it has ended and does not change
    assert rows.ints[2, Column.STATE] == RowState.IDLE
