from __future__ import annotations

from typing import Any

import torch

from assay.engine.base import Request, SamplingParams
from assay.engine.running_batch import Rows
from assay.engine.sequence import (
    Job,
    Modes,
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
