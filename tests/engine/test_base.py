"""`generate`, `score` and the engine interface, for the native and the hf engine."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch
from event_parts import (
    BACKENDS,
    Recorder,
    add_all,
    assert_equal_completions,
    assert_nothing_left,
    build,
    native,
    policy,
    run,
    varied_requests,
)
from inflight_parts import decoder
from native_parts import Mode, assert_same_draws

from assay.engine import Failed, Request, SamplingParams, generate
from assay.models.decoder import Decoder
from assay.types import Completion, UserError

SAMPLED = SamplingParams(n=2, max_new_tokens=12)
ALONE: dict[tuple[str, str], list[Completion]] = {}  # results of `alone`
SMALL_CACHE = Mode(max_batch=6, window=2, ahead=1, cache=112)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def alone(backend: str, request: Request) -> list[Completion]:
    """Completions of a new engine that serves only this request."""
    request = replace(request, stream=False, keep=False)
    key = backend, repr(request)
    if key not in ALONE:
        (ALONE[key],) = generate(build(backend), [request])
    return ALONE[key]


# -- add, step, generate


def test_generate_reports_finished_samples_and_tokens_also_before_the_first_one_finishes() -> None:
    request = Request([1, 2, 3], replace(SAMPLED, n=3), seed=1)
    counts: list[tuple[int, int]] = []
    engine = build("native")
    (group,) = generate(engine, [request], lambda finished, tokens: counts.append((finished, tokens)))
    assert counts == sorted(counts) and counts[0][0] == 0 and counts[-1][0] == 3
    assert 0 < max(tokens for finished, tokens in counts if finished == 0) < counts[-1][1]
    # Steps are counted in windows, of which a sample may use a part, and from the first report on.
    assert abs(counts[-1][1] - sum(len(completion.token_ids) for completion in group)) <= 3 * 8
    assert engine.on_tokens is None  # type: ignore[attr-defined]


# -- requests that cannot be served


def test_a_failed_event_does_not_wait_for_running_requests_and_none_follows_an_abort(backend: str) -> None:
    engine = build(backend)
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=60), seed=0))
    engine.step(wait=False)
    engine.abort([engine.add(Request([], SAMPLED, seed=0))])
    bad = engine.add(Request([], SAMPLED, seed=0))
    (event,) = engine.step()
    assert isinstance(event, Failed) and event.request_id == bad
    assert len(run(engine).completions) == 1


# -- abort


def test_abort_of_running_and_waiting_requests_leaves_others_unchanged(backend: str) -> None:
    requests = varied_requests(stream=True)
    engine, recorder = build(backend, mode=Mode(max_batch=2)), Recorder()
    ids = add_all(engine, requests)
    for _ in range(8):
        recorder.record(engine.step(wait=False))
    dropped = {(ids[0], sample) for sample in range(2)} | {(ids[3], 1)} | {(ids[4], sample) for sample in range(2)}
    before = {key: len(recorder.chunks[key]) for key in dropped}
    engine.abort([ids[0], (ids[3], 1), ids[4]])
    finished = set(recorder.completions)
    run(engine, recorder)
    assert not recorder.errors
    for request_id, request in zip(ids, requests, strict=True):
        expected = alone(backend, request)
        for sample in range(request.params.n):
            key = request_id, sample
            if key in dropped and key not in finished:
                assert key not in recorder.completions and len(recorder.chunks[key]) == before[key]
            else:
                assert recorder.completions[key].token_ids == expected[sample].token_ids
    assert_nothing_left(engine)


def test_aborting_all_samples_one_by_one_aborts_the_request(backend: str) -> None:
    engine = build(backend)
    request_id = engine.add(Request([1, 2, 3], SamplingParams(n=3, max_new_tokens=30), seed=0))
    other = engine.add(Request([4, 5], SAMPLED, seed=1))
    engine.step(wait=False)
    for sample in (1, 0, 2):
        engine.abort([(request_id, sample)])
        engine.step(wait=False)
    assert run(engine).ids() == {other}
    assert_nothing_left(engine)


def test_abort_of_preempted_sequences_frees_their_blocks() -> None:
    model = policy("native")
    assert isinstance(model, Decoder)
    requests = [Request([3 * i + 1] * 9, SamplingParams(n=2, max_new_tokens=50), seed=i, stream=True) for i in range(3)]
    engine, recorder = native(model, SMALL_CACHE, dtype=torch.float32), Recorder()
    ids = add_all(engine, requests)
    while not engine.stats.preemptions:
        recorder.record(engine.step(wait=False))
    preempted = [sample for prefix in engine.scheduler.waiting for sample in prefix.samples if sample.drawn]
    assert preempted
    dropped = {(sample.job.id, sample.index) for sample in preempted}
    before = {key: len(recorder.chunks[key]) for key in dropped}
    engine.abort(dropped)
    run(engine, recorder)
    assert not dropped & set(recorder.completions)
    assert all(len(recorder.chunks[key]) == before[key] for key in dropped)
    for request_id, request in zip(ids, requests, strict=True):
        expected = alone("native", request)
        for sample in range(2):
            if (request_id, sample) not in dropped:
                assert recorder.completions[request_id, sample].token_ids == expected[sample].token_ids
    assert_nothing_left(engine)


# -- streaming


# -- kept sequences


def test_abort_of_a_continuation_frees_what_was_kept(backend: str) -> None:
    engine = build(backend)
    for steps in (0, 1):
        (first,) = generate(engine, [Request([1, 2], SamplingParams(max_new_tokens=5), seed=0, keep=True)])[0]
        request_id = engine.add(Request([9], SamplingParams(max_new_tokens=30), seed=0, continues=first.handle))
        for _ in range(steps):
            engine.step(wait=False)
        engine.abort([request_id])
        assert engine.step() == []
        assert_nothing_left(engine)


# -- sleep, prefix cache, close, weights


def test_sleep_is_refused_while_requests_run(backend: str) -> None:
    engine = build(backend)
    request_id = engine.add(Request([1, 2], SAMPLED, seed=0))
    with pytest.raises(UserError, match="sleep"):
        engine.sleep()
    engine.step(wait=False)
    with pytest.raises(UserError, match="sleep"):
        engine.sleep()
    assert set(run(engine).completions) == {(request_id, 0), (request_id, 1)}
    engine.sleep()
    engine.sleep()
    engine.wake()
    assert generate(engine, [Request([1, 2], SAMPLED, seed=0)])


def test_resetting_the_prefix_cache_while_requests_run_changes_no_sample() -> None:
    model, requests = policy("native"), varied_requests()
    engine, recorder = build("native", mode=Mode(max_batch=3, prefill_tokens=6)), Recorder()
    ids = add_all(engine, requests)
    for _ in range(60):
        recorder.record(engine.step(wait=False))
        engine.reset_prefix_cache()
    run(engine, recorder)
    for request, request_id in zip(requests, ids, strict=True):
        assert_same_draws(model, request, recorder.group(request_id), alone("native", request))
    assert_nothing_left(engine)


def test_close_drops_requests_and_kept_sequences(backend: str) -> None:
    engine = build(backend)
    generate(engine, [Request([1, 2], SAMPLED, seed=0, keep=True)])
    engine.add(Request([1, 2], SAMPLED, seed=0))
    engine.step(wait=False)
    engine.close()
    assert_nothing_left(engine)


def test_both_engines_give_the_same_samples_for_the_same_weights() -> None:
    requests = varied_requests()
    model = policy("native")
    for request, ours, theirs in zip(
        requests, generate(build("native"), requests), generate(build("hf"), requests), strict=True
    ):
        assert_same_draws(model, request, ours, theirs)


def test_generate_refuses_events_of_another_consumer() -> None:
    engine = build("native")
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=1), seed=0))
    with pytest.raises(RuntimeError, match="another consumer"):
        generate(engine, [Request([1, 2], SamplingParams(max_new_tokens=5), seed=0)])
    assert engine.step() == []
    assert_nothing_left(engine)


# `Engine.score`: log-probabilities of given tokens


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
