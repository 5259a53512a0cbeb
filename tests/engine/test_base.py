"""`generate` and the engine interface, for the native and the hf engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from event_parts import (
    BACKENDS,
    Recorder,
    add_all,
    assert_nothing_left,
    build,
    native,
    policy,
    run,
    varied_requests,
)
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
