"""Completions and streams from sampled tokens; stop strings; state after errors."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
from engine_parts import small_decoder
from native_parts import (
    MODES,
    SPECS,
    Consumer,
    Mode,
    assert_same_groups,
    assert_scores,
    engine_for,
    idle,
    mixed_prompts,
    mixed_requests,
    requests_for,
    words,
)

from assay.engine import Request, SamplingParams, generate
from assay.models.decoder import Decoder
from assay.types import Finish

WIDE = Mode(max_batch=7, window=8, ahead=1)
WAYS = {"plain": MODES["plain"], "wide windows": WIDE, "all at once": MODES["all at once"]}


@functools.cache
def model() -> Decoder:
    return small_decoder(SPECS["qwen3"], seed=21)


@pytest.mark.parametrize("mode", WAYS)
def test_streamed_tokens_are_complete_and_in_order(mode: str) -> None:
    params = SamplingParams(n=2, max_new_tokens=40, stop_token_ids=(1, 2, 3))
    requests = mixed_requests(params, seed=3)[:6]
    requests[0] = replace(requests[0], params=replace(requests[0].params, stop=("x", "yz")))
    engine = engine_for(model(), WAYS[mode], decode=words)
    quiet = generate(engine, requests)
    consumer = Consumer(engine, on_token=lambda request, sample, token: None)
    consumer.run(requests)
    groups = consumer.groups()
    assert_same_groups(model(), requests, groups, quiet)
    every = {(r, s): completion for r, group in enumerate(groups) for s, completion in enumerate(group)}
    assert consumer.tokens == {key: completion.token_ids for key, completion in every.items()}
    assert consumer.logprobs == {key: completion.engine_logprobs for key, completion in every.items()}
    assert list(consumer.finished) != sorted(consumer.finished)  # in the order in which they finish
    assert (engine.stats.preemptions > 0) == (mode == "all at once")


def test_chunks_arrive_while_other_samples_are_running() -> None:
    order: list[str] = []
    engine = engine_for(model(), Mode(max_batch=2))
    limits = [Request([i], SamplingParams(max_new_tokens=5), seed=i) for i in range(4)]
    Consumer(
        engine,
        on_token=lambda request, sample, token: order.append(f"token of {request}"),
        on_finish=lambda request, sample, completion: order.append(f"end of {request}"),
    ).run(limits)
    first = order.index("end of 0")
    assert order[:4] == ["token of 0", "token of 1"] * 2
    assert "token of 2" not in order[:first] and "token of 2" in order[first:]


@pytest.mark.parametrize("mode", WAYS)
def test_completion_ends_with_the_token_that_completes_a_stop_string(mode: str) -> None:
    """Also inside a window, when the device has already continued."""
    plain = SamplingParams(n=2, max_new_tokens=30)
    engine = engine_for(model(), WAYS[mode], decode=words)
    requests = requests_for(mixed_prompts(seed=2)[2:10], plain)
    free = generate(engine, requests)
    ends = [5 + 2 * i for i in range(len(requests))]  # where the first sample should stop
    wanted = [words(group[0].token_ids[end - 3 : end]) for group, end in zip(free, ends, strict=True)]
    stopping = [
        replace(request, params=replace(plain, stop=("no such thing", text)), keep=True)
        for request, text in zip(requests, wanted, strict=True)
    ]
    for i in (1, 3):
        stopping[i] = replace(requests[i], keep=True)  # some requests have no stop strings
    groups = generate(engine, stopping)
    for request, group, without in zip(stopping, groups, free, strict=True):
        for completion, whole in zip(group, without, strict=True):
            text, stops = words(whole.token_ids), request.params.stop
            end = text.index(stops[1]) + 3 if stops and stops[1] in text else 30
            assert completion.token_ids == whole.token_ids[:end]
            assert completion.finish is (Finish.STOP if end < 30 or text.endswith(stops or ("?",)) else Finish.LENGTH)
            assert_scores(model(), request.prompt_ids, completion, request.params)
    assert sum(completion.finish is Finish.STOP for group in groups for completion in group) >= 6
    if mode == "wide windows":
        assert engine.stats.windows < engine.stats.decode_steps
    # Tokens that the device sampled after the end are not part of the sequence.
    more = [Request([9, 9, 9], plain, seed=5, continues=group[0].handle) for group in groups]
    fresh = engine_for(model(), decode=words)
    whole_lists = [[*r.prompt_ids, *g[0].token_ids, 9, 9, 9] for r, g in zip(stopping, groups, strict=True)]
    lists = [Request(ids, plain, seed=5) for ids in whole_lists]
    assert_same_groups(model(), lists, generate(engine, more), generate(fresh, lists))


def test_device_error_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a window: some of its steps were taken but not recorded."""
    requests = mixed_requests(SamplingParams(max_new_tokens=30, stop_token_ids=(1, 2, 3)), seed=5)[3:9]
    engine = engine_for(model(), WIDE)
    step, calls = engine.runner._step, itertools.count()

    def fail(size: int, span: int) -> None:
        if next(calls) == 13:
            raise MemoryError("out of memory")
        step(size, span)

    monkeypatch.setattr(engine.runner, "_step", fail)
    with pytest.raises(MemoryError, match="out of memory"):
        generate(engine, requests)
    assert idle(engine)
    assert_same_groups(model(), requests, generate(engine, requests), generate(engine_for(model()), requests))


# -- the parts, without an engine
