"""Weight updates while requests run: versions of tokens, and log-probabilities with recomputed and with kept KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from event_parts import (
    GPU_LIKE,
    Recorder,
    add_all,
    assert_equal_completions,
    assert_nothing_left,
    native,
    run,
    run_slowly,
    varied_requests,
)
from inflight_parts import (
    Entries,
    MixedReference,
    Weights,
    assert_spans,
    decoder,
    groups_of,
    kept_logits,
    token_versions,
    trainer_logits,
)
from native_parts import Mode, assert_scores_of

from assay.engine import NativeEngine, Request, SamplingParams, generate
from assay.models.decoder import Decoder
from assay.models.logprobs import token_logprobs
from assay.types import Completion, UserError

MODES = {
    "chunks": Mode(max_batch=6, prefill_tokens=5),
    "windows": GPU_LIKE,
    "all at once": Mode(max_batch=6, prefill_tokens=7, window=3, ahead=1, cache=112),
}
# Iterations between two updates. (Sequences whose recomputation takes longer than that would never continue.)
EVERY = {"windows": 2, "all at once": 10}
KV = ("recompute", "keep")


TRANSFORMERS = 2e-5  # its rotary angles are float32
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}
VERSIONS = {version: version for version in range(6)}  # weights of the version, as seed of `decoder`


def update(engine: NativeEngine, version: int) -> None:
    engine.update_weights(decoder(version, engine.info.dtype), version)


def with_updates(engine: NativeEngine, requests: Sequence[Request], every: int) -> tuple[Recorder, list[int]]:
    """Serve requests; weights versions 1 to 5 come after every so many iterations."""
    recorder, ids = Recorder(), add_all(engine, requests)

    def between(iteration: int) -> None:
        version = engine.info.version + 1
        if iteration % every == every - 1 and version in VERSIONS:
            update(engine, version)
            assert engine.info.version == version

    run_slowly(engine, recorder, between)
    assert engine.info.version >= 2 and not recorder.errors
    return recorder, ids


def long_requests(stream: bool = False) -> list[Request]:
    return varied_requests(stream, max_new_tokens=60)


# -- versions


@pytest.mark.parametrize("kv", KV)
def test_spans_count_the_tokens_that_each_version_sampled(kv: str) -> None:
    """Where results are read after every step, chunks tell what was sampled before an update."""
    engine, recorder = native(decoder(0), Mode(max_batch=16), kv_on_update=kv), Recorder()
    requests = long_requests(stream=True)
    ids = add_all(engine, requests)
    seen: dict[tuple[int, int], list[int]] = {}

    def between(iteration: int) -> None:
        for request, request_id in zip(requests, ids, strict=True):
            for sample in range(request.params.n):
                versions = seen.setdefault((request_id, sample), [])
                versions += [engine.info.version] * (len(recorder.streamed(request_id, sample)[0]) - len(versions))
        if iteration % 4 == 3:
            update(engine, (iteration + 1) // 4 % 6)

    run_slowly(engine, recorder, between)
    for key, completion in recorder.completions.items():
        assert token_versions(completion) == seen[key]
        assert completion.version == seen[key][0]


@pytest.mark.parametrize(("kv", "window", "ahead"), [("recompute", 1, 0), ("keep", 4, 1)])
def test_versions_that_sampled_nothing_have_no_span(kv: str, window: int, ahead: int) -> None:
    mode = Mode(max_batch=4, window=window, ahead=ahead)
    engine, recorder = native(decoder(0), mode, kv_on_update=kv), Recorder()
    engine.add(Request([1, 2], SamplingParams(max_new_tokens=30), seed=0))
    for _ in range(3):
        recorder.record(engine.step(wait=False))
    for version in (1, 2, 3):
        update(engine, version)
    (completion,) = run(engine, recorder).completions.values()
    assert_spans(completion)
    assert [version for version, _ in completion.versions] == [0, 3]
    assert completion.versions[0][1] == 3 * window


def test_the_version_log_is_dropped_with_the_sequences_that_need_it() -> None:
    engine = native(decoder(0), kv_on_update="keep")
    for turn in range(30):
        engine.add(Request([1 + turn, 2], SamplingParams(max_new_tokens=20), seed=0))
        engine.step(wait=False)
        engine.update_weights(decoder(0), turn + 1)
        assert len(engine.outputs.versions.starts) <= 10, "more than the updates that a running sequence has seen"
    run(engine)
    assert len(engine.outputs.versions.starts) == 1


# -- recomputed KV


@pytest.mark.parametrize(("mode", "dtype"), [("windows", torch.float32), ("all at once", torch.float64)])
def test_log_probabilities_with_recomputed_kv_are_the_trainers_for_version_and_context(
    mode: str, dtype: torch.dtype
) -> None:
    engine, requests = native(decoder(0, dtype), MODES[mode], dtype=dtype), long_requests()
    recorder, ids = with_updates(engine, requests, EVERY[mode])
    models = {version: decoder(version, dtype) for version in VERSIONS}
    several = 0
    for request, _, completion in groups_of(requests, recorder.completions, ids):
        assert_spans(completion)
        several += len(completion.versions) > 2
        logits = trainer_logits({v: decoder(v) for v in VERSIONS}, request.prompt_ids, completion)
        assert_scores_of(logits, completion, request.params, 20 * TOLERANCES[dtype])
        for version in set(token_versions(completion)):
            assert_trainers_logprobs(models[version], version, request, completion, TOLERANCES[dtype])
    assert several >= 2
    if MODES[mode].cache:
        assert engine.stats.preemptions > 0
    assert_nothing_left(engine)


@torch.no_grad()
def assert_trainers_logprobs(
    model: Decoder, version: int, request: Request, completion: Completion, tolerance: float
) -> None:
    """By the function that the trainer's loss uses."""
    ids = torch.tensor([*request.prompt_ids, *completion.token_ids])
    own = torch.tensor([one == version for one in token_versions(completion)])
    chosen = torch.cat((torch.zeros(len(request.prompt_ids), dtype=torch.bool), own))
    logprobs, _ = token_logprobs(model, ids, [len(ids)], chosen, request.params.temperature or 1.0)
    ours = torch.tensor(completion.engine_logprobs, dtype=logprobs.dtype)[own]
    assert (logprobs - ours).abs().max() < tolerance


# -- kept KV


@pytest.mark.parametrize("mode", ["windows", "all at once"])
def test_log_probabilities_with_kept_kv_are_those_of_a_cache_from_several_versions(mode: str) -> None:
    engine, requests = native(decoder(0), MODES[mode], kv_on_update="keep"), long_requests()
    entries = Entries(engine)
    recorder, ids = with_updates(engine, requests, EVERY[mode])
    several = 0
    for request, key, completion in groups_of(requests, recorder.completions, ids):
        assert_spans(completion)
        several += len(completion.versions) > 2
        logits = kept_logits(request.prompt_ids, completion, entries.counts[key])
        assert_scores_of(logits, completion, request.params, TRANSFORMERS)
    assert several >= 2
    if MODES[mode].cache:
        assert any(len(counts) > 1 for counts in entries.counts.values())
    assert_nothing_left(engine)


def test_kept_and_recomputed_kv_differ_and_so_does_the_reference() -> None:
    """The tests above could not tell them apart if weights were too much alike."""
    request = Request(list(range(20)), SamplingParams(temperature=0.0, max_new_tokens=30), seed=0)
    completions = {}
    for kv in KV:
        engine, recorder = native(decoder(0), Mode(max_batch=2), kv_on_update=kv), Recorder()
        engine.add(request)
        for _ in range(10):
            recorder.record(engine.step(wait=False))
        update(engine, 1)
        (completions[kv],) = run(engine, recorder).completions.values()
        assert completions[kv].versions == ((0, 10), (1, 20))
    recomputed = trainer_logits({v: decoder(v) for v in (0, 1)}, request.prompt_ids, completions["keep"])
    kept = kept_logits(request.prompt_ids, completions["keep"])
    assert_scores_of(kept, completions["keep"], request.params, TRANSFORMERS)
    assert (kept - recomputed)[:10].abs().max() < TRANSFORMERS
    assert (kept - recomputed)[10:].abs().max(-1).values.min() > 1e-2
    assert completions["keep"].token_ids != completions["recompute"].token_ids


# -- prefixes of earlier weights


PROMPT = [(5 * place + 1) % 61 for place in range(27)]


FRESH: dict[tuple[int, str], list[Completion]] = {}


def fresh(version: int, request: Request) -> list[Completion]:
    """What an engine that never had other weights gives."""
    key = version, repr(request)
    if key not in FRESH:
        (FRESH[key],) = generate(native(decoder(version)), [request])
    return FRESH[key]


def assert_as_fresh(version: int, request: Request, group: Sequence[Completion]) -> None:
    expected = [replace(completion, version=version) for completion in fresh(version, request)]
    assert_equal_completions([replace(completion, handle=None) for completion in group], expected, 1e-9)


@pytest.mark.parametrize(("mode", "kv"), [("chunks", "keep"), ("windows", "recompute")])
def test_requests_added_after_an_update_never_use_prefixes_of_earlier_weights(mode: str, kv: str) -> None:
    engine, recorder = native(decoder(0), MODES[mode], kv_on_update=kv), Recorder()
    params = SamplingParams(n=2, max_new_tokens=30)
    before = engine.add(Request(PROMPT, params, seed=1))
    while not engine.scheduler.running:
        recorder.record(engine.step(wait=False))
    recorder.record(engine.step(wait=False))
    update(engine, 1)
    later = [
        Request(PROMPT, params, seed=2),
        Request([*PROMPT[:16], 3, 4], params, seed=3),
        Request(PROMPT[:17], params, 4),
    ]
    ids = add_all(engine, later)
    run(engine, recorder)
    assert {v for c in recorder.group(before) for v in token_versions(c)} == {0, 1}
    for request, request_id in zip(later, ids, strict=True):
        assert_as_fresh(1, request, recorder.group(request_id))
    # The running sequences have ended: what they left in the cache must not be found either.
    for request in (Request(PROMPT, params, seed=8), Request([*PROMPT, 5, 6], params, seed=9)):
        assert_as_fresh(1, request, generate(engine, [request])[0])
    whole = [*PROMPT, *recorder.group(before)[0].token_ids]
    request = Request(whole, SamplingParams(max_new_tokens=8), seed=10)
    assert_as_fresh(1, request, generate(engine, [request])[0])
    assert_nothing_left(engine)


@pytest.mark.parametrize(("kv", "iterations"), [("recompute", 1), ("keep", 3)])
def test_an_update_within_the_chunks_of_a_prompt_computes_the_prompt_again(kv: str, iterations: int) -> None:
    engine, recorder = native(decoder(0), Mode(max_batch=4, prefill_tokens=9), kv_on_update=kv), Recorder()
    request = Request([*PROMPT, *PROMPT], SamplingParams(n=3, max_new_tokens=10), seed=3)
    request_id = engine.add(request)
    for _ in range(iterations):
        recorder.record(engine.step(wait=False))
    assert not engine.scheduler.running and 0 < engine.scheduler.waiting[0].computed < 54
    update(engine, 1)
    assert_as_fresh(1, request, run(engine, recorder).group(request_id))
    assert_as_fresh(1, request, generate(engine, [request])[0])
    assert_nothing_left(engine)


@pytest.mark.parametrize("kv", KV)
def test_a_kept_sequence_continues_after_an_update_and_is_no_prefix_for_others(kv: str) -> None:
    engine = native(decoder(0), kv_on_update=kv)
    params = SamplingParams(max_new_tokens=20)
    ((first,),) = generate(engine, [Request(PROMPT, params, seed=1, keep=True)])
    update(engine, 1)
    ((second,),) = generate(engine, [Request([7, 8, 9], params, seed=2, continues=first.handle, keep=True)])
    assert second.versions == ((1, 20),)
    whole = [*PROMPT, *first.token_ids, 7, 8, 9]
    if kv == "recompute":
        assert_as_fresh(1, Request(whole, params, seed=2), [second])
    else:
        reference = MixedReference()
        reference.sample(PROMPT, first)
        assert_scores_of(reference.sample([first.token_ids[-1], 7, 8, 9], second), second, params, TRANSFORMERS)
    update(engine, 2)
    ((third,),) = generate(engine, [Request([4], params, seed=3, continues=second.handle)])
    longer = [*whole, *second.token_ids, 4]
    if kv == "recompute":
        assert_as_fresh(2, Request(longer, params, seed=3), [third])
    else:
        assert_scores_of(reference.sample([second.token_ids[-1], 4], third), third, params, TRANSFORMERS)
    for tokens in (PROMPT, whole, longer, [*longer, *third.token_ids]):
        request = Request(tokens, SamplingParams(max_new_tokens=5), seed=4)
        assert_as_fresh(2, request, generate(engine, [request])[0])
    assert_nothing_left(engine)


def test_a_kept_sequence_whose_sampling_saw_an_update_is_no_prefix_for_others() -> None:
    engine, recorder = native(decoder(0), Mode(max_batch=4), kv_on_update="keep"), Recorder()
    params = SamplingParams(max_new_tokens=24)
    engine.add(Request(PROMPT, params, seed=1, keep=True))
    for _ in range(9):
        recorder.record(engine.step(wait=False))
    update(engine, 1)
    (first,) = run(engine, recorder).completions.values()
    assert first.versions == ((0, 9), (1, 15))
    ((second,),) = generate(engine, [Request([7, 8, 9], params, seed=2, continues=first.handle)])
    reference = MixedReference()
    reference.sample(PROMPT, first)
    assert_scores_of(reference.sample([first.token_ids[-1], 7, 8, 9], second), second, params, TRANSFORMERS)
    whole = [*PROMPT, *first.token_ids, 7, 8, 9]
    for tokens in (PROMPT, whole, [*whole, *second.token_ids]):
        request = Request(tokens, SamplingParams(max_new_tokens=5), seed=4)
        assert_as_fresh(1, request, generate(engine, [request])[0])


@pytest.mark.parametrize("kv", KV)
def test_kept_sequences_whose_blocks_were_needed_are_computed_with_the_current_weights(kv: str) -> None:
    engine = native(decoder(0), Mode(max_batch=4, cache=96), kv_on_update=kv)
    params = SamplingParams(max_new_tokens=20)
    ((first,),) = generate(engine, [Request(PROMPT, params, seed=1, keep=True)])
    update(engine, 1)
    crowd = [Request([9 + place] * 12, SamplingParams(max_new_tokens=40), seed=place) for place in range(4)]
    generate(engine, crowd)
    assert not next(iter(engine.scheduler.kept.values())).blocks, "the cache was meant to be too small to keep it"
    request = Request([*PROMPT, *first.token_ids, 7], params, seed=2)
    assert_as_fresh(1, request, generate(engine, [Request([7], params, seed=2, continues=first.handle)])[0])
    # It was computed by one version: others may begin with it.
    engine.reset_stats()
    assert_as_fresh(1, request, generate(engine, [request])[0])
    assert engine.stats.prefill_tokens < len(request.prompt_ids)
    assert_nothing_left(engine)


# -- streaming, abort, errors


def test_no_event_follows_an_abort_right_after_an_update() -> None:
    """An update may read results whose events were not returned yet."""
    queued = 0
    for iterations in range(1, 14, 3):
        engine, recorder = native(decoder(0)), Recorder()
        ids = add_all(engine, [replace(r, keep=True) for r in varied_requests(stream=True, max_new_tokens=20)])
        for _ in range(iterations):
            recorder.record(engine.step(wait=False))
        update(engine, 1)
        queued += len(engine.outputs.events)
        engine.abort(ids)
        assert engine.step() == []
        engine.release([c.handle for c in recorder.completions.values() if c.handle is not None])
        assert_nothing_left(engine)
    assert queued


@pytest.mark.parametrize(("source", "kv"), [({"rename": 9}, "recompute"), ({"fail_after": 9}, "keep")], ids=str)
def test_after_an_update_that_failed_midway_the_next_one_sets_all_weights(source: dict[str, int], kv: str) -> None:
    engine, recorder = native(decoder(0), kv_on_update=kv), Recorder()
    add_all(engine, long_requests())
    for _ in range(5):
        recorder.record(engine.step(wait=False))
    with pytest.raises((UserError, ConnectionError)):
        engine.update_weights(Weights(decoder(1), **source), 1)
    assert engine.info.version == 0
    generate_after = Request(PROMPT, SamplingParams(n=2, max_new_tokens=20), seed=5)
    run(engine, recorder)
    generate(engine, [generate_after])
    update(engine, 2)
    assert engine.fingerprint() == native(decoder(2)).fingerprint()
    assert_as_fresh(2, generate_after, generate(engine, [generate_after])[0])
    assert_nothing_left(engine)
