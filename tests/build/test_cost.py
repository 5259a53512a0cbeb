"""Predicted seconds, tokens and bytes of a run, compared with sums by hand and with simulated answers."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from assay.build.cost import Answers, EvaluationWork, Line, Speeds, Work, fewer_prompts, predict

SPEEDS = Speeds(
    position=Line(0.01, 0.001), prompt_token=0.0001, judge=Line(0.03, 0.002), update=Line(0.5, 0.0002), sync=0.1
)
FIXED = Answers(mean=50, longest=50, count=100, limit=50)  # all answers are equally long
WORK = Work(steps=10, prompts=4, samples=8, prompt_tokens=100, answers=FIXED, max_batch=1024)


def test_a_step_is_the_sum_of_its_parts() -> None:
    cost = predict(WORK, SPEEDS)
    decoding = 50 * (0.01 + 32 * 0.001)  # 50 positions of 32 sequences
    assert cost.sampling == pytest.approx(4 * 100 * 0.0001 + decoding)
    assert cost.judging == pytest.approx(0.03 + 32 * 0.002)
    assert cost.update == pytest.approx(0.5 + 0.0002 * 4 * (100 + 8 * 50))  # each prompt is computed once
    assert cost.step == pytest.approx(cost.sampling + cost.judging + cost.update + cost.rest) and cost.rest > 0.1
    assert cost.tokens == 10 * 32 * 50


def test_a_full_batch_needs_more_positions() -> None:
    """Of 32 answers of 50 tokens, 8 run at a time: 200 positions of 8 sequences."""
    cost = predict(replace(WORK, max_batch=8, prompt_tokens=0), SPEEDS)
    assert cost.sampling == pytest.approx(200 * (0.01 + 8 * 0.001))


def test_observations_of_an_environment_are_prefilled_and_part_of_the_update() -> None:
    plain, env = predict(WORK, SPEEDS), predict(replace(WORK, observed=2.0), SPEEDS)
    assert env.sampling - plain.sampling == pytest.approx(32 * 50 * 2 * 0.0001)
    assert env.update - plain.update == pytest.approx(32 * 50 * 2 * 0.0002)


def test_sampling_and_updates_at_the_same_time_take_as_long_as_the_slower_one() -> None:
    apart, together = predict(WORK, SPEEDS), predict(replace(WORK, overlaps=True), SPEEDS)
    assert (
        together.step == pytest.approx(max(apart.sampling + apart.judging, apart.update) + apart.rest)
        and together.step < 0.8 * apart.step
    )


def test_the_total_contains_warm_start_evaluations_and_checkpoints() -> None:
    more = replace(
        WORK,
        evaluations=(EvaluationWork(problems=20, samples=2, times=3, answers=FIXED),),
        warm_steps=7,
        warm_tokens=1000,
        checkpoint_bytes=5e9,
        saves=2,
        kept=1,
    )
    bare, cost = predict(WORK, SPEEDS), predict(more, replace(SPEEDS, start=3.0))
    evaluation = 20 * 100 * 0.0001 + 50 * 0.01 + 40 * 50 * 0.001 + 0.03 + 40 * 0.002
    assert cost.evaluations == pytest.approx(3 * evaluation)
    assert cost.warm_start == pytest.approx(7 * (0.5 + 1000 * 0.0002))
    assert cost.total - bare.total == pytest.approx(cost.evaluations + cost.warm_start + 20 + 3)
    assert cost.disk == 5e9 and replace(more, rollout_steps=10).kept == 1
    assert predict(replace(more, rollout_steps=10), SPEEDS).disk > 5e9 + cost.tokens * 10


@pytest.mark.parametrize(
    "low, high, fixed, slope",
    [
        ((4, 1.0), (8, 2.0), 0.0, 0.25),
        ((4, 3.0), (8, 4.0), 2.0, 0.25),
        ((4, 3.0), (8, 2.0), 2.0, 0.0),  # noise
        ((4, 1.0), (8, 4.0), 0.0, 0.5),  # noise
        ((8, 4.0), (8, 4.0), 0.0, 0.5),
    ],
)
def test_a_line_through_two_measurements_is_nowhere_negative(
    low: tuple[float, float], high: tuple[float, float], fixed: float, slope: float
) -> None:
    line = Line.through(low, high)
    assert (line.fixed, line.slope) == pytest.approx((fixed, slope)) and line.at(high[0]) == pytest.approx(high[1])


def test_lengths_of_answers_are_estimated_from_a_sample_that_is_cut_off() -> None:
    """Against answers that end with the same probability at each token."""
    draw = random.Random(0)
    lengths = [min(int(draw.expovariate(1 / 100)) + 1, 400) for _ in range(4000)]
    cut = [min(length, 60) for length in lengths]
    unfinished = sum(length > 60 for length in lengths)
    estimate = Answers.of(sorted(cut), unfinished, limit=400)
    assert estimate.mean == pytest.approx(fmean(lengths), rel=0.1) and estimate.longest == 400


def test_the_longest_of_many_answers_grows_with_their_number_up_to_the_limit() -> None:
    """Against the mean longest of N draws of an exponential distribution."""
    draw = random.Random(1)

    def longest(count: int) -> float:
        return fmean(max(draw.expovariate(1 / 20) for _ in range(count)) for _ in range(300))

    answers = Answers(mean=20, longest=longest(16), count=16, limit=1000)
    assert answers.longest_of(1024) == pytest.approx(longest(1024), rel=0.2)
    assert replace(answers, limit=60).longest_of(1024) == 60


def test_a_model_whose_sampled_answers_never_end_is_expected_to_reach_the_limit() -> None:
    assert Answers.of([8, 8], 2, limit=256).mean == 256


def test_advice_names_the_largest_number_of_prompts_that_fits_into_the_time() -> None:
    work = replace(WORK, steps=1000, prompts=64)
    limit = predict(replace(work, prompts=16), SPEEDS).total
    found = fewer_prompts(work, SPEEDS, limit)
    assert found == (16, pytest.approx(limit))
    assert fewer_prompts(work, SPEEDS, predict(work, SPEEDS).total) is None
    assert fewer_prompts(replace(work, prompts=4), SPEEDS, 1.0) is None
