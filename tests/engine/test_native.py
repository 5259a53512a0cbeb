from __future__ import annotations

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

from assay.engine import NativeEngine, Request, SamplingParams, make_engine
from assay.models.decoder import Decoder
from assay.models.fingerprint import fingerprint
from assay.models.spec import ModelSpec, spec_to_hf
from assay.types import Completion, Finish, UserError

SPECS = {
    "llama": small_spec("llama", out_bias=True, qkv_bias=True, mlp_bias=True, kv_heads=4),
    "llama3-rope": small_spec(
        "llama",
        rope_scaling=(
            ("factor", 8.0),
            ("high_freq_factor", 4.0),
            ("low_freq_factor", 1.0),
            ("original_max_position_embeddings", 32),
            ("rope_type", "llama3"),
        ),
    ),
    "qwen2": small_spec("qwen2", kv_heads=1),
    "qwen3": small_spec("qwen3", head_dim=12),
}


def engine_for(model: Decoder, max_batch: int = 256, **options: object) -> NativeEngine:
    engine = make_engine("native", model, device="cpu", dtype=torch.float32, max_batch=max_batch, **options)  # type: ignore[arg-type]
    assert isinstance(engine, NativeEngine)
    return engine


def transformers_model(spec: ModelSpec, model: Decoder) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    values = spec_to_hf(spec)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).eval()
    hf.load_state_dict(dict(model.state_dict()))
    return hf


def requests_for(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
    return [Request(prompt, params, seed=1000 + i, name=f"p{i}") for i, prompt in enumerate(prompts)]


def words(ids: Sequence[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


@pytest.mark.parametrize("name", SPECS)
def test_greedy_equals_transformers(name: str) -> None:
    spec = SPECS[name]
    model = small_decoder(spec, seed=1)
    hf = transformers_model(spec, model)
    prompts = random_prompts(9, spec.vocab_size, seed=2)
    stops = (3, 5, 7, 11)
    params = SamplingParams(n=2, temperature=0.0, max_new_tokens=24, stop_token_ids=stops)
    for group, prompt in zip(
        engine_for(model, max_batch=4).generate(requests_for(prompts, params)), prompts, strict=True
    ):
        theirs = greedy_by_transformers(hf, prompt, 24, stops)
        for completion in group:
            assert_same_tokens(model, prompt, completion.token_ids, theirs)


@pytest.mark.parametrize("name", SPECS)
def test_log_probabilities_equal_the_trainers(name: str) -> None:
    model = small_decoder(SPECS[name], seed=3)
    prompts = random_prompts(6, 61, seed=4)
    params = SamplingParams(n=3, temperature=1.7, max_new_tokens=20, stop_token_ids=(1, 2))
    lengths = set()
    for prompt, group in zip(
        prompts, engine_for(model, max_batch=5).generate(requests_for(prompts, params)), strict=True
    ):
        for completion in group:
            ids = [*prompt, *completion.token_ids]
            logprobs = torch.log_softmax(logits_after(model, ids) / 1.7, -1)
            expected = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(completion.engine_logprobs), expected, atol=1e-4)
            assert completion.sampling_logprobs == completion.engine_logprobs and completion.kept_mass == 1.0
            lengths.add(len(completion.token_ids))
    assert len(lengths) > 3  # sequences did leave at different times


def test_a_sample_depends_on_nothing_else_in_the_batch() -> None:
    model = small_decoder(small_spec(), seed=5)
    prompts = random_prompts(8, 61, seed=6)
    plain = SamplingParams(n=5, temperature=1.2, max_new_tokens=16, stop_token_ids=(1, 2))
    kinds = [plain, replace(plain, top_k=5), replace(plain, top_p=0.7), replace(plain, temperature=0.0)]
    requests = [Request(p, kinds[i % 4], seed=77 + i) for i, p in enumerate(prompts)]
    together = engine_for(model).generate(requests)
    order = list(range(8))
    random.Random(1).shuffle(order)
    small = engine_for(model, max_batch=3)
    shuffled = small.generate([requests[i] for i in order])
    halves = small.generate(requests[:4]) + small.generate(requests[4:])
    alone = [engine_for(model).generate([request])[0] for request in requests]
    others: list[list[list[Completion]]] = [[shuffled[order.index(i)] for i in range(8)], halves, alone]
    for other in others:
        for request, ours, theirs in zip(requests, together, other, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert_same_tokens(model, request.prompt_ids, a.token_ids, b.token_ids)
                assert a.finish == b.finish and a.kept_mass == pytest.approx(b.kept_mass, abs=1e-4)
    drawn = {tuple(c.token_ids) for c in together[0]}
    assert len(drawn) == 5  # samples of one prompt differ
    assert len({tuple(c.token_ids) for c in together[3]}) == 1  # greedy ones do not


def test_groups_larger_than_the_batch_and_prompts_beyond_the_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.engine.native.PREFILL_TOKENS", 12)
    model = small_decoder(small_spec(), seed=5)
    prompts = random_prompts(3, 61, seed=7, shortest=4)
    requests = requests_for(prompts, SamplingParams(n=11, max_new_tokens=9, stop_token_ids=(1, 2, 3, 4, 5)))
    engine = engine_for(model, max_batch=4)
    prefills: list[int] = []
    prefill = engine.runner._prefill
    monkeypatch.setattr(engine.runner, "_prefill", lambda prompts: (prefills.append(len(prompts)), prefill(prompts))[1])
    narrow = engine.generate(requests)
    assert sum(prefills) == 3  # each prompt once, whatever the number of its samples
    wide = engine_for(model).generate(requests)
    assert [[c.token_ids for c in group] for group in narrow] == [[c.token_ids for c in group] for group in wide]


def test_looking_seldom_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_decoder(small_spec(max_length=40), seed=5)
    prompts = random_prompts(7, 61, seed=7, shortest=4)
    requests = requests_for(prompts, SamplingParams(n=3, max_new_tokens=30, stop_token_ids=(1, 2, 3, 4, 5)))
    often = engine_for(model, max_batch=4).generate(requests)
    monkeypatch.setattr("assay.engine.session.steps_between_looks", lambda device: 7)
    seldom = engine_for(model, max_batch=4).generate(requests)
    assert [[c.token_ids for c in group] for group in seldom] == [[c.token_ids for c in group] for group in often]
    assert [[c.finish for c in group] for group in seldom] == [[c.finish for c in group] for group in often]


def test_long_generations_grow_the_cache_to_the_end_of_the_context() -> None:
    model = small_decoder(small_spec(max_length=300), seed=8)
    engine = engine_for(model, max_batch=2)
    requests = requests_for(random_prompts(3, 61, seed=9), SamplingParams(max_new_tokens=1000))
    for request, (completion,) in zip(requests, engine.generate(requests), strict=True):
        assert completion.finish is Finish.LENGTH
        assert len(request.prompt_ids) + len(completion.token_ids) == 300
        ids = [*request.prompt_ids, *completion.token_ids]
        expected = torch.log_softmax(logits_after(model, ids), -1)[len(request.prompt_ids) - 1 : -1]
        expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(completion.engine_logprobs), expected, atol=1e-4)


def test_stop_tokens_and_limits() -> None:
    model = small_decoder(small_spec(), seed=10)
    engine = engine_for(model)
    free = engine.generate([Request([4, 5], SamplingParams(max_new_tokens=12), seed=1)])[0][0]
    assert free.finish is Finish.LENGTH and len(free.token_ids) == 12
    stop = free.token_ids[6]
    first = free.token_ids.index(stop)
    stopped = engine.generate([Request([4, 5], SamplingParams(max_new_tokens=12, stop_token_ids=(60, stop)), seed=1)])[
        0
    ][0]
    assert stopped.finish is Finish.STOP and stopped.token_ids == free.token_ids[: first + 1]
    limits = [Request([4, 5], SamplingParams(max_new_tokens=k), seed=1) for k in (1, 3, 7)]
    assert [group[0].token_ids for group in engine.generate(limits)] == [free.token_ids[:k] for k in (1, 3, 7)]
    last = SamplingParams(max_new_tokens=first + 1, stop_token_ids=(stop,))
    assert engine.generate([Request([4, 5], last, seed=1)])[0][0].finish is Finish.STOP


def test_stop_strings_keep_the_token_that_completes_them() -> None:
    model = small_decoder(small_spec(), seed=10)
    engine = engine_for(model, decode=words)
    free = engine.generate([Request([4, 5], SamplingParams(max_new_tokens=30), seed=2)])[0][0]
    text = words(free.token_ids)
    wanted = text[9:12]
    params = SamplingParams(max_new_tokens=30, stop=("no such thing", wanted))
    requests = [Request([4, 5], params, seed=2), Request([4, 5], SamplingParams(max_new_tokens=30), seed=2)]
    stopped, unstopped = (group[0] for group in engine.generate(requests))
    assert stopped.finish is Finish.STOP
    assert words(stopped.token_ids) == text[: text.index(wanted) + 3]
    assert unstopped.token_ids == free.token_ids


def test_tokens_are_streamed_as_they_are_drawn() -> None:
    engine = engine_for(small_decoder(small_spec(), seed=11), max_batch=3)
    seen: dict[tuple[int, int], list[int]] = {}
    params = SamplingParams(n=2, max_new_tokens=15, stop_token_ids=(1, 2, 3))
    requests = requests_for(random_prompts(4, 61, seed=12), params)
    groups = engine.generate(requests, on_token=lambda r, s, token: seen.setdefault((r, s), []).append(token))
    assert seen == {(r, s): c.token_ids for r, group in enumerate(groups) for s, c in enumerate(group)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_fingerprint_is_over_canonical_weights(name: str, dtype: torch.dtype) -> None:
    model = small_decoder(SPECS[name])
    engine = make_engine("auto", model, device="cpu", dtype=dtype)
    assert isinstance(engine, NativeEngine) and engine.version == 0
    assert engine.fingerprint() == fingerprint(model.weights(), dtype)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 2] += 1.0  # type: ignore[union-attr]
    assert engine.fingerprint() != fingerprint(model.weights(), dtype)


def test_new_weights_change_output_version_and_fingerprint() -> None:
    spec = small_spec()
    before, after = small_decoder(spec, seed=1), small_decoder(spec, seed=2)
    engine = engine_for(before)
    requests = requests_for([[1, 2, 3]], SamplingParams(max_new_tokens=20))
    old = engine.generate(requests)[0][0]
    engine.load_weights(after.weights(), version=7)
    new = engine.generate(requests)[0][0]
    fresh = engine_for(after).generate(requests)[0][0]
    assert (old.version, new.version, engine.version) == (0, 7, 7)
    assert new.token_ids == fresh.token_ids != old.token_ids
    assert engine.fingerprint() == fingerprint(after.weights(), torch.float32)


def test_weights_that_do_not_fit_are_named() -> None:
    model = small_decoder(small_spec())
    engine = engine_for(model)
    weights = dict(model.weights())
    norm = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UserError, match=norm):
        engine.load_weights((weights | {norm: torch.zeros(2, 3)}).items(), 1)
    with pytest.raises(UserError, match=r"model\.layers\.9\.odd"):
        engine.load_weights((weights | {"model.layers.9.odd": torch.zeros(1)}).items(), 1)
    with pytest.raises(UserError, match=norm):
        engine.load_weights([(name, weight) for name, weight in weights.items() if name != norm], 1)
    assert engine.version == 0
    empty = NativeEngine(model.spec, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError, match="load_weights"):
        empty.generate(requests_for([[1]], SamplingParams()))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], r"'p0'.*0 tokens.* 96"), ([1] * 96, r"'p0'.* 96 tokens.* 96"), ([1, 61], r"'p0'.*vocabulary of 61")],
)
def test_bad_prompts_are_named(prompt: list[int], message: str) -> None:
    engine = engine_for(small_decoder(small_spec()))
    with pytest.raises(UserError, match=message):
        engine.generate(requests_for([prompt], SamplingParams()))
    with pytest.raises(UserError, match="stop strings"):
        engine.generate(requests_for([[1]], SamplingParams(stop=("x",))))
    assert engine.generate([]) == []


def test_not_a_number_names_the_request_and_leaves_nothing_behind() -> None:
    model = small_decoder(small_spec(tied=False))
    engine = engine_for(model)
    good = requests_for([[1, 2], [3, 4]], SamplingParams(max_new_tokens=6))
    expected = engine.generate(good)
    broken = {name: weight.detach().clone() for name, weight in model.weights()}
    broken["model.embed_tokens.weight"][9] = float("nan")
    engine.load_weights(broken.items(), 1)
    bad = [good[0], Request([3, 9, 4], SamplingParams(max_new_tokens=6), seed=1, name="the odd one")]
    for watcher in (None, lambda request, sample, token: None):
        with pytest.raises(UserError, match=r"'the odd one'.*NaN"):
            engine.generate(bad, watcher)
    engine.load_weights(model.weights(), 2)
    assert [g[0].token_ids for g in engine.generate(good)] == [g[0].token_ids for g in expected]


def test_bf16_follows_the_trainer() -> None:
    model = small_decoder(small_spec(), seed=13)
    engine = make_engine("native", model, device="cpu", dtype=torch.bfloat16)
    prompts = random_prompts(5, 61, seed=14)
    for prompt, group in zip(
        prompts, engine.generate(requests_for(prompts, SamplingParams(n=4, max_new_tokens=16))), strict=True
    ):
        for completion in group:
            logprobs = torch.log_softmax(logits_after(model, [*prompt, *completion.token_ids]), -1)
            expected = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert (torch.tensor(completion.engine_logprobs) - expected).abs().mean() < 0.15


def test_unknown_or_unfit_engines() -> None:
    model = small_decoder(small_spec())
    with pytest.raises(UserError, match=r"unknown engine 'fast'.*native"):
        make_engine("fast", model, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError, match="native"):
        make_engine("hf", model, device="cpu", dtype=torch.float32)
