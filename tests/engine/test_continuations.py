"""Continuation by handle, also while other requests run: the same as a new engine that gets all tokens as a prompt."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from native_parts import (
    MODES,
    SPECS,
    Consumer,
    Mode,
    assert_same_draws,
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

from assay.engine import Engine, NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.native.scheduler import MAX_WAIT
from assay.models.base import HFModel
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
