"""Any causal LM of transformers through the packed interface."""

from __future__ import annotations

import pytest
import torch

from assay.models import HFModel
from assay.models.fallback import NO_LIMIT

MODELS = {
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48},
    "gpt_neo": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": 48,
    },
    "gemma2": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 48,
        "sliding_window": 8,
        "final_logit_softcapping": 3.0,
        "pad_token_id": 0,
    },
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
}


def build(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, vocab_size=61, **MODELS[name]))


@pytest.mark.parametrize("name", MODELS)
def test_packed_logits_equal_its_own(name, randomise, logit_difference):
    hf = randomise(build(name))
    model = HFModel(hf)
    assert logit_difference(model, hf) < 1e-4
    assert model.max_length == (NO_LIMIT if name == "bloom" else 48) and model.vocab_size == 61


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_weight(name, randomise):
    model = HFModel(randomise(build(name)))
    logits = model.unembed(model.hidden(torch.arange(30), [9, 21]))
    logits.log_softmax(-1)[torch.arange(29), torch.arange(1, 30)].sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for _, weight in model.weights())
    assert sum(float(weight.grad.abs().sum()) > 0 for _, weight in model.weights()) > 5


def test_training_mode_leaves_dropout_off(randomise):
    model = HFModel(randomise(build("gpt2")))
    model.eval()
    ids = torch.arange(20)
    expected = model.hidden(ids, [20])
    model.train()
    assert model.training and torch.equal(model.hidden(ids, [20]), expected)


def test_weights_have_their_own_names_and_tied_ones_are_listed_once():
    names = [name for name, _ in HFModel(build("gpt2")).weights()]
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names
    assert len(names) == len(set(names))
