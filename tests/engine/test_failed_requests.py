"""Invalid requests and requests with NaN logits fail by name; other requests are not affected."""

from __future__ import annotations

import functools
import random
import re
from typing import Any

import pytest
from engine_parts import small_decoder, small_spec
from native_parts import (
    MODES,
    Consumer,
    Mode,
    Weights,
    assert_same_groups,
    engine_for,
    idle,
    mixed_prompts,
    requests_for,
    served,
    words,
)
from torch import Tensor

from assay.engine import NativeEngine, Request, RequestError, SamplingParams, generate
from assay.engine.sequence import STOP_SLOTS
from assay.models.decoder import Decoder

WAYS = {"plain": Mode(), "all at once": MODES["all at once"]}
ODD = 60  # the token whose embedding is NaN


@functools.cache
def model() -> Decoder:
    return small_decoder(small_spec(tied=False), seed=21)


BAD: dict[str, tuple[list[int], dict[str, Any], str]] = {
    "empty prompt": ([], {}, r"the prompt is empty \(0 tokens; the context has 81\)"),
    "long prompt": ([1] * 81, {}, "the prompt has 81 tokens, and the context has 81 .*engine.kv_cache_gib"),
    "stop strings": ([1], {"stop": ("a",)}, "stop strings need an engine with a"),
    "everything": ([1], {"forbidden_token_ids": tuple(range(61))}, "every token of the vocabulary is forbidden"),
}


def test_invalid_requests_fail_by_name_and_others_finish() -> None:
    good = requests_for(mixed_prompts(seed=1), SamplingParams(n=2, max_new_tokens=10, stop_token_ids=(1, 2)))
    engine = engine_for(model(), Mode(max_batch=6, cache=80))
    expected = generate(engine, good)
    bad = [Request(prompt, SamplingParams(**params), seed=0, name=name) for name, (prompt, params, _) in BAD.items()]
    order = random.Random(1).sample(range(len(good) + len(bad)), len(good) + len(bad))
    mixed = [(*good, *bad)[i] for i in order]
    with pytest.raises(RequestError) as caught:
        generate(engine, mixed)
    error = caught.value
    places = {request.name: place for place, request in enumerate(mixed)}
    assert set(error.errors) == {places[name] for name in BAD}
    for name, (_, _, message) in BAD.items():
        assert re.match(f"request '{name}': .*{message}", error.errors[places[name]])
    assert str(error) == f"{error.errors[min(error.errors)]} ({len(BAD) - 1} more requests failed)"
    groups, errors = served(engine, mixed)
    assert errors == error.errors
    assert [groups[places[name]] for name in BAD] == [[]] * len(BAD)
    assert_same_groups(model(), good, [groups[places[request.name]] for request in good], expected)
    assert_same_groups(model(), good, generate(engine, good), expected)
    assert idle(engine)


def test_requests_at_the_limits_are_served() -> None:
    engine = engine_for(model(), Mode(cache=80))
    requests = [
        Request([1] * 40, SamplingParams(max_new_tokens=90), seed=0),  # truncated; the last token is not stored
        Request([1] * 80, SamplingParams(max_new_tokens=1), seed=0),
        Request([1], SamplingParams(forbidden_token_ids=tuple(range(60)), max_new_tokens=3), seed=0),
        Request([1], SamplingParams(stop_token_ids=tuple(range(100, 100 + STOP_SLOTS)), max_new_tokens=3), seed=0),
    ]
    groups = generate(engine, requests)
    assert [len(group[0].token_ids) for group in groups] == [41, 1, 3, 3]
    assert groups[2][0].token_ids == [60] * 3
    whole = generate(engine_for(model()), [Request([1] * 95, SamplingParams(max_new_tokens=9), seed=0)])
    assert len(whole[0][0].token_ids) == 1
    assert generate(engine, []) == []


# -- weights that are not numbers


def with_broken_token(token: int) -> dict[str, Tensor]:
    weights = {name: weight.detach().clone() for name, weight in model().weights()}
    weights["model.embed_tokens.weight"][token] = float("nan")
    return weights


def broken_engine(mode: Mode, token: int = ODD) -> NativeEngine:
    engine = engine_for(model(), mode, decode=words)
    engine.update_weights(Weights(with_broken_token(token).items()), version=1)
    return engine


def odd_and_good(params: SamplingParams) -> tuple[list[Request], set[int]]:
    """Prompts with the NaN token at the end, in the middle, and after a prefix that others share."""
    good = [[token % 60 for token in prompt] for prompt in mixed_prompts(seed=7)]
    system = good[6][:21]
    odd = [[ODD], [*system, ODD, 4, 5], [*system[:16], ODD], [*range(20), ODD, *range(30)], [ODD, *range(40)]]
    prompts = [odd[1], good[0], odd[0], *good[1:7], odd[2], *good[7:9], odd[3], *good[9:], odd[4]]
    return requests_for(prompts, params), {i for i, prompt in enumerate(prompts) if ODD in prompt}


@pytest.mark.parametrize("mode", WAYS)
def test_nan_logits_of_a_prompt_fail_only_its_request(mode: str) -> None:
    params = SamplingParams(n=2, max_new_tokens=9, forbidden_token_ids=(ODD,))
    requests, odd = odd_and_good(params)
    expected = generate(engine_for(model()), requests)
    engine = broken_engine(WAYS[mode])
    seen: dict[tuple[int, int], list[int]] = {}
    watchers = (None, lambda request, sample, token: seen.setdefault((request, sample), []).append(token))
    for watcher in watchers:
        consumer = Consumer(engine, watcher)
        consumer.run(requests)
        assert set(consumer.errors) == odd
        assert re.match(r"request 'p0': .*token 0 of sample 0 are not numbers \(NaN\)", consumer.errors[0])
        assert all(f"'p{index}'" in consumer.errors[index] for index in odd)
        ours = consumer.groups()
        assert_same_groups(model(), requests, ours, [[] if i in odd else group for i, group in enumerate(expected)])
        assert idle(engine)
    assert seen == {(r, s): completion.token_ids for r, group in enumerate(ours) for s, completion in enumerate(group)}
    # Later users of the blocks are not affected, and no NaN prefix is cached.
    good = [request for index, request in enumerate(requests) if index not in odd]
    assert_same_groups(
        model(), good, generate(engine, good), [group for index, group in enumerate(expected) if index not in odd]
    )
    engine.update_weights(model(), version=2)
    assert_same_groups(model(), requests, generate(engine, requests), expected)


@pytest.mark.parametrize("mode", WAYS)
def test_nan_logits_while_decoding_fail_only_their_request(mode: str) -> None:
    """The token is sampled by some samples of a request and not by others."""
    params = SamplingParams(n=2, max_new_tokens=24)
    requests = requests_for([[t % 60 for t in prompt] for prompt in mixed_prompts(seed=9)], params)
    expected = generate(engine_for(model()), requests)
    # A sequence fails one step after the token is sampled, if there is such a step.
    places = [[c.token_ids.index(ODD) if ODD in c.token_ids[:-1] else None for c in group] for group in expected]
    odd = {index for index, group in enumerate(places) if group != [None, None]}
    assert 1 < len(odd) < len(requests) and any(None in places[index] for index in odd)
    engine = broken_engine(WAYS[mode])
    for _ in range(2):
        groups, errors = served(engine, requests)
        assert set(errors) == odd
        for index in odd:
            samples = [(sample, place + 1) for sample, place in enumerate(places[index]) if place is not None]
            assert any(f"token {place} of sample {sample} are" in errors[index] for sample, place in samples)
        assert_same_groups(model(), requests, groups, [[] if i in odd else group for i, group in enumerate(expected)])
        assert idle(engine)


def test_nan_logits_after_a_stop_string_are_ignored() -> None:
    """The device does not check for stop strings and continues to the NaN token, in blocks that others use next."""
    params = SamplingParams(temperature=1.0, max_new_tokens=16)
    prompt = [1, 2, 3]
    (free,) = generate(engine_for(model()), [Request(prompt, params, seed=2)])[0]
    odd = next(token for token in free.token_ids[4:] if token not in (*prompt, *free.token_ids[:4]))
    stop = words(free.token_ids[2:4])
    engine = broken_engine(Mode(window=16, ahead=1, cache=18, max_batch=1), token=odd)
    stopping = Request(prompt, SamplingParams(max_new_tokens=16, stop=(stop,)), seed=2, keep=True)
    (stopped,) = generate(engine, [stopping])[0]
    assert stopped.token_ids == free.token_ids[:4]
    assert stopped.handle is not None
    assert engine.runner.kv[:, :, :, engine.scheduler.kept[stopped.handle].blocks].isnan().any()
    healthy = engine_for(model())
    more = SamplingParams(max_new_tokens=8, forbidden_token_ids=(odd,))
    continued = generate(engine, [Request([4], more, seed=3, continues=stopped.handle)])
    whole = [Request([*prompt, *stopped.token_ids, 4], more, seed=3)]
    assert_same_groups(model(), whole, continued, generate(healthy, whole))
    (stopped,) = generate(engine, [stopping])[0]
    assert stopped.handle is not None
    engine.release([stopped.handle])
    others = requests_for([[5, 6], [7], [1, 2, 3, 4]], more)
    assert_same_groups(model(), others, generate(engine, others), generate(healthy, others))
