"""Continuation by handle, compared with a new engine that gets all tokens as a prompt."""

from __future__ import annotations

import functools
import random

import pytest
from engine_parts import assert_same_tokens, small_decoder
from native_parts import (
    MODES,
    SPECS,
    Mode,
    assert_same_draws,
    assert_scores,
    engine_for,
    idle,
    mixed_prompts,
    requests_for,
    served,
    words,
)

from assay.engine import NativeEngine, Request, SamplingParams, generate
from assay.models.decoder import Decoder
from assay.types import Completion, Finish

WAYS = {
    "plain": Mode(),
    "windows": Mode(max_batch=5, window=4, ahead=1, cache=1280),
    "all at once": MODES["all at once"],
}


@functools.cache
def model() -> Decoder:
    return small_decoder(SPECS["qwen3"], seed=21)


@functools.cache
def fresh() -> NativeEngine:
    return engine_for(model(), decode=words)


def assert_as_fresh(before: list[int], request: Request, group: list[Completion]) -> None:
    """`before`: all tokens before the completions."""
    fresh().reset_prefix_cache()
    whole = Request(before, request.params, request.seed)
    assert_same_draws(model(), whole, group, generate(fresh(), [whole])[0])
    for completion in group:
        assert_scores(model(), before, completion, request.params)


@pytest.mark.parametrize("mode", WAYS)
def test_continuations_equal_whole_prompts(mode: str) -> None:
    """Ended by their limit, by a stop token or by a stop string; greedy or not."""
    draw = random.Random(1)
    engine = engine_for(model(), WAYS[mode], decode=words)
    kinds = [
        SamplingParams(temperature=0.0, max_new_tokens=7),
        SamplingParams(max_new_tokens=16),
        SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(12))),
        SamplingParams(max_new_tokens=20, stop=tuple(words([i]) for i in range(20, 30))),
    ]
    sequences = [list(prompt) for prompt in mixed_prompts(seed=1)[5:9]]
    requests = [Request(ids, kinds[i % 4], seed=i, keep=True) for i, ids in enumerate(sequences)]
    finishes = set()
    for turn in range(4):
        engine.reset_stats()
        groups = generate(engine, requests)
        if turn > 0 and mode != "all at once":  # only new tokens and the last sampled one are computed
            assert engine.stats.prefill_tokens == sum(len(request.prompt_ids) + 1 for request in requests)
        for i, (request, group) in enumerate(zip(requests, groups, strict=True)):
            assert_as_fresh(sequences[i], request, group)
            finishes.add(group[0].finish)
            more = draw.choices(range(61), k=draw.choice((0, 1, 4)) if turn else 0)
            sequences[i] += [*group[0].token_ids, *more]
            requests[i] = Request(more, kinds[i % 4], seed=10 * turn + i, keep=True, continues=group[0].handle)
    assert finishes == {Finish.LENGTH, Finish.STOP}
    assert len(engine.scheduler.kept) == 4
    engine.release(request.continues for request in requests if request.continues is not None)
    assert idle(engine) and not engine.scheduler.kept


@pytest.mark.parametrize("mode", WAYS)
def test_one_kept_sequence_continues_with_several_samples(mode: str) -> None:
    engine = engine_for(model(), WAYS[mode])
    prompts = mixed_prompts(seed=2)[4:8]
    params = SamplingParams(n=3, max_new_tokens=20)
    first = generate(engine, requests_for(prompts, params, keep=True))
    handles = [completion.handle for group in first for completion in group]
    assert None not in handles and len(set(handles)) == 12
    engine.reset_stats()
    before = [
        [*prompt, *completion.token_ids] for prompt, group in zip(prompts, first, strict=True) for completion in group
    ]
    # All samples of a group, in another order, each with several continuations.
    requests = [Request([i], params, seed=i, continues=handle) for i, handle in enumerate(handles)][::-1]
    groups = generate(engine, requests)
    assert (engine.stats.preemptions > 0) == (mode == "all at once")
    if mode != "all at once":
        assert engine.stats.prefill_tokens == 2 * 12
    for request, group, ids in zip(requests, groups, before[::-1], strict=True):
        assert_as_fresh([*ids, *request.prompt_ids], request, group)
    assert idle(engine)


def test_empty_continuation_resumes_after_the_token_limit() -> None:
    for mode in WAYS.values():
        engine = engine_for(model(), mode)
        for prompt in mixed_prompts(seed=3)[:9:2]:
            greedy = SamplingParams(temperature=0.0, max_new_tokens=8)
            (whole,) = generate(engine, [Request(prompt, SamplingParams(temperature=0.0, max_new_tokens=24), seed=0)])[
                0
            ]
            (part,) = generate(engine, [Request(prompt, greedy, seed=0, keep=True)])[0]
            written = list(part.token_ids)
            for _ in range(2):
                engine.reset_stats()
                (part,) = generate(engine, [Request([], greedy, seed=0, keep=True, continues=part.handle)])[0]
                assert engine.stats.prefill_tokens == 1
                written += part.token_ids
            assert_same_tokens(model(), prompt, written, whole.token_ids)


def kept_with_blocks(engine: NativeEngine) -> tuple[list[int], Completion]:
    prompt = mixed_prompts(seed=4)[-1]
    (completion,) = generate(engine, [Request(prompt, SamplingParams(max_new_tokens=12), seed=0, keep=True)])[0]
    assert completion.handle is not None and engine.scheduler.kept[completion.handle].blocks
    return [*prompt, *completion.token_ids], completion


def test_evicted_kept_blocks_are_recomputed() -> None:
    engine = engine_for(model(), Mode(max_batch=4, cache=128))
    before, completion = kept_with_blocks(engine)
    params = SamplingParams(max_new_tokens=60)
    others = requests_for(mixed_prompts(seed=5)[:6], params)
    for request, group in zip(others, generate(engine, others), strict=True):
        assert_scores(model(), request.prompt_ids, group[0], params)
    assert completion.handle is not None and not engine.scheduler.kept[completion.handle].blocks
    engine.reset_stats()
    request = Request([1, 2], SamplingParams(n=2, max_new_tokens=9), seed=3, continues=completion.handle)
    assert_as_fresh([*before, 1, 2], request, generate(engine, [request])[0])
    assert engine.stats.prefill_tokens == len(before) + 2


def test_reset_prefix_cache_recomputes_kept_sequences() -> None:
    engine = engine_for(model())
    before, completion = kept_with_blocks(engine)
    engine.reset_prefix_cache()
    assert idle(engine)
    engine.reset_stats()
    request = Request([1], SamplingParams(max_new_tokens=9), seed=3, continues=completion.handle)
    assert_as_fresh([*before, 1], request, generate(engine, [request])[0])
    assert engine.stats.prefill_tokens == len(before) + 1


def test_invalid_continuation_leaves_its_handle_usable() -> None:
    engine = engine_for(model())
    before, completion = kept_with_blocks(engine)
    for ids in ([1] * 96, [61]):
        assert served(engine, [Request(ids, SamplingParams(), seed=0, continues=completion.handle)])[1]
    request = Request([7], SamplingParams(max_new_tokens=5), seed=0, continues=completion.handle)
    assert_as_fresh([*before, 7], request, generate(engine, [request])[0])
