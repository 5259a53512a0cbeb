"""`generate` and the engine interface, for the native and the hf engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from event_parts import (
    BACKENDS,
    GPU_LIKE,
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
from native_parts import Mode, assert_same_draws, words
from torch import Tensor

from assay.engine import Failed, Finished, Request, RequestError, SamplingParams, TokenChunk, generate
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.types import Completion, Finish, UserError

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


def test_generate_without_requests_returns_nothing_and_step_without_requests_is_empty(backend: str) -> None:
    engine = build(backend)
    assert generate(engine, []) == []
    assert engine.step() == [] and engine.step(wait=False) == []


def test_step_without_wait_returns_after_one_iteration(backend: str) -> None:
    engine = build(backend)
    request_id = engine.add(Request([1, 2, 3], SamplingParams(max_new_tokens=20), seed=3))
    recorder, empty = Recorder(), 0
    for _ in range(1000):
        events = engine.step(wait=False)
        recorder.record(events)
        empty += not events
        if recorder.completions:
            break
    assert empty >= 5, "most iterations of a request that does not stream finish nothing"
    assert_equal_completions(
        recorder.group(request_id), alone(backend, Request([1, 2, 3], SamplingParams(max_new_tokens=20), seed=3))
    )
    assert engine.step() == []


# -- requests that cannot be served


def invalid_requests(max_length: int) -> dict[str, Request]:
    plain = SamplingParams(max_new_tokens=4)
    return {
        "the prompt is empty": Request([], plain, seed=0),
        "outside the vocabulary": Request([1, 61], plain, seed=0),
        "shorten the prompt": Request([1] * max_length, plain, seed=0),
        "samples must be at least 1": Request([1], replace(plain, n=0), seed=0),
        "cannot be continued": Request([1], plain, seed=0, continues=12345),
    }


def test_an_invalid_request_yields_one_failed_event_and_does_not_affect_others(backend: str) -> None:
    model, valid = policy(backend), varied_requests()
    engine = build(backend, model)
    invalid = invalid_requests(engine.info.max_length)
    mixed = list(itertools.chain(*itertools.zip_longest(valid, invalid.values())))
    ids = {id(request): engine.add(request) for request in mixed if request is not None}
    recorder = run(engine)
    for message, request in invalid.items():
        error = recorder.errors[ids[id(request)]]
        assert message in error and "\n" not in error
        assert not recorder.tokens(ids[id(request)])
    assert len(recorder.errors) == len(invalid)
    for request in valid:
        assert_same_draws(model, request, recorder.group(ids[id(request)]), alone(backend, request))
    assert_nothing_left(engine)


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


def test_request_error_names_the_requests_that_failed_after_all_others_were_served(backend: str) -> None:
    engine = build(backend)
    good, bad = Request([1, 2], SAMPLED, seed=0), Request([], SAMPLED, seed=0, name="empty one")
    with pytest.raises(RequestError, match=r"'empty one'.*1 more") as caught:
        generate(engine, [good, bad, good, replace(bad, name="second")])
    assert sorted(caught.value.errors) == [1, 3] and isinstance(caught.value, UserError)
    assert_nothing_left(engine)


def test_sequences_kept_by_a_generate_that_raises_are_released(backend: str) -> None:
    """The caller never learns their handles."""
    engine = build(backend)
    with pytest.raises(RequestError):
        generate(engine, [Request([1, 2], SAMPLED, seed=0, keep=True), Request([], SAMPLED, seed=0)])
    assert_nothing_left(engine)


class Poisoned:
    """Weights of a model, with not-a-number in the embeddings of some tokens (None: of all)."""

    def __init__(self, model: PolicyModel, tokens: Sequence[int] | None) -> None:
        self.model, self.tokens = model, tokens

    def weights(self) -> Any:
        for name, weight in self.model.weights():
            yield name, self._poison(weight) if "embed_tokens" in name else weight

    def _poison(self, weight: Tensor) -> Tensor:
        broken = weight.detach().clone()
        broken[slice(None) if self.tokens is None else list(self.tokens)] = float("nan")
        return broken


def test_weights_that_are_not_numbers_fail_every_request_once(backend: str) -> None:
    model = policy(backend)
    engine = build(backend, model, Mode(max_batch=3))
    engine.update_weights(Poisoned(model, None), 1)
    ids = add_all(engine, varied_requests(stream=True))
    recorder = run(engine)
    assert sorted(recorder.errors) == sorted(ids) and not recorder.completions and not recorder.chunks
    assert all("not numbers" in error for error in recorder.errors.values())
    assert_nothing_left(engine)
    engine.update_weights(model, 2)
    groups = generate(engine, varied_requests())
    for request, group in zip(varied_requests(), groups, strict=True):
        assert_same_draws(model, request, group, alone(backend, request))


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_request_whose_numbers_break_midway_fails_and_others_are_served(backend: str, stream: bool) -> None:
    model, requests = policy(backend), varied_requests(stream)
    expected = [alone(backend, request) for request in requests]
    token = expected[0][1].token_ids[4]
    engine = build(backend, model, Mode(max_batch=5))
    engine.update_weights(Poisoned(model, [token]), 0)
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
        for sample in range(request.params.n) if stream else ():
            streamed = recorder.streamed(request_id, sample)[0]
            assert streamed == group[sample].token_ids[: len(streamed)]
    assert_nothing_left(engine)


# -- abort


def test_abort_before_the_first_step(backend: str) -> None:
    model, requests = policy(backend), varied_requests()
    engine = build(backend, model)
    ids = add_all(engine, requests)
    engine.abort([ids[0], (ids[2], 0), ids[4]])
    recorder = run(engine)
    assert set(recorder.completions) == {
        (request_id, sample)
        for place, (request_id, request) in enumerate(zip(ids, requests, strict=True))
        for sample in range(request.params.n)
        if place not in (0, 4) and (place, sample) != (2, 0)
    }
    assert not recorder.errors
    assert_same_draws(model, requests[1], recorder.group(ids[1]), alone(backend, requests[1]))
    assert recorder.tokens(ids[2]) == [alone(backend, requests[2])[1].token_ids]
    assert_nothing_left(engine)


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


def test_naming_a_sample_twice_in_abort_drops_it_once(backend: str) -> None:
    engine = build(backend)
    request_id = engine.add(Request([1, 2, 3], SamplingParams(n=3, max_new_tokens=30), seed=0))
    engine.step(wait=False)
    engine.abort([(request_id, 0), (request_id, 0)])
    engine.abort([(request_id, 0)])
    assert set(run(engine).completions) == {(request_id, 1), (request_id, 2)}
    both = engine.add(Request([1, 2, 3], SamplingParams(n=2, max_new_tokens=30), seed=0))
    engine.step(wait=False)
    engine.abort([both, (both, 1), (both, 0)])
    assert engine.step() == []
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
    while not engine.scheduler.preemptions:
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


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("native", "windows"),
        ("native", "small cache"),
        ("hf", "plain"),
    ],
)
def test_chunks_concatenated_equal_the_completion(backend: str, mode: str) -> None:
    modes = {"plain": Mode(max_batch=4), "windows": GPU_LIKE, "small cache": SMALL_CACHE}
    requests = varied_requests(stream=True, max_new_tokens=24 if backend == "hf" else 40)
    engine = build(backend, mode=modes[mode])
    ids = add_all(engine, requests)
    recorder = run(engine)
    for request_id, request in zip(ids, requests, strict=True):
        for sample, completion in enumerate(recorder.group(request_id)):
            tokens, logprobs = recorder.streamed(request_id, sample)
            assert tokens == completion.token_ids and logprobs == completion.engine_logprobs
            assert all(chunk.token_ids for chunk in recorder.chunks[request_id, sample])
        quiet = alone(backend, request)
        assert recorder.tokens(request_id) == [completion.token_ids for completion in quiet]
    if mode == "small cache":
        assert engine.scheduler.preemptions > 0  # type: ignore[attr-defined]
    stopped = [c for i in (3, 5) for c in recorder.group(ids[i]) if c.finish is Finish.STOP]
    assert stopped and all(words(c.token_ids[-1:]) in "adhmqkso" for c in stopped)
    assert_nothing_left(engine)


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


def test_an_exception_in_the_consumer_of_a_generate_leaves_the_engine_usable(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests are aborted; another caller's next ones are served."""
    engine = build(backend)
    step = engine.step

    def interrupted(wait: bool = True) -> Any:
        events = step(wait)
        if any(isinstance(event, Finished) for event in events):
            raise KeyboardInterrupt
        return events

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, varied_requests())
    monkeypatch.undo()
    assert engine.step() == []
    assert_nothing_left(engine)
    assert_equal_completions(
        generate(engine, varied_requests()[:1])[0], generate(build(backend), varied_requests()[:1])[0]
    )


def test_an_exception_while_requests_are_added_aborts_those_already_added(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, requests = build(backend), varied_requests()
    add = engine.add

    def interrupted(request: Request) -> int:
        if request is requests[3]:
            raise KeyboardInterrupt
        return add(request)

    monkeypatch.setattr(engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, requests)
    assert engine.step() == []
    assert_nothing_left(engine)


def test_generate_refuses_events_of_another_consumer(backend: str) -> None:
    engine = build(backend)
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=1), seed=0))
    with pytest.raises(RuntimeError, match="another consumer"):
        generate(engine, [Request([1, 2], SamplingParams(max_new_tokens=5), seed=0)])
    assert engine.step() == []
    assert_nothing_left(engine)
