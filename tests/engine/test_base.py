"""`generate` and the engine interface, for the native and the hf engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
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
from native_parts import Mode, assert_same_draws

from assay.engine import Failed, Finished, Request, RequestError, SamplingParams, TokenChunk, generate
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.types import Completion, UserError

SAMPLED = SamplingParams(n=2, max_new_tokens=12)
ALONE: dict[tuple[str, int, str], list[Completion]] = {}  # results of `alone`: (backend, seed of the weights, request)
SMALL_CACHE = Mode(max_batch=6, window=2, ahead=1, cache=112)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def alone(backend: str, request: Request, seed: int = 0) -> list[Completion]:
    """Completions of a new engine that serves only this request."""
    request = replace(request, stream=False, keep=False)
    key = backend, seed, repr(request)
    if key not in ALONE:
        (ALONE[key],) = generate(build(backend, policy(backend, seed)), [request])
    return ALONE[key]


# -- add, step, generate


def test_generate_equals_stepping_by_hand(backend: str) -> None:
    requests = varied_requests()
    groups = generate(build(backend), requests)
    engine = build(backend)
    ids = add_all(engine, requests)
    assert len(set(ids)) == len(ids)
    recorder = run(engine)
    for request, request_id, group in zip(requests, ids, groups, strict=True):
        assert len(group) == request.params.n
        assert_equal_completions(recorder.group(request_id), group, 0.0)
    assert not recorder.errors
    assert_nothing_left(engine)


def test_generate_reports_finished_samples_and_tokens_also_before_the_first_one_finishes(backend: str) -> None:
    request = Request([1, 2, 3], replace(SAMPLED, n=3), seed=1)
    counts: list[tuple[int, int]] = []
    engine = build(backend)
    (group,) = generate(engine, [request], lambda finished, tokens: counts.append((finished, tokens)))
    assert counts == sorted(counts) and counts[0][0] == 0 and counts[-1][0] == 3
    assert 0 < max(tokens for finished, tokens in counts if finished == 0) < counts[-1][1]
    # Steps are counted in windows, of which a sample may use a part, and from the first report on.
    assert abs(counts[-1][1] - sum(len(completion.token_ids) for completion in group)) <= 3 * 8
    assert engine.on_tokens is None  # type: ignore[attr-defined]


# -- requests that cannot be served


def test_an_invalid_request_alone_fails_in_the_next_step(backend: str) -> None:
    engine = build(backend)
    request_id = engine.add(Request([], SAMPLED, seed=0, name="nothing"))
    (event,) = engine.step(wait=False)
    assert isinstance(event, Failed) and event.request_id == request_id and "'nothing'" in event.error
    assert engine.step() == []


def test_a_failed_event_of_a_request_added_while_others_run_does_not_wait_for_them(backend: str) -> None:
    engine = build(backend)
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=60), seed=0))
    engine.step(wait=False)
    bad = engine.add(Request([], SAMPLED, seed=0))
    assert [type(event) for event in engine.step()] == [Failed]
    recorder = run(engine)
    assert bad not in recorder.ids() and len(recorder.completions) == 1


def test_sequences_kept_by_a_generate_that_raises_are_released(backend: str) -> None:
    """The caller never learns their handles."""
    engine = build(backend)
    with pytest.raises(RequestError):
        generate(engine, [Request([1, 2], SAMPLED, seed=0, keep=True), Request([], SAMPLED, seed=0)])
    assert_nothing_left(engine)


class Poisoned:
    """Weights of a model, with NaN in the embedding of a token."""

    def __init__(self, model: PolicyModel, token: int) -> None:
        self.model, self.token = model, token

    def weights(self) -> Any:
        for name, weight in self.model.weights():
            broken = weight.detach().clone()
            if "embed_tokens" in name:
                broken[self.token] = float("nan")
            yield name, broken


def test_a_request_of_the_hf_engine_whose_numbers_break_midway_fails_and_others_are_served() -> None:
    """test_failed_requests.py has more for the native engine."""
    backend = "hf"
    model, requests = policy(backend), varied_requests(stream=True)
    expected = [alone(backend, request) for request in requests]
    token = expected[0][1].token_ids[4]
    engine = build(backend, model, Mode(max_batch=5))
    engine.update_weights(Poisoned(model, token), 0)
    ids = add_all(engine, requests)
    recorder = run(engine)
    fails = [
        any(token in [*request.prompt_ids, *completion.token_ids[:-1]] for completion in group)
        for request, group in zip(requests, expected, strict=True)
    ]
    assert fails[0] and not all(fails)
    assert sorted(recorder.errors) == [request_id for request_id, failing in zip(ids, fails, strict=True) if failing]
    for request, request_id, failing, group in zip(requests, ids, fails, expected, strict=True):
        if not failing:
            assert_same_draws(model, request, recorder.group(request_id), group)
        for sample in range(request.params.n):
            streamed = recorder.streamed(request_id, sample)[0]
            assert streamed == group[sample].token_ids[: len(streamed)]
    assert_nothing_left(engine)


# -- abort


@pytest.mark.parametrize(
    ("rows", "iterations"),
    [(2, 1), (2, 8), (16, 3)],
)
def test_abort_of_running_and_waiting_requests_leaves_others_unchanged(
    backend: str, rows: int, iterations: int
) -> None:
    model, requests = policy(backend), varied_requests(stream=True)
    engine, recorder = build(backend, model, Mode(max_batch=rows)), Recorder()
    ids = add_all(engine, requests)
    for _ in range(iterations):
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


def test_abort_of_one_sample_after_the_others_finished_ends_the_request(backend: str) -> None:
    model = policy(backend)
    engine, recorder = build(backend, model), Recorder()
    params = SamplingParams(n=2, max_new_tokens=60, stop_token_ids=tuple(range(10)))
    seed = next(
        seed
        for seed in range(50)
        if abs(len((pair := alone(backend, Request([1, 2], params, seed)))[0].token_ids) - len(pair[1].token_ids)) > 8
    )
    request_id = engine.add(Request([1, 2], params, seed))
    while not recorder.completions:
        recorder.record(engine.step(wait=False))
    engine.abort([(request_id, 0), (request_id, 1)])
    assert engine.step() == []
    assert_nothing_left(engine)


def test_abort_of_an_invalid_request_before_the_first_step_yields_no_event(backend: str) -> None:
    engine = build(backend)
    engine.abort([engine.add(Request([], SAMPLED, seed=0))])
    assert engine.step() == []


def test_abort_of_preempted_sequences_frees_their_blocks() -> None:
    model = policy("native64")
    assert isinstance(model, Decoder)
    requests = [Request([3 * i + 1] * 9, SamplingParams(n=2, max_new_tokens=50), seed=i, stream=True) for i in range(3)]
    engine, recorder = native(model, SMALL_CACHE), Recorder()
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
        expected = alone("native64", request)
        for sample in range(2):
            if (request_id, sample) not in dropped:
                assert recorder.completions[request_id, sample].token_ids == expected[sample].token_ids
    assert_nothing_left(engine)


# -- streaming


def test_a_single_token_is_streamed_before_it_is_finished(backend: str) -> None:
    engine = build(backend)
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=1), seed=0, stream=True))
    events = engine.step()
    while len(events) < 2:
        events += engine.step()
    assert [type(event) for event in events] == [TokenChunk, Finished]


# -- kept sequences


@pytest.mark.parametrize("steps", [0, 1])
def test_abort_of_a_continuation_frees_what_was_kept(backend: str, steps: int) -> None:
    engine = build(backend)
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


def test_resetting_the_prefix_cache_while_requests_run_changes_no_sample(backend: str) -> None:
    model, requests = policy(backend), varied_requests()
    engine, recorder = build(backend, model, Mode(max_batch=3, prefill_tokens=6)), Recorder()
    ids = add_all(engine, requests)
    for _ in range(60):
        recorder.record(engine.step(wait=False))
        engine.reset_prefix_cache()
    run(engine, recorder)
    for request, request_id in zip(requests, ids, strict=True):
        assert_same_draws(model, request, recorder.group(request_id), alone(backend, request))
    assert_nothing_left(engine)


def test_close_drops_requests_and_kept_sequences(backend: str) -> None:
    engine = build(backend)
    generate(engine, [Request([1, 2], SAMPLED, seed=0, keep=True)])
    engine.add(Request([1, 2], SAMPLED, seed=0))
    engine.step(wait=False)
    engine.close()
    assert_nothing_left(engine)


def test_engines_without_inflight_updates_refuse_them_while_requests_run() -> None:
    engine = build("hf")
    assert not engine.info.capabilities.inflight_updates
    request_id = engine.add(Request([1, 2], SAMPLED, seed=0))
    for _ in range(2):
        with pytest.raises(UserError, match="update weights"):
            engine.update_weights(policy("hf", seed=1), 1)
        engine.step(wait=False)
    assert set(run(engine).completions) == {(request_id, 0), (request_id, 1)} and engine.info.version == 0
    engine.update_weights(policy("hf", seed=1), 1)


def test_both_engines_give_the_same_samples_for_the_same_weights() -> None:
    requests = varied_requests()
    model = policy("native")
    for request, ours, theirs in zip(
        requests, generate(build("native"), requests), generate(build("hf"), requests), strict=True
    ):
        assert_same_draws(model, request, ours, theirs)


def test_generate_refuses_events_of_another_consumer(backend: str) -> None:
    engine = build(backend)
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=1), seed=0))
    with pytest.raises(RuntimeError, match="another consumer"):
        generate(engine, [Request([1, 2], SamplingParams(max_new_tokens=5), seed=0)])
    assert engine.step() == []
    assert_nothing_left(engine)
