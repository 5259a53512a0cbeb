from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_parts import assert_same_tokens, greedy_by_transformers, logits_after, random_prompts

from assay.engine import HFEngine, Request, SamplingParams, make_engine
from assay.models.fallback import HFModel
from assay.models.fingerprint import fingerprint
from assay.types import Finish, UserError

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.3}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neo": {
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
    },
    "gemma2": {
        "max_position_embeddings": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 6,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 64},  # takes no positions
}


def small_model(kind: str, seed: int = 0) -> HFModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **SMALL, **CONFIGS[kind])
    return HFModel(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval())


def engine_for(model: HFModel, max_batch: int = 64) -> HFEngine:
    engine = make_engine("auto", model, device="cpu", dtype=torch.float32, max_batch=max_batch, max_length=64)
    assert isinstance(engine, HFEngine)
    return engine


@pytest.mark.parametrize("kind", CONFIGS)
def test_greedy_equals_transformers_with_mixed_prompts(kind: str) -> None:
    model = small_model(kind)
    prompts = random_prompts(7, VOCABULARY, seed=1, longest=14)
    params = SamplingParams(n=2, temperature=0.0, max_new_tokens=16, stop_token_ids=(3, 5, 7))
    groups = engine_for(model, max_batch=5).generate([Request(p, params, seed=i) for i, p in enumerate(prompts)])
    for prompt, group in zip(prompts, groups, strict=True):
        theirs = greedy_by_transformers(model.hf, prompt, 16, params.stop_token_ids)
        for completion in group:
            assert_same_tokens(model, prompt, completion.token_ids, theirs)


@pytest.mark.parametrize("kind", CONFIGS)
def test_log_probabilities_equal_the_trainers_and_batches_do_not_matter(kind: str) -> None:
    model = small_model(kind)
    prompts = random_prompts(5, VOCABULARY, seed=2, longest=14)
    params = SamplingParams(n=3, temperature=1.3, top_p=0.95, max_new_tokens=12, stop_token_ids=(3, 5, 7))
    requests = [Request(p, params, seed=50 + i) for i, p in enumerate(prompts)]
    engine = engine_for(model)
    together = engine.generate(requests)
    alone = [engine.generate([request])[0] for request in requests]
    for prompt, group, again in zip(prompts, together, alone, strict=True):
        for a, b in zip(group, again, strict=True):
            assert_same_tokens(model, prompt, a.token_ids, b.token_ids)
            logprobs = torch.log_softmax(logits_after(model, [*prompt, *a.token_ids]) / 1.3, -1)
            expected = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(a.token_ids)[:, None])[:, 0]
            assert torch.allclose(torch.tensor(a.engine_logprobs), expected, atol=1e-4)
            assert 0.9 < a.kept_mass < 1.0


def test_weights_are_its_own() -> None:
    model = small_model("gpt2")
    engine = engine_for(model)
    assert engine.fingerprint() == fingerprint(model.weights(), torch.float32)
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=60, n=2), seed=4)
    before = [c.token_ids for c in engine.generate([request])[0]]
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    assert [c.token_ids for c in engine.generate([request])[0]] == before
    engine.load_weights(model.weights(), version=3)
    after = engine.generate([request])[0]
    assert [c.token_ids for c in after] != before and after[0].version == 3
    assert engine.fingerprint() == fingerprint(model.weights(), torch.float32)
    with pytest.raises(UserError, match="no weight 'other'"):
        engine.load_weights([("other", torch.zeros(1))], 4)


def test_gradients_stay_with_the_model_and_bf16_is_exact() -> None:
    model = small_model("gpt2")
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    engine = make_engine("hf", model, device="cpu", dtype=torch.bfloat16)
    assert isinstance(engine, HFEngine)
    assert all(weight.grad is not None for weight in model.parameters())
    assert all(weight.grad is None and not weight.requires_grad for weight in engine.model.parameters())
    assert engine.fingerprint() == fingerprint(model.weights(), torch.bfloat16)
    assert len(engine.generate([Request([1], SamplingParams(max_new_tokens=3), seed=0)])[0][0].token_ids) == 3


def test_context_end_stream_and_bad_prompts() -> None:
    engine = engine_for(small_model("gpt2"))
    seen: list[int] = []
    request = Request([1] * 60, SamplingParams(max_new_tokens=30), seed=0, name="long")
    completion = engine.generate([request], on_token=lambda r, s, token: seen.append(token))[0][0]
    assert completion.finish is Finish.LENGTH and len(completion.token_ids) == 4 and seen == completion.token_ids
    with pytest.raises(UserError, match=r"'long'.* 64 tokens"):
        engine.generate([Request([1] * 64, SamplingParams(), seed=0, name="long")])
