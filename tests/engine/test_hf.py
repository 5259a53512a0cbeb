from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_parts import assert_same_tokens, greedy_by_transformers, random_prompts
from native_parts import Weights, assert_same_draws, assert_same_groups, assert_scores, served, words

from assay.engine import HFEngine, Request, SamplingParams, generate, hf, make_engine
from assay.engine.sampler import LOG_STEPS
from assay.models.base import HFModel, fingerprint
from assay.types import UserError

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.3}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {
        **{"max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6},
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 64},  # no position_ids
}


def small_model(kind: str, seed: int = 0) -> HFModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **SMALL, **CONFIGS[kind])
    return HFModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval())


def engine_for(model: HFModel, max_batch: int = 64, max_length: int = 64) -> HFEngine:
    options = {"max_batch": max_batch, "max_length": max_length, "decode": words}
    engine = make_engine("auto", model, device="cpu", dtype=torch.float32, **options)
    assert isinstance(engine, HFEngine)
    return engine


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_transformers_with_mixed_prompts(kind: str) -> None:
    model = small_model(kind)
    prompts = random_prompts(5, VOCABULARY, seed=1, longest=14)
    params = SamplingParams(n=2, temperature=0.0, max_new_tokens=12, stop_token_ids=(3, 5, 7))
    groups = generate(engine_for(model, max_batch=4), [Request(p, params, seed=i) for i, p in enumerate(prompts)])
    for prompt, group in zip(prompts, groups, strict=True):
        theirs = greedy_by_transformers(model.hf, prompt, 12, params.stop_token_ids)
        for completion in group:
            assert_same_tokens(model, prompt, completion.token_ids, theirs)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logprobs_equal_the_trainers_and_do_not_depend_on_the_batch(kind: str) -> None:
    model = small_model(kind)
    prompts = random_prompts(5, VOCABULARY, seed=2, longest=14)
    params = SamplingParams(n=3, temperature=1.3, top_p=0.95, max_new_tokens=12, stop_token_ids=(3, 5, 7))
    kinds = [
        *(params, replace(params, top_p=1.0, min_p=0.1), replace(params, temperature=0.0)),
        *(replace(params, forbidden_token_ids=(1, 2), min_new_tokens=6), replace(params, top_p=1.0)),
    ]
    requests = [Request(p, kinds[i], seed=50 + i) for i, p in enumerate(prompts)]
    engine = engine_for(model)
    together = generate(engine, requests)
    assert_same_groups(model, requests, together, [generate(engine, [request])[0] for request in requests])
    assert_same_groups(model, requests, together, generate(engine_for(model, max_batch=4), requests))
    for request, group in zip(requests, together, strict=True):
        for completion in group:
            assert_scores(model, request.prompt_ids, completion, request.params)
    assert all(0.9 < completion.kept_mass < 1.0 for completion in together[0])
    assert all(len(completion.token_ids) > 6 for completion in together[3])


def test_a_float64_model_has_float64_scores() -> None:
    model = small_model("gpt2").double()
    engine = make_engine("hf", model, device="cpu", dtype=torch.float64)
    ((completion,),) = generate(engine, [Request([1, 2, 3], SamplingParams(max_new_tokens=6), seed=4)])
    ids = torch.tensor([[1, 2, 3, *completion.token_ids]])
    scores = model.hf(ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
    assert completion.engine_logprobs == pytest.approx(scores.tolist(), abs=1e-12)


def test_engine_has_its_own_copy_of_the_weights() -> None:
    model = small_model("gpt2")
    engine = engine_for(model)
    assert engine.fingerprint() == fingerprint(model.weights(), torch.float32)
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=20, n=2), seed=4)
    before = [c.token_ids for c in generate(engine, [request])[0]]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    assert [c.token_ids for c in generate(engine, [request])[0]] == before
    engine.update_weights(model, version=3)
    after = generate(engine, [request])[0]
    assert [c.token_ids for c in after] != before and after[0].version == 3
    assert engine.fingerprint() == fingerprint(model.weights(), torch.float32)
    with pytest.raises(UserError, match="no weight 'other'"):
        engine.update_weights(Weights([("other", torch.zeros(1))]), 4)


def test_engine_copies_no_gradients_and_casts_weights_to_bf16() -> None:
    model = small_model("gpt2")
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    engine = make_engine("hf", model, device="cpu", dtype=torch.bfloat16)
    assert isinstance(engine, HFEngine)
    assert all(weight.grad is not None for weight in model.parameters())
    assert all(weight.grad is None and not weight.requires_grad for weight in engine.model.parameters())
    assert engine.fingerprint() == fingerprint(model.weights(), torch.bfloat16)
    assert len(generate(engine, [Request([1], SamplingParams(max_new_tokens=3), seed=0)])[0][0].token_ids) == 3


def test_generations_longer_than_the_log() -> None:
    model = small_model("gpt2")
    params = SamplingParams(n=2)
    requests = [Request([i + 1], replace(params, max_new_tokens=LOG_STEPS + 6 - 9 * i), seed=i) for i in range(2)]
    groups = generate(engine_for(model, max_batch=3, max_length=128), requests)
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            assert len(completion.token_ids) == request.params.max_new_tokens
            assert_scores(model, request.prompt_ids, completion, request.params)


def test_continuations_equal_whole_prompts() -> None:
    model = small_model("bloom")
    engine = engine_for(model, max_batch=3)
    params = SamplingParams(n=2, max_new_tokens=6, stop_token_ids=(3, 5))
    sequences = random_prompts(3, VOCABULARY, seed=3, longest=9)
    requests = [Request(ids, params, seed=i, keep=True) for i, ids in enumerate(sequences)]
    for turn in range(2):
        groups = generate(engine, requests)
        for i, (request, group) in enumerate(zip(requests, groups, strict=True)):
            whole = Request(sequences[i], params, seed=request.seed)
            assert_same_draws(model, whole, group, generate(engine_for(model), [whole])[0])
            more = [turn + 1] * (i % 3)
            sequences[i] = [*sequences[i], *group[turn % 2].token_ids, *more]
            requests[i] = Request(more, params, seed=9 * turn + i, keep=True, continues=group[turn % 2].handle)
            engine.release([completion.handle for completion in group if completion.handle != requests[i].continues])  # type: ignore[misc]
    assert set(engine.kept) == {request.continues for request in requests}


def test_nan_logits_fail_only_their_request() -> None:
    model = small_model("gpt2")
    requests = [Request(ids, SamplingParams(n=2, max_new_tokens=9), seed=0) for ids in ([1, 2], [1, 60, 2], [3])]
    requests = [replace(one, params=replace(one.params, forbidden_token_ids=(60,))) for one in requests]
    expected = generate(engine_for(model), requests)
    with torch.no_grad():
        model.hf.transformer.wte.weight[60] = float("nan")
        model.hf.lm_head.weight = torch.nn.Parameter(small_model("gpt2").hf.lm_head.weight)
    groups, errors = served(engine_for(model, max_batch=4), requests)
    assert list(errors) == [1] and "are not numbers (NaN)" in errors[1]
    assert_same_groups(model, [requests[0], requests[2]], [groups[0], groups[2]], [expected[0], expected[2]])


def test_top_logprobs_are_the_most_likely_tokens_of_the_model() -> None:
    model, sequence = small_model("gpt2"), [5, 3, 8, 1]
    (scores,) = engine_for(model).top_logprobs([sequence], [2], 3, 0.5)
    with torch.no_grad():
        logits = model.hf(input_ids=torch.tensor([sequence])).logits[0, 1:-1]
    values, tokens = (logits / 0.5).log_softmax(-1).topk(3)
    assert [[token for token, _ in row] for row in scores.top] == tokens.tolist()
    assert [value for row in scores.top for _, value in row] == pytest.approx(values.flatten().tolist(), abs=1e-5)


def test_long_sequences_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sequences = engine_for(small_model("gpt2")), [[5, 3, 8, 1, 9, 9, 2], [4, 4], [7]]
    whole, likely = engine.score(sequences), engine.top_logprobs(sequences, [2, 1, 1], 3)
    monkeypatch.setattr(hf, "SCORE_LOGITS", 2 * engine.info.vocab_size)
    for one, other in zip(engine.score(sequences), whole, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    for part, scores in zip(engine.top_logprobs(sequences, [2, 1, 1], 3), likely, strict=True):
        assert part.logprobs == pytest.approx(scores.logprobs, abs=1e-5)
        assert part.ranks == scores.ranks and [len(row) for row in part.top] == [3] * len(scores.ranks)
