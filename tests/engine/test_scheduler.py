from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.engine.base import Request, SamplingParams
from assay.engine.scheduler import Scheduler
from assay.engine.sequence import PromptJob


def job(index: int, length: int, samples: int) -> PromptJob:
    return PromptJob(index, Request([0] * length, SamplingParams(n=samples), seed=index), limit=10)


def test_a_group_enters_as_there_is_room_and_its_prompt_is_computed_once() -> None:
    scheduler = Scheduler([job(0, 5, 3), job(1, 7, 4)], max_batch=4, prefill_tokens=100)
    first, second = scheduler.admit()
    assert (len(first.samples), first.first, first.last) == (3, True, True)
    assert (len(second.samples), second.first, second.last) == (1, True, False)
    assert scheduler.admit() == []
    assert scheduler.release([0, 2]) == [(3, 0)]
    assert [sample.job.index for sample in scheduler.running] == [1, 0]
    (rest,) = scheduler.admit()
    assert (rest.job.index, [sample.index for sample in rest.samples], rest.first, rest.last) == (
        1,
        [1, 2],
        False,
        False,
    )


def test_prompts_stay_within_the_token_budget_but_one_always_enters() -> None:
    scheduler = Scheduler([job(0, 60, 1), job(1, 50, 1), job(2, 500, 1)], max_batch=8, prefill_tokens=100)
    assert [[a.job.index for a in scheduler.admit()] for _ in range(3)] == [[0], [1], [2]]


def test_waves_wait_for_everyone_and_even_waves_for_their_length() -> None:
    scheduler = Scheduler([job(0, 5, 2), job(1, 6, 1)], max_batch=8, prefill_tokens=100, waves=True, even=True)
    assert [a.job.index for a in scheduler.admit()] == [0]
    scheduler.release([0])
    assert scheduler.admit() == []
    scheduler.release([0])
    assert [a.job.index for a in scheduler.admit()] == [1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=12),
    st.integers(1, 40),
    st.integers(1, 100),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_everything_finishes_once_and_slots_never_clash(
    shapes: list[tuple[int, int]], max_batch: int, budget: int, waves: bool, even: bool, seed: int
) -> None:
    draw = random.Random(seed)
    jobs = [job(index, length, samples) for index, (length, samples) in enumerate(shapes)]
    scheduler = Scheduler(jobs, max_batch, budget, waves=waves, even=even)
    slots: dict[int, tuple[int, int]] = {}  # what a device would hold, moved only as the scheduler says
    entered, done = [], []
    rounds = 0
    while scheduler.unfinished:
        rounds += 1
        assert rounds < 10_000
        start = len(scheduler.running)
        admissions = scheduler.admit()
        assert not (waves and start and admissions)
        new_prompts = [a.job.length for a in admissions if a.first]
        assert len(new_prompts) <= 1 or sum(new_prompts) <= budget
        assert not any(not a.first for a in admissions[1:])
        assert not any(not a.last for a in admissions[:-1])
        for sample in (sample for admission in admissions for sample in admission.samples):
            assert start not in slots
            slots[start] = (sample.job.index, sample.index)
            entered.append(slots[start])
            start += 1
        assert len(scheduler.running) == len(slots) <= max_batch
        assert scheduler.running
        scheduler.step += 1
        gone = draw.sample(range(len(slots)), draw.randint(0, len(slots)))
        done += [slots.pop(slot) for slot in gone]
        for source, destination in scheduler.release(gone):
            assert destination not in slots
            slots[destination] = slots.pop(source)
        assert [(s.job.index, s.index) for s in scheduler.running] == [slots[i] for i in range(len(slots))]
    everything = [(index, sample) for index, (_, samples) in enumerate(shapes) for sample in range(samples)]
    assert entered == everything
    assert sorted(done) == everything
    assert scheduler.pending == 0
