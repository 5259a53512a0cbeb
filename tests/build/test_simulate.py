"""The simulated pipeline: closed forms, a brute-force engine, and what the real source guarantees."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from statistics import fmean

import pytest

from assay.build.cost import Line
from assay.build.simulate import Decoding, Pipeline, Simulation, drawn_lengths, simulate

STEADY = Pipeline(  # all answers are equally long
    engines=2,
    max_batch=100,
    decoding=Decoding(fixed=0.01, row=0.001),
    prefill=Line(0.0, 0.0),
    prompts=8,
    samples=4,
    prompt_tokens=10,
    lengths=[50],
    update=Line(1.0, 0.001),
    sync=0.5,
    staleness=0,
)
UPDATE_S = 1.0 + 0.001 * 8 * (10 + 4 * 50)
SAMPLING_S = 50 * (0.01 + 16 * 0.001)
MIXED = replace(STEADY, lengths=drawn_lengths(60, 200), decoding=Decoding(0.01, 0.001, 1e-5, 0.02, 0.002))


def test_in_turns_a_step_is_the_sum_of_its_parts() -> None:
    found = simulate(STEADY)
    assert found.step == pytest.approx(SAMPLING_S + UPDATE_S + 0.5)
    assert found.learner_busy == pytest.approx(UPDATE_S / found.step)
    assert found.syncing == pytest.approx(0.5 / found.step)
    assert found.engines_busy == pytest.approx(SAMPLING_S / found.step) and found.rows == pytest.approx(16)
    assert found.tokens_per_s == pytest.approx(8 * 4 * 50 / found.step)
    assert found.ages == {0: 1.0} and found.bottleneck == "updates"


@pytest.mark.parametrize(("engines", "bottleneck"), [(2, "learner"), (1, "engines")])
def test_an_asynchronous_step_takes_as_long_as_its_slower_side(engines: int, bottleneck: str) -> None:
    update = Line(2.0 if bottleneck == "learner" else 0.1, 0.0)
    pipeline = replace(STEADY, engines=engines, staleness=1, update=update, sync=0.01)
    found = simulate(pipeline)
    sampling = 50 * (0.01 + 32 // engines * 0.001)
    if bottleneck == "learner":
        assert found.step == pytest.approx(2.0 + 0.01)
    else:  # the next step's groups run beside those of this one, and the fixed part is shared
        assert sampling * 0.7 < found.step <= sampling + 0.02
    assert found.bottleneck == bottleneck and set(found.ages) == {1}


def brute_force(pipeline: Pipeline, lengths: list[list[int]]) -> float:
    """Seconds until one engine has sampled these groups, position by position."""
    waiting = deque((group, length) for group, members in enumerate(lengths) for length in members)
    running: list[list[int]] = []  # remaining tokens, context
    seconds = 0.0
    while waiting or running:
        computed = None
        while waiting and len(running) < pipeline.max_batch:
            group, length = waiting.popleft()
            seconds += pipeline.prefill.at(pipeline.prompt_tokens) * (group != computed)
            computed = group
            running.append([length, pipeline.prompt_tokens])
        seconds += pipeline.decoding.at(len(running), sum(context for _, context in running))
        running = [[left - 1, context + 1] for left, context in running if left > 1]
    return seconds


@pytest.mark.parametrize("max_batch", [100, 7])
def test_an_engine_takes_as_long_as_position_by_position(max_batch: int) -> None:
    pipeline = replace(MIXED, engines=1, max_batch=max_batch, prefill=Line(0.01, 0.002), update=Line(0, 0), sync=0.0)
    simulation = Simulation(pipeline)
    simulation.step()
    lengths = [list(group.lengths) for group in sorted(simulation.trained, key=lambda group: group.number)]
    # A position costs its context before it in one, and in the middle of it in the other.
    assert simulation.time == pytest.approx(brute_force(pipeline, lengths), rel=0.01)
    (engine,) = simulation.engines
    assert not engine.running and engine.unfinished == 0 and engine.context == pytest.approx(0, abs=1e-6)


def test_every_group_is_trained_once_and_none_is_too_old() -> None:
    draw = random.Random(2)
    for seed in range(20):
        staleness = draw.choice([1, 1, 2, 3])
        pipeline = replace(
            MIXED,
            engines=draw.choice([1, 2, 5]),
            max_batch=draw.choice([3, 100]),
            update=Line(draw.choice([0.05, 0.5, 3.0]), 0.0),
            sync=draw.choice([0.0, 0.3]),
            judge=draw.choice([0.0, 0.01]),
            prefill=Line(0.0, 1e-4),
            recomputes=draw.random() < 0.5,
            staleness=staleness,
            seed=seed,
        )
        simulation = Simulation(pipeline)
        for _ in range(12):
            simulation.step()
        numbers = [group.number for group in simulation.trained]
        assert len(numbers) == 12 * pipeline.prompts and len(set(numbers)) == len(numbers)
        assert max(simulation.ages) <= staleness
        waiting = {group.number for group in [*simulation.sampling, *simulation.ready]}
        assert waiting.isdisjoint(numbers) and waiting | set(numbers) == set(range(simulation.number))
        for engine in simulation.engines:
            assert engine.unfinished == len(engine.running) + len(engine.waiting)


def test_groups_that_take_too_long_are_sampled_again_and_then_waited_for() -> None:
    pipeline = replace(STEADY, engines=8, lengths=[10] * 15 + [2000], update=Line(0.5, 0.0), sync=0.0, staleness=1)
    simulation = Simulation(pipeline)
    found = simulation.run(steps=20, warm=2)
    assert found.restarted > 0
    restarted = [group for group in simulation.trained if group.restarts]
    assert restarted and max(group.restarts for group in simulation.trained) <= 2
    assert any(2000 in group.lengths for group in simulation.trained)  # long answers are trained, too


def test_engines_that_compute_again_after_a_sync_lose_time() -> None:
    busy = replace(STEADY, staleness=1, prefill=Line(0.0, 1e-3), update=Line(0.2, 0.0))
    assert simulate(replace(busy, recomputes=True)).step > 1.05 * simulate(busy).step


@pytest.mark.parametrize(("mean", "limit"), [(50, 100), (100, 1000), (900, 1000), (100, 100)])
def test_lengths_have_the_given_mean(mean: float, limit: int) -> None:
    lengths = drawn_lengths(mean, limit)
    assert fmean(lengths) == pytest.approx(mean, rel=0.01) and min(lengths) >= 1 and max(lengths) <= limit
