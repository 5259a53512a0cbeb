"""`Engine.score`: log-probabilities of given tokens, by the native and the hf engine."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from event_parts import (
    BACKENDS,
    Recorder,
    add_all,
    assert_equal_completions,
    build,
    native,
    run,
    varied_requests,
)
from inflight_parts import decoder
from native_parts import Mode

from assay.engine import Request, SamplingParams, generate
from assay.types import UserError

FLOAT32 = 2e-5


def sequences() -> list[list[int]]:
    draw = random.Random(0)
    return [draw.choices(range(61), k=length) for length in (2, 96, 1, 8, 9, 33, 64, 95, 3, 16, 17)]


@torch.no_grad()
def trainer_scores(ids: list[int], temperature: float, seed: int = 0) -> list[float]:
    """Log-probabilities from the trainer's logits in float64."""
    model = decoder(seed)
    logits = model.unembed(model.hidden(torch.tensor(ids), [len(ids)]))[:-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def assert_scores_equal(ours: list[list[float]], theirs: list[list[float]], tolerance: float) -> None:
    assert [len(one) for one in ours] == [len(one) for one in theirs]
    flat = [torch.tensor([value for one in side for value in one], dtype=torch.float64) for side in (ours, theirs)]
    assert (flat[0] - flat[1]).abs().max() < tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_equal_logprobs_of_the_trainer(backend: str) -> None:
    """For all tokens but the first, with long and short sequences in one call."""
    engine = build(backend, mode=Mode(max_batch=4))
    for temperature in (1.0, 0.6):
        expected = [trainer_scores(ids, temperature) for ids in sequences()]
        assert_scores_equal(engine.score(sequences(), temperature), expected, FLOAT32)
    assert engine.score([]) == [] and engine.score([[5]]) == [[]]


@pytest.mark.parametrize("budget", [5, 100])
def test_more_tokens_than_the_prefill_budget_are_scored(budget: int) -> None:
    engine = native(decoder(0), Mode(max_batch=2, prefill_tokens=budget, cache=112))
    expected = [trainer_scores(ids, 1.0) for ids in sequences()]
    assert_scores_equal(engine.score(sequences()), expected, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scoring_while_requests_run_changes_no_sequence(backend: str) -> None:
    requests = varied_requests()
    expected = generate(build(backend), requests)
    engine, recorder = build(backend, mode=Mode(max_batch=8)), Recorder()
    ids = add_all(engine, requests)
    scores = [trainer_scores(ids, 1.0) for ids in sequences()]
    for _ in range(3):
        recorder.record(engine.step(wait=False))
        assert_scores_equal(engine.score(sequences()), scores, FLOAT32)
    run(engine, recorder)
    for request_id, group in zip(ids, expected, strict=True):
        assert_equal_completions(recorder.group(request_id), group, 0.0)


def test_scoring_with_a_full_cache_and_results_in_flight_changes_no_sequence() -> None:
    mode = Mode(max_batch=6, window=3, ahead=1, cache=112)
    expected = generate(native(decoder(0), mode), varied_requests())
    engine, recorder = native(decoder(0), mode), Recorder()
    ids = add_all(engine, varied_requests())
    while engine.incoming or engine.scheduler.unfinished:
        recorder.record(engine.step(wait=False))
        engine.score(sequences()[3:5])
    run(engine, recorder)
    for request_id, group in zip(ids, expected, strict=True):
        assert_equal_completions(recorder.group(request_id), group, 0.0)


def test_scores_follow_the_weights_also_from_other_threads() -> None:
    engine, found = native(decoder(0)), []
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=80), seed=0))
    engine.step(wait=False)
    ids = sequences()[5]
    threads = [threading.Thread(target=lambda: found.append(engine.score([ids])[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    run(engine)
    for thread in threads:
        thread.join(30)
    engine.update_weights(decoder(1), 1)
    found.append(engine.score([ids])[0])
    expected = [trainer_scores(ids, 1.0, seed) for seed in (0, 0, 0, 0, 1)]
    assert_scores_equal(found, expected, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_invalid_score_arguments_raise_and_requests_continue(backend: str) -> None:
    engine = build(backend)
    request = Request([1, 2], SamplingParams(max_new_tokens=20), seed=0)
    request_id = engine.add(request)
    engine.step(wait=False)
    for bad, temperature, message in (
        ([[1, 2], []], 1.0, "sequence 1 has 0 tokens"),
        ([[1, 61]], 1.0, "vocabulary"),
        ([[-1, 5]], 1.0, "vocabulary"),
        ([[1] * (engine.info.max_length + 1)], 1.0, "tokens"),
        ([[1, 2]], 0.0, "temperature"),
    ):
        with pytest.raises(UserError, match=message):
            engine.score(bad, temperature)
    assert_equal_completions(run(engine).group(request_id), generate(build(backend), [request])[0], 0.0)
