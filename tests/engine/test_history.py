from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from assay.engine.base import Request, SamplingParams
from assay.engine.completions import HISTORY_STEPS, History
from assay.engine.running_batch import StepOutput
from assay.engine.sequence import Job, Sample, assign_slot, close_gaps


def new_sample(index: int, limit: int = 10_000) -> Sample:
    return Sample(Job(index, Request([1], SamplingParams(), seed=0), [1], limit), 0)


def look_at(running: list[Sample], first: int, steps: int) -> StepOutput:
    """A log with distinct values: tokens encode step and row, scores also their kind."""
    step = torch.arange(first, first + steps)[:, None]
    tokens = step * 100 + torch.arange(len(running))
    scores = torch.stack([tokens + 0.125 * kind for kind in range(4)])
    return StepOutput(list(running), first, tokens.int(), scores.float(), torch.zeros(2, len(running)))


def assert_reads(history: History, samples: list[Sample], told: dict[Sample, list[int]]) -> None:
    count = len(told[samples[0]])
    tokens, scores = history.read(samples, count)
    assert tokens.tolist() == [told[sample] for sample in samples]
    assert [history.read([sample], count)[0][0].tolist() for sample in samples] == tokens.tolist()
    assert scores.shape == (4, len(samples), count)
    for kind in range(4):
        assert np.array_equal(scores[kind], tokens + 0.125 * kind)


@pytest.mark.parametrize(("window", "late"), [(1, 0), (4, 0), (4, 1), (7, 2)])
def test_history_follows_sequences_that_change_rows(window: int, late: int) -> None:
    """Random samples enter, leave and move between rows for longer than the initial capacity; results arrive late."""
    draw = random.Random(window)
    history = History(6)
    first = history.first = 37
    step, named = first, 0
    running: list[Sample] = []
    told: dict[Sample, list[int]] = {}  # expected tokens of each sample
    looks: list[StepOutput] = []
    for _ in range(5 * HISTORY_STEPS // window):
        while len(running) < 6 and draw.random() < 0.3:
            assign_slot(new_sample(named), running, step)
            told[running[-1]] = []
            named += 1
        if running:
            for offset in range(window):
                for row, sample in enumerate(running):
                    told[sample].append((step + offset) * 100 + row)
            looks.append(look_at(running, step, window))
            step += window
        while len(looks) > late:
            history.write(looks.pop(0), running)
        leaving = [sample for sample in running if draw.random() < 0.02 * window]
        if leaving:
            while looks:
                history.write(looks.pop(0), running)
            for sample in leaving:
                assert_reads(history, [sample], told)
            close_gaps(running, leaving, step)
    assert step > first + 3 * HISTORY_STEPS and named > 20


def test_history_drops_steps_before_the_oldest_running_sample() -> None:
    history = History(2)
    running: list[Sample] = []
    for start in range(0, 8 * HISTORY_STEPS, 50):  # short sequences
        assign_slot(new_sample(start), running, start)
        history.write(look_at(running, start, 50), running)
        assert_reads(history, running, {running[0]: [step * 100 for step in range(start, start + 50)]})
        close_gaps(running, list(running), start + 50)
    assert history.tokens.shape == (2, HISTORY_STEPS) and history.scores.shape == (4, 2, HISTORY_STEPS)
    assign_slot(new_sample(0), running, 8 * HISTORY_STEPS)
    told: list[int] = []
    for start in range(8 * HISTORY_STEPS, 11 * HISTORY_STEPS, 64):  # one long sequence
        history.write(look_at(running, start, 64), running)
        told += [step * 100 for step in range(start, start + 64)]
    assert_reads(history, running, {running[0]: told})
    assert history.tokens.shape[1] <= 8 * HISTORY_STEPS
