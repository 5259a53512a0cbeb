"""The engine interface and weight updates while requests run, on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_parts import small_spec
from event_parts import Recorder, add_all, assert_nothing_left, run, run_slowly
from inflight_parts import (
    Entries,
    assert_same_up_to_ties,
    assert_spans,
    decoder,
    groups_of,
    kept_logits,
    trainer_logits,
)
from native_parts import assert_scores_of, memory_of, words

from assay.engine import NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.sequence import BLOCK_SIZE
from assay.models.decoder import Decoder
from assay.models.spec import ModelSpec
from assay.types import Completion, UserError

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPEC = small_spec("llama", layers=2, head_dim=64, max_length=160)
VERSIONS = range(5)
KV = ("recompute", "keep")
# Errors of logits, and of cumulative probabilities, that the number format accounts for.
TIES = {torch.float32: 2e-3, torch.bfloat16: 0.1}
FLOAT32 = 2e-3  # of log-probabilities, against float64


def native(
    model: Decoder, dtype: torch.dtype = torch.float32, kv: str = "recompute", cache: int = 0, **options: Any
) -> NativeEngine:
    """`cache`: tokens that the KV cache holds."""
    blocks = cache // BLOCK_SIZE
    memory = memory_of(model.spec, blocks, dtype) * (1 + 1e-9)
    engine = make_engine(
        *("native", model),
        device=DEVICE,
        dtype=dtype,
        kv_cache_gib=options.pop("kv_cache_gib", memory),
        decode=words,
        kv_on_update=kv,  # type: ignore[arg-type]
        **{"max_batch": 16, **options},
    )
    assert isinstance(engine, NativeEngine) and blocks in (0, engine.blocks.total)
    return engine


def weights(version: int, spec: ModelSpec = SPEC) -> Decoder:
    return decoder(version, torch.float32, spec)


def models() -> dict[int, Decoder]:
    return {version: decoder(version, torch.float64, SPEC) for version in VERSIONS}


def asked(stream: bool = False, tokens: int = 60) -> list[Request]:
    plain = SamplingParams(n=3, max_new_tokens=tokens)
    kinds = [
        plain,
        replace(plain, temperature=0.0, n=1),
        replace(plain, temperature=0.8, top_k=9, top_p=0.9, stop_token_ids=(3, 5)),
        replace(plain, stop=("a", "k", "zz")),
        replace(plain, min_p=0.1, forbidden_token_ids=(1, 2), min_new_tokens=9, stop_token_ids=(8, 9)),
    ]
    prompts = [[(7 * i + 3 * j) % 61 for j in range(5 + 9 * i)] for i in range(5)]
    pairs = zip(prompts, kinds, strict=True)
    return [Request(prompt, params, seed=50 + i, stream=stream) for i, (prompt, params) in enumerate(pairs)]


def assert_same_samples(
    requests: Sequence[Request], ours: Sequence[Sequence[Completion]], theirs: Any, version: int = 0
) -> None:
    model = decoder(version, torch.float64, SPEC)
    for request, group, others in zip(requests, ours, theirs, strict=True):
        for sample, (a, b) in enumerate(zip(group, others, strict=True)):
            assert_same_up_to_ties(model, request, sample, a.token_ids, b.token_ids, TIES[torch.float32])


# -- requests


def test_an_interrupted_step_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = native(weights(0))
    expected = generate(engine, asked())
    for method in ("decode", "compute", "arrange"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, method, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                generate(engine, [replace(r, prompt_ids=[9, *r.prompt_ids]) for r in asked()])
        assert_nothing_left(engine)
        assert_same_samples(asked(), generate(engine, asked()), expected)


def test_scores_are_log_probabilities_of_the_trainer_and_invalid_tokens_never_reach_the_device() -> None:
    engine = native(weights(0), prefill_tokens=64)
    recorder, ids = Recorder(), add_all(engine, asked())
    recorder.record(engine.step(wait=False))
    sequences = [[(3 * i + 5 * j) % 61 for j in range(length)] for i, length in enumerate((2, 150, 1, 33, 64))]
    for temperature in (1.0, 0.7):
        for ids_, scores in zip(sequences, engine.score(sequences, temperature), strict=True):
            model = decoder(0, torch.float64, SPEC)
            with torch.no_grad():
                logits = model.unembed(model.hidden(torch.tensor(ids_), [len(ids_)]))[:-1] / temperature
            expected = logits.log_softmax(-1).gather(1, torch.tensor(ids_[1:], dtype=torch.int64)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(scores, dtype=torch.float64), expected, rtol=0, atol=FLOAT32)
    with pytest.raises(UserError, match="vocabulary"):
        engine.score([[1, 61]])
    run(engine, recorder)
    groups = [recorder.group(request_id) for request_id in ids]
    assert_same_samples(asked(), groups, generate(native(weights(0)), asked()))


# -- weight updates while requests run


def with_updates(engine: NativeEngine, requests: Sequence[Request], last: int) -> tuple[Recorder, list[int]]:
    """Weights versions 1 .. `last` come after every few iterations; version 0 is served first."""
    recorder, ids = Recorder(), add_all(engine, requests)

    def between(iteration: int) -> None:
        if iteration % 4 == 3 and engine.info.version < last:
            engine.update_weights(weights(engine.info.version + 1), engine.info.version + 1)

    run_slowly(engine, recorder, between)
    assert engine.info.version == last
    return recorder, ids


def test_an_update_with_identical_weights_and_kept_kv_changes_no_token() -> None:
    results = []
    for updates in (False, True):
        engine, recorder = native(weights(0), torch.bfloat16, kv="keep"), Recorder()
        ids = add_all(engine, asked())

        def between(iteration: int, engine: NativeEngine = engine, updates: bool = updates) -> None:
            if updates:
                engine.update_weights(weights(0), iteration + 1)

        run_slowly(engine, recorder, between)
        results.append([[(c.token_ids, c.engine_logprobs) for c in recorder.group(request_id)] for request_id in ids])
    assert results[0] == results[1]
    assert all(len(c.versions) > 3 for c in recorder.group(ids[0]))


@pytest.mark.parametrize("dtype", TIES, ids=str)
def test_an_update_with_identical_weights_and_recomputed_kv_changes_no_token_but_at_ties(dtype: torch.dtype) -> None:
    expected = generate(native(weights(0), dtype), asked())
    engine, recorder = native(weights(0), dtype), Recorder()
    ids = add_all(engine, asked())
    run_slowly(engine, recorder, lambda iteration: iteration % 4 or engine.update_weights(weights(0), iteration + 1))
    served = Decoder(SPEC)
    served.load_state_dict({name: weight.to(dtype) for name, weight in weights(0).state_dict().items()})
    served.double()
    for request, request_id, group in zip(asked(), ids, expected, strict=True):
        for sample, (ours, theirs) in enumerate(zip(recorder.group(request_id), group, strict=True)):
            assert_spans(ours)
            assert_same_up_to_ties(served, request, sample, ours.token_ids, theirs.token_ids, TIES[dtype])
    assert_nothing_left(engine)


@pytest.mark.parametrize("cache", [0, 176])
def test_log_probabilities_with_recomputed_kv_are_the_trainers_for_version_and_context(cache: int) -> None:
    engine, requests = native(weights(0), cache=cache), asked()
    recorder, ids = with_updates(engine, requests, last=4)
    for request, _, completion in groups_of(requests, recorder.completions, ids):
        assert_spans(completion)
        assert_scores(trainer_logits(models(), request.prompt_ids, completion), completion, request)
    assert sum(len(completion.versions) > 2 for completion in recorder.completions.values()) >= 3
    assert not cache or engine.stats.preemptions > 0
    assert_nothing_left(engine)


@pytest.mark.parametrize("cache", [0, 176])
def test_log_probabilities_with_kept_kv_are_those_of_a_cache_from_several_versions(cache: int) -> None:
    engine, requests = native(weights(0), kv="keep", cache=cache), asked()
    entries = Entries(engine)
    recorder, ids = with_updates(engine, requests, last=4)
    for request, key, completion in groups_of(requests, recorder.completions, ids):
        assert_spans(completion)
        logits = kept_logits(request.prompt_ids, completion, entries.counts[key], SPEC)
        assert_scores(logits, completion, request)
    assert sum(len(completion.versions) > 2 for completion in recorder.completions.values()) >= 3
    assert not cache or engine.stats.preemptions > 0
    assert_nothing_left(engine)


def assert_scores(logits: torch.Tensor, completion: Completion, request: Request) -> None:
    """What truncation keeps may differ at its border: with truncation only log-probabilities are compared."""
    params = request.params
    if not params.truncates:
        assert_scores_of(logits, completion, params, FLOAT32)
        return
    logprobs = (logits / params.temperature).log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.engine_logprobs, dtype=torch.float64), expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("kv", KV)
def test_weights_are_updated_while_the_engine_sleeps_and_between_sleeps(kv: str) -> None:
    engine = native(weights(0), kv=kv, sleep_while_training=True, kv_cache_gib=1.0)
    kept = SamplingParams(max_new_tokens=20)
    for version in VERSIONS[1:]:
        ((first,),) = generate(engine, [Request([1, 2, 3], kept, seed=1, keep=True)])
        engine.sleep()
        engine.update_weights(weights(version), version)
        if version % 2:
            engine.wake()
        more = Request([5, 6], kept, seed=2, continues=first.handle)
        whole = Request([1, 2, 3, *first.token_ids, 5, 6], kept, seed=2)
        # The memory of the kept sequence was given away: it is computed again, with the new weights.
        fresh = native(weights(version))
        assert_same_samples([whole], generate(engine, [more]), generate(fresh, [whole]), version)
        recorder, ids = Recorder(), add_all(engine, asked())
        recorder.record(engine.step(wait=False))
        with pytest.raises(UserError, match="sleep"):
            engine.sleep()
        run(engine, recorder)
        groups = [recorder.group(request_id) for request_id in ids]
        assert_same_samples(asked(), groups, generate(fresh, asked()), version)
    engine.close()
