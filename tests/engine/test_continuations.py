"""Continuation by handle, also while other requests run: the same as a new engine that gets all tokens as a prompt.

Invalid requests and requests with NaN logits fail by name; other requests are not affected.
"""

from __future__ import annotations

import functools
import pickle
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_parts import small_decoder, small_spec
from native_parts import (
    MODES,
    SPECS,
    Consumer,
    Mode,
    Weights,
    assert_same_draws,
    assert_same_groups,
    assert_scores,
    engine_for,
    idle,
    mixed_prompts,
    model_of,
    requests_for,
    served,
    transformers_model,
    words,
)
from torch import Tensor

from assay.engine import Engine, NativeEngine, Request, RequestError, SamplingParams, generate, make_engine
from assay.engine.native.scheduler import MAX_WAIT
from assay.engine.sequence import STOP_SLOTS
from assay.models.base import HFModel
from assay.models.decoder import Decoder
from assay.types import Completion, Finish

WAYS = {
    "plain": Mode(),
    "windows": Mode(max_batch=5, window=4, ahead=1, cache=1280),
    "all at once": MODES["all at once"],
}


@functools.cache
def fresh() -> NativeEngine:
    return engine_for(model_of("qwen3"), decode=words)


def assert_as_fresh(before: list[int], request: Request, group: list[Completion]) -> None:
    """`before`: all tokens before the completions."""
    fresh().reset_prefix_cache()
    whole = Request(before, request.params, request.seed)
    assert_same_draws(model_of("qwen3"), whole, group, generate(fresh(), [whole])[0])
    for completion in group:
        assert_scores(model_of("qwen3"), before, completion, request.params)


@pytest.mark.parametrize("mode", ["windows", "all at once"])
def test_continuations_equal_whole_prompts(mode: str) -> None:
    """Ended by their limit, by a stop token or by a stop string; greedy or not."""
    draw = random.Random(1)
    engine = engine_for(model_of("qwen3"), WAYS[mode], decode=words)
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


def kept_with_blocks(engine: NativeEngine) -> tuple[list[int], Completion]:
    prompt = mixed_prompts(seed=4)[-1]
    (completion,) = generate(engine, [Request(prompt, SamplingParams(max_new_tokens=12), seed=0, keep=True)])[0]
    assert completion.handle is not None and engine.scheduler.kept[completion.handle].blocks
    return [*prompt, *completion.token_ids], completion


def test_evicted_kept_blocks_are_recomputed() -> None:
    engine = engine_for(model_of("qwen3"), Mode(max_batch=4, cache=128))
    before, completion = kept_with_blocks(engine)
    params = SamplingParams(max_new_tokens=60)
    others = requests_for(mixed_prompts(seed=5)[:6], params)
    for request, group in zip(others, generate(engine, others), strict=True):
        assert_scores(model_of("qwen3"), request.prompt_ids, group[0], params)
    assert completion.handle is not None and not engine.scheduler.kept[completion.handle].blocks
    engine.reset_stats()
    request = Request([1, 2], SamplingParams(n=2, max_new_tokens=9), seed=3, continues=completion.handle)
    assert_as_fresh([*before, 1, 2], request, generate(engine, [request])[0])
    assert engine.stats.prefill_tokens == len(before) + 2


def test_reset_prefix_cache_recomputes_kept_sequences() -> None:
    engine = engine_for(model_of("qwen3"))
    before, completion = kept_with_blocks(engine)
    engine.reset_prefix_cache()
    assert idle(engine)
    engine.reset_stats()
    request = Request([1], SamplingParams(max_new_tokens=9), seed=3, continues=completion.handle)
    assert_as_fresh([*before, 1], request, generate(engine, [request])[0])
    assert engine.stats.prefill_tokens == len(before) + 1


def test_invalid_continuation_leaves_its_handle_usable() -> None:
    engine = engine_for(model_of("qwen3"))
    before, completion = kept_with_blocks(engine)
    for ids in ([1] * 96, [61]):
        assert served(engine, [Request(ids, SamplingParams(), seed=0, continues=completion.handle)])[1]
    request = Request([7], SamplingParams(max_new_tokens=5), seed=0, continues=completion.handle)
    assert_as_fresh([*before, 7], request, generate(engine, [request])[0])


# -- requests added while others are running: conversations whose turns continue independently of each other

TURNS = 4


@dataclass
class Talks:
    """Conversations with a few turns of different lengths; each continues as soon as its turn has ended."""

    first: Sequence[Request]
    turns: int = TURNS
    long: int = 0  # prompt tokens of some conversations
    asked: list[tuple[int, int, list[int], Request]] = field(default_factory=list)  # talk, turn, tokens before, request
    ended: list[tuple[int, Completion]] = field(default_factory=list)
    calls: list[bool] = field(default_factory=list)
    done: dict[tuple[int, int], Completion] = field(default_factory=dict)  # by talk and turn
    order: list[tuple[int, int]] = field(default_factory=list)

    def on_finish(self, request: int, sample: int, completion: Completion) -> None:
        assert sample == 0
        self.ended.append((request, completion))

    def more(self, nothing_else: bool) -> list[Request]:
        assert not torch.is_inference_mode_enabled()
        self.calls.append(nothing_else)
        requests = list(self.first) if len(self.calls) == 1 else []
        self.asked += [(talk, 0, [], request) for talk, request in enumerate(requests)]
        ended, self.ended = sorted(self.ended, key=lambda one: one[0]), []
        for index, completion in ended:
            talk, turn, before, request = self.asked[index]
            self.done[talk, turn] = completion
            self.order.append((talk, turn))
            if turn + 1 < self.turns:
                requests.append(self.turn(talk, turn + 1, completion.handle))
                self.asked.append((talk, turn + 1, [*before, *request.prompt_ids, *completion.token_ids], requests[-1]))
        return requests

    def turn(self, talk: int, turn: int, handle: int | None) -> Request:
        draw = random.Random(100 * talk + turn)
        params = SamplingParams(max_new_tokens=draw.choice((1, 2, 5, 16)), stop_token_ids=(0, 1))
        if self.long and turn == 0 and talk < 5:
            params = SamplingParams(max_new_tokens=self.long)
        given = draw.choices(range(61), k=draw.choice((0, 1, 3)))
        return Request(given, params, 100 * talk + turn, f"talk {talk}", keep=turn + 1 < self.turns, continues=handle)


def talks(count: int = 9, turns: int = TURNS, long: int = 0) -> Talks:
    found = Talks([], turns, long)
    prompts = mixed_prompts(seed=4)[:count]
    found.first = [replace(found.turn(i, 0, None), prompt_ids=prompt) for i, prompt in enumerate(prompts)]
    return found


def hf_engine() -> Engine:
    hf: Any = transformers_model(SPECS["qwen3"], model_of("qwen3"))
    return make_engine("hf", HFModel(hf), device="cpu", dtype=torch.float32, max_batch=4, decode=words)


ENGINES: dict[str, Callable[[], Engine]] = {
    **{name: functools.partial(engine_for, model_of("qwen3"), mode, decode=words) for name, mode in WAYS.items()},
    "hf": hf_engine,
}


@pytest.mark.parametrize("kind", ENGINES)
def test_continuations_added_while_others_run_equal_whole_prompts(kind: str) -> None:
    engine, talk = ENGINES[kind](), talks(long=45)
    consumer = Consumer(engine, on_finish=talk.on_finish, more=talk.more)
    consumer.run()
    groups = consumer.groups()
    assert [group[0] for group in groups] == [talk.done[t, turn] for t, turn, _, _ in talk.asked]
    assert len(groups) == 9 * TURNS and len(talk.done) == 9 * TURNS
    fresh = engine_for(model_of("qwen3"), decode=words)
    for number, turn, before, request in talk.asked:
        whole = Request([*before, *request.prompt_ids], request.params, request.seed)
        fresh.reset_prefix_cache()
        assert_same_draws(model_of("qwen3"), whole, [talk.done[number, turn]], generate(fresh, [whole])[0])
    assert talk.calls[0] and talk.calls[-1]  # the last call adds nothing
    if isinstance(engine, NativeEngine):
        assert idle(engine) and not engine.scheduler.kept
        assert (engine.stats.preemptions > 0) == (kind == "all at once")
        ahead = any(first[1] > second[1] for first, second in pairwise(talk.order))  # some are turns ahead of others
        assert ahead or kind == "all at once"  # there the cache is so small that requests are queued
        assert sum(talk.calls) <= 1 + TURNS  # at the end, and when one conversation was left


@pytest.mark.parametrize(("running", "first"), [(40, MAX_WAIT), (4, 8)])  # 1 + ... + 8 > 4 x ADMISSION_COST
def test_requests_that_arrive_one_by_one_are_admitted_together(running: int, first: int) -> None:
    """One request arrives after each step; they are admitted together, since each admission costs a prefill."""
    engine = engine_for(model_of("qwen3"), Mode(max_batch=64))
    seen: list[int] = []
    enter = engine.rows.enter

    def note(samples: Sequence[Any]) -> None:
        seen.append(len(samples))
        enter(samples)

    engine.rows.enter = note  # type: ignore[method-assign]
    long = SamplingParams(n=running, max_new_tokens=2 * MAX_WAIT)
    short = SamplingParams(max_new_tokens=2)
    waves = [[Request([1], long, seed=0)], *([Request([i], short, i)] for i in range(first + 3))]
    Consumer(engine, more=lambda nothing_else: waves.pop(0) if waves else []).run()
    assert seen == [running, first, 3]


# Requests that fail


SERVED = {"plain": Mode(), "all at once": MODES["all at once"]}
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
    sent = pickle.loads(pickle.dumps(error))  # to other ranks
    assert (str(sent), sent.errors) == (str(error), error.errors)
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


@pytest.mark.parametrize("mode", SERVED)
def test_nan_logits_of_a_prompt_fail_only_its_request(mode: str) -> None:
    params = SamplingParams(n=2, max_new_tokens=9, forbidden_token_ids=(ODD,))
    requests, odd = odd_and_good(params)
    expected = generate(engine_for(model()), requests)
    engine = broken_engine(SERVED[mode])
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


@pytest.mark.parametrize("mode", SERVED)
def test_nan_logits_while_decoding_fail_only_their_request(mode: str) -> None:
    """The token is sampled by some samples of a request and not by others."""
    params = SamplingParams(n=2, max_new_tokens=24)
    requests = requests_for([[t % 60 for t in prompt] for prompt in mixed_prompts(seed=9)], params)
    expected = generate(engine_for(model()), requests)
    # A sequence fails one step after the token is sampled, if there is such a step.
    places = [[c.token_ids.index(ODD) if ODD in c.token_ids[:-1] else None for c in group] for group in expected]
    odd = {index for index, group in enumerate(places) if group != [None, None]}
    assert 1 < len(odd) < len(requests) and any(None in places[index] for index in odd)
    engine = broken_engine(SERVED[mode])
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
