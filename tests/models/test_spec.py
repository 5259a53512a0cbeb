"""Reading configs of both generations of transformers."""

from __future__ import annotations

import pytest

from assay.models import spec_from_hf
from assay.types import UserError

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}


def test_both_spellings_of_rope_give_the_same_spec():
    new = spec_from_hf({**BASE, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}})
    old = spec_from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}})
    older = spec_from_hf({**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}})
    assert new == old == older
    assert new is not None and new.rope_theta == 5e5 and dict(new.rope_scaling) == {"rope_type": "llama3", **LLAMA3}


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mixtral"},
        {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
        {"model_type": "gemma3_text", "hidden_activation": "gelu"},
        {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["chunked_attention", "full_attention"]},
        {
            "model_type": "phi3",
            "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        },
        {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 8},
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"model_type": "qwen2", "use_sliding_window": True},
        {"quantization_config": {"quant_method": "gptq"}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_the_decoder_does_not_cover_is_left_to_the_fallback(change):
    assert spec_from_hf({**BASE, **change}) is None


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({key: BASE[key] for key in BASE if key != "vocab_size"}, "vocab_size"),
        ({**BASE, "rope_scaling": {"rope_type": "linear"}}, "rope_parameters.*factor"),
        ({**BASE, "hidden_size": 64.5}, "hidden_size must be an integer"),
        ({**BASE, "model_type": "qwen3"}, "no multiple of num_key_value_heads = 32"),
        ({**BASE, "rope_parameters": 3}, "not valid .*rope_parameters"),
    ],
)
def test_an_incomplete_or_invalid_config_names_what_is_wrong(config, named):
    with pytest.raises(UserError, match=named):
        spec_from_hf(config)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("olmo2", {"norm_eps": 1e-5, "rope_theta": 10_000.0}),
        ("glm4", {"norm_eps": 1.5625e-7, "qkv_bias": True, "rotary": 64, "kv_heads": 2}),
        ("mistral", {"kv_heads": 8, "windows": (4096, 4096), "tied": False}),
        ("gemma3_text", {"head_dim": 256, "rope_theta": 1e6, "local_rope_theta": 1e4, "tied": True}),
        ("smollm3", {"rope_theta": 2e6, "tied": True, "no_rope": ()}),
    ],
)
def test_keys_that_a_config_lacks_have_the_defaults_of_transformers(family, expected):
    spec = spec_from_hf({**BASE, "num_attention_heads": 8, "model_type": family})
    assert spec is not None and {name: getattr(spec, name) for name in expected} == expected
