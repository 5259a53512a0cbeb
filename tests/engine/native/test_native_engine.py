"""Completions of the native engine against transformers and the trainer, in all modes of operation."""

from __future__ import annotations

import copy
import functools
import gc
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from engine_parts import (
    assert_same_tokens,
    greedy_by_transformers,
    logits_after,
    random_prompts,
    small_decoder,
    small_spec,
)
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
    model_of,
    requests_for,
    transformers_model,
    words,
)
from torch import Tensor

from assay.engine import NativeEngine, Request, SamplingParams, completions, generate, make_engine
from assay.engine.base import gc_paused
from assay.engine.sequence import BLOCK_SIZE
from assay.types import Completion, Finish, UserError

STOPS = (3, 5, 7, 11)
TRUNCATED = SamplingParams(n=3, top_k=4, max_new_tokens=40)
GREEDY = SamplingParams(n=2, temperature=0.0, max_new_tokens=40, stop_token_ids=STOPS)


# Other modes are compared with these, and networks of all families with the decoder: test_network.py.
WAYS = [("qwen3", "plain"), ("qwen3", "all at once")]
WAYS += [pytest.param(name, "all at once", marks=pytest.mark.slow) for name in ("llama", "gemma3", "glm4")]


@functools.cache
def by_transformers(name: str) -> list[list[int]]:
    hf = transformers_model(SPECS[name], model_of(name))
    return [
        greedy_by_transformers(hf, request.prompt_ids, request.params.max_new_tokens, request.params.stop_token_ids)
        for request in mixed_requests(GREEDY)
    ]


def assert_ran_as_asked(engine: NativeEngine, mode: Mode) -> None:
    stats = engine.stats
    assert (stats.preemptions > 0) == (mode.blocks > 0)
    assert (stats.windows < stats.decode_steps) == (mode.window > 1)
    assert idle(engine)


@pytest.mark.parametrize(("name", "mode"), WAYS)
def test_greedy_equals_transformers(name: str, mode: str) -> None:
    model, requests = model_of(name), mixed_requests(GREEDY)
    engine = engine_for(model, MODES[mode])
    groups = generate(engine, requests)
    assert_ran_as_asked(engine, MODES[mode])
    assert len({len(theirs) for theirs in by_transformers(name)}) > 2  # or all would leave at the same time
    for request, group, theirs in zip(requests, groups, by_transformers(name), strict=True):
        for completion in group:
            assert_same_tokens(model, request.prompt_ids, completion.token_ids, theirs)
            stopped = completion.token_ids[-1] in request.params.stop_token_ids
            assert completion.finish is (Finish.STOP if stopped else Finish.LENGTH)
            assert_scores(model, request.prompt_ids, completion, request.params)


def test_a_sample_does_not_depend_on_other_requests() -> None:
    model, prompts = model_of("qwen3"), mixed_prompts(seed=6)[3:11]
    plain = SamplingParams(n=2, temperature=1.2, max_new_tokens=40, stop_token_ids=(1, 2))
    kinds = [
        *(plain, replace(plain, top_k=5), replace(plain, top_p=0.7), replace(plain, min_p=0.1)),
        *(replace(plain, temperature=0.0), replace(plain, forbidden_token_ids=(4, 8), min_new_tokens=5)),
    ]
    requests = [Request(prompt, kinds[i % len(kinds)], seed=77 + i) for i, prompt in enumerate(prompts)]
    together = generate(engine_for(model), requests)
    order = random.Random(1).sample(range(len(requests)), len(requests))
    others: dict[str, Sequence[Sequence[Completion]]] = {}
    for mode in ("chunks", "windows", "small cache"):
        engine = engine_for(model, MODES[mode])
        others[mode] = generate(engine, requests)
        assert_ran_as_asked(engine, MODES[mode])
    one = engine_for(model, Mode(max_batch=3))
    others["in halves"] = generate(one, requests[:3]) + generate(one, requests[3:])
    others["alone"] = [generate(one, [request])[0] for request in requests]
    shuffled = generate(engine_for(model, MODES["all at once"]), [requests[i] for i in order])
    others["shuffled, all at once"] = [shuffled[order.index(i)] for i in range(len(requests))]
    for other in others.values():
        assert_same_groups(model, requests, together, other)
    assert len({tuple(completion.token_ids) for completion in together[0]}) == 2  # samples of one prompt differ
    assert len({tuple(completion.token_ids) for completion in together[4]}) == 1  # greedy ones do not


def random_requests(draw: random.Random) -> list[Request]:
    """Short and long, alike and not, that end in all the ways there are."""
    system = draw.choices(range(61), k=40)
    requests = []
    for _ in range(draw.randint(1, 10)):
        params = SamplingParams(
            n=draw.choice((1, 1, 2, 5)),
            temperature=draw.choice((0.0, 1.0, 1.5)),
            top_k=draw.choice((0, 0, 5)),
            max_new_tokens=draw.randint(1, 45),
            min_new_tokens=draw.choice((0, 0, 6)),
            stop_token_ids=draw.choice(((), (1, 2, 3), tuple(range(12)))),
            stop=draw.choice(((), (), (words([9]), words([20, 21]), words([30])))),
            forbidden_token_ids=draw.choice(((), (7, 8))),
        )
        prompt = system[: draw.choice((0, 0, 10, 16, 32, 40))] + draw.choices(range(61), k=draw.randint(1, 10))
        requests.append(Request(prompt, params, seed=draw.getrandbits(64)))
    return requests


def assert_settings_do_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    model = small_decoder(small_spec(layers=1), seed=3)
    mode = Mode(
        max_batch=draw.choice((1, 2, 3, 5, 8, 20)),
        prefill_tokens=draw.choice((0, 1, 3, 7, 16, 40)),
        window=draw.choice((1, 2, 3, 5, 8, 16)),
        ahead=draw.choice((0, 1, 1, 2)),
        cache=draw.choice((0, 96, 112, 128, 160, 240)),
    )
    engine = engine_for(model, mode, decode=words)
    for _ in range(2):
        requests = random_requests(draw)
        ours, theirs = generate(engine, requests), generate(engine_for(model, decode=words), requests)
        assert idle(engine)
        assert_same_groups(model, requests, ours, theirs)


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 12), marks=pytest.mark.slow)])
def test_samples_do_not_depend_on_engine_settings(seeds: range) -> None:
    for seed in seeds:
        assert_settings_do_not_matter(seed)


def test_common_prefixes_are_computed_once_and_cached_for_later_calls() -> None:
    draw = random.Random(8)
    full = 2 * BLOCK_SIZE
    system = draw.choices(range(61), k=full + BLOCK_SIZE // 2)  # two full blocks, and some more
    prompts = [[*system, i, *draw.choices(range(61), k=draw.randint(0, 9))] for i in range(6)]
    params = SamplingParams(n=2, max_new_tokens=6)
    engine = engine_for(model_of("qwen3"), Mode(max_batch=5))
    first = generate(engine, requests_for(prompts, params))
    assert engine.stats.prefill_tokens == full + sum(len(prompt) - full for prompt in prompts)
    engine.reset_stats()
    again = generate(engine, requests_for(prompts, params))
    assert engine.stats.prefill_tokens == sum(len(prompt) % BLOCK_SIZE for prompt in prompts)
    engine.reset_stats()
    whole = generate(engine, requests_for([prompts[0][:full]], params))  # nothing is left to be computed
    assert engine.stats.prefill_tokens == 0
    engine.reset_prefix_cache()
    engine.reset_stats()
    anew = generate(engine, requests_for(prompts, params))
    assert engine.stats.prefill_tokens == full + sum(len(prompt) - full for prompt in prompts)
    for groups, asked in ((first, prompts), (again, prompts), (whole, [prompts[0][:full]]), (anew, prompts)):
        for prompt, group in zip(asked, groups, strict=True):
            for completion in group:
                assert_scores(model_of("qwen3"), prompt, completion, params)


def test_all_samples_may_have_ended_when_blocks_run_short() -> None:
    """Both stop in the first window, which is looked at because the second needs more blocks than there are."""
    model, greedy = model_of("qwen3"), SamplingParams(temperature=0.0, max_new_tokens=2 * BLOCK_SIZE)
    first = BLOCK_SIZE - 3  # tokens, which with those of a window just fill a block
    requests = requests_for([list(range(first)), list(range(20, 20 + first))], greedy)
    free = generate(engine_for(model), requests)
    stops = tuple(group[0].token_ids[1] for group in free)
    requests = [replace(request, params=replace(greedy, stop_token_ids=stops)) for request in requests]
    engine = engine_for(model, Mode(window=4, ahead=1, cache=3 * BLOCK_SIZE))
    groups = generate(engine, requests)
    assert engine.stats.decode_steps == 4 and idle(engine)
    assert_same_groups(model, requests, groups, generate(engine_for(model), requests))


def test_long_generations_reach_the_end_of_the_context() -> None:
    model = small_decoder(small_spec(max_length=300), seed=8)  # more steps than the log or the history begin with
    params = SamplingParams(max_new_tokens=1000)
    requests = requests_for(random_prompts(3, 61, seed=9), params)
    engine = engine_for(model, Mode(max_batch=2, window=8, ahead=1, cache=400))
    groups = generate(engine, requests)
    assert engine.stats.preemptions > 0
    for request, (completion,) in zip(requests, groups, strict=True):
        assert completion.finish is Finish.LENGTH
        assert len(request.prompt_ids) + len(completion.token_ids) == 300
        assert_scores(model, request.prompt_ids, completion, params)


KINDS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0.0),
    "cool": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(top_k=6),
    "top-p": SamplingParams(top_p=0.8),
    "min-p": SamplingParams(min_p=0.15),
    "truncated": SamplingParams(temperature=1.4, top_k=20, top_p=0.9, min_p=0.05),
    "forbidden": SamplingParams(forbidden_token_ids=(2, 3, 17, 40)),
    "early stop": SamplingParams(stop_token_ids=tuple(range(16)), min_new_tokens=9),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=9,
        top_p=0.9,
        min_p=0.03,
        forbidden_token_ids=(2, 3, 17),
        stop_token_ids=(2, *range(30, 45)),
        min_new_tokens=6,
    ),
}


def test_float32_scores_are_close_to_float64() -> None:
    """All kinds in one batch: log-probabilities, kept mass and entropy, and nothing is drawn that may not be."""
    model = model_of("qwen3")
    exact = copy.deepcopy(model).double()
    kinds = [replace(params, n=4, max_new_tokens=18) for params in KINDS.values()]
    prompts = mixed_prompts(seed=11)
    requests = [Request(prompts[i], params, seed=i) for i, params in enumerate(kinds)]
    by_kind = dict(zip(KINDS, generate(engine_for(model, MODES["all at once"]), requests), strict=True))
    for request, group in zip(requests, by_kind.values(), strict=True):
        for completion in group:
            assert_scores(exact, request.prompt_ids, completion, request.params)
    for kind in ("top-k", "top-p", "min-p", "truncated", "forbidden", "early stop", "everything"):
        assert all(completion.kept_mass < 0.999 for completion in by_kind[kind])
    for kind in ("early stop", "everything"):
        shortest = KINDS[kind].min_new_tokens
        assert all(len(completion.token_ids) > shortest for completion in by_kind[kind])
        stops = set(KINDS[kind].stop_token_ids)
        assert not any(stops & set(completion.token_ids[:shortest]) for completion in by_kind[kind])
        assert any(completion.finish is Finish.STOP for completion in by_kind[kind])


def test_kv_waste_is_limited_to_partial_last_blocks() -> None:
    model = small_decoder(small_spec(max_length=400, layers=1), seed=3)
    prompts = random_prompts(6, 61, seed=13, shortest=50, longest=80)
    engine = engine_for(model, Mode(cache=7360))
    held: list[tuple[int, int]] = []  # slots in use, and those of them that hold nothing

    def look(request: int, sample: int, token: int) -> None:
        """Blocks in use against slots that were ever written, while nobody has left yet."""
        if request == sample == 0 and engine.blocks.in_use:  # all have left after the last step
            written = int((engine.runner.kv[0, 0, 0, : engine.blocks.total] != 0).any(-1).sum())
            held.append((engine.blocks.in_use * BLOCK_SIZE, engine.blocks.in_use * BLOCK_SIZE - written))

    Consumer(engine, on_token=look).run(requests_for(prompts, SamplingParams(n=3, max_new_tokens=300)))
    stats, shares = engine.stats, [empty / slots for slots, empty in held]
    most = BLOCK_SIZE / 400  # a good half of a block for each sequence
    assert stats.preemptions == 0 and len(shares) == 299 and max(shares[250:]) < most
    assert stats.kv_waste_peak < most
    assert stats.kv_waste_peak == pytest.approx(shares[7 * (300 // 7) - 1], abs=1e-3)  # the last that it counted
    for counted, tolerance in ((held[6::7], 1e-3), (held, 3e-3)):  # a seventh of the steps stands for all of them
        slots, empty = (sum(side) for side in zip(*counted, strict=True))
        assert stats.kv_waste == pytest.approx(empty / slots, abs=tolerance)


def test_bfloat16_logprobs_are_close_to_those_of_the_trainer() -> None:
    model = small_decoder(small_spec(), seed=13)
    engine = engine_for(model, MODES["all at once"], dtype=torch.bfloat16)
    prompts = mixed_prompts(seed=14)[4:10]
    params = SamplingParams(n=4, max_new_tokens=16)
    for prompt, group in zip(prompts, generate(engine, requests_for(prompts, params)), strict=True):
        for completion in group:
            logprobs = torch.log_softmax(logits_after(model, [*prompt, *completion.token_ids]), -1)
            expected = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert (torch.tensor(completion.engine_logprobs) - expected).abs().mean() < 0.15


def test_unknown_or_unsuitable_engines_are_errors() -> None:
    model = small_decoder(small_spec())
    with pytest.raises(UserError, match=r"unknown engine 'fast'.*native"):
        make_engine("fast", model, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError, match="native"):
        make_engine("hf", model, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError, match="max_batch must be at least 1, not -1"):
        make_engine("native", model, device="cpu", dtype=torch.float32, max_batch=-1)


def test_top_logprobs_are_the_most_likely_tokens_of_the_model() -> None:
    model = model_of("qwen3")
    engine = engine_for(model)
    sequences, starts = [list(range(1, 20)), [5, 3, 8, 1], [2], [6, 7]], [7, 1, 1, 1]
    results = engine.top_logprobs(sequences, starts, 3, 0.5)
    for sequence, start, scores in zip(sequences, starts, results, strict=True):
        logits = model.unembed(model.hidden(torch.tensor(sequence), [len(sequence)]))[start - 1 : -1]
        logprobs = (logits / 0.5).log_softmax(-1)
        values, tokens = logprobs.topk(3)
        assert [[token for token, _ in row] for row in scores.top] == tokens.tolist()
        flat = [value for row in scores.top for _, value in row]
        assert flat == pytest.approx(values.flatten().tolist(), abs=1e-4)
        order = logprobs.argsort(-1, descending=True).tolist()
        assert scores.ranks == [row.index(token) + 1 for row, token in zip(order, sequence[start:], strict=True)]
        (plain,) = engine.score([sequence], 0.5)
        assert scores.logprobs == pytest.approx(plain[start - 1 :], abs=1e-4)


def test_logits_are_freed_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 509  # different from all other sizes
    model = small_decoder(small_spec(vocab_size=vocabulary, tied=False), seed=3)
    engine = engine_for(model, Mode(max_batch=5, window=3, ahead=1))
    tables: list[int] = []
    step = engine.runner._step

    def alive() -> int:
        return sum(1 for x in gc.get_objects() if type(x) is Tensor and x.dim() and x.shape[-1] == vocabulary)

    def look(size: int, span: int) -> None:
        """Count logits of earlier steps that are still alive when a step begins."""
        tables.append(alive() - weights)
        step(size, span)

    weights = alive()  # weights may be stored by columns
    monkeypatch.setattr(engine.runner, "_step", look)
    params = SamplingParams(n=4, top_p=0.9, max_new_tokens=5, forbidden_token_ids=(1,))
    generate(engine, requests_for(random_prompts(3, vocabulary, seed=1), params))
    assert len(tables) == engine.stats.decode_steps > 5 and not any(tables)


def test_results_do_not_depend_on_the_steps_after_which_they_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for steps in (1, 16, 10_000):
        monkeypatch.setattr(completions, "CONVERT_STEPS", steps)
        engine = engine_for(model_of("qwen3"), MODES["all at once"])
        requests = [*mixed_requests(GREEDY), *mixed_requests(TRUNCATED)]
        found.append(generate(engine, requests))
        assert engine.stats.preemptions > 0
    assert found[0] == found[1] == found[2]
    drawn = [completion for group in found[0] for completion in group if completion.finish == Finish.LENGTH]
    assert any(len(one.token_ids) == 40 and one.engine_logprobs != one.sampling_logprobs for one in drawn)


def test_lists_of_results_are_not_left_to_the_next_garbage_collection() -> None:
    """It would examine each of their numbers, after the last step."""
    engine = engine_for(model_of("qwen3"), MODES["windows"])
    with gc_paused():
        (group,) = generate(engine, [Request([1, 2], SamplingParams(n=5, max_new_tokens=12), seed=0)])
        young = {id(found) for found in gc.get_objects(generation=0)}
    lists = [one for c in group for one in (c.token_ids, c.engine_logprobs, c.sampling_logprobs)]
    assert len(lists) == 15 and young.isdisjoint(map(id, lists))
