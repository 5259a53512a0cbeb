"""Small random models of transformers, and the comparison with them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

LENGTHS = [7, 1, 40, 12]
ROPE_SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 24,
    },
}


def tiny_config(family: str, scaling: str | None = None, **changes: Any) -> Any:
    from transformers import AutoConfig

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    if scaling:
        rope |= ROPE_SCALINGS[scaling]
    sizes = {
        **{"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
        **{"rope_parameters": rope, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    }
    if family in ("qwen3", "gemma3_text", "glm4"):
        sizes["head_dim"] = 8
    if family == "gemma3_text":
        sizes |= {"query_pre_attn_scalar": 5, "sliding_window": 6, "num_hidden_layers": 3}
        sizes |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        local = {"rope_type": "default", "rope_theta": 50.0}
        sizes["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    if family in ("phi3", "mistral"):
        sizes["sliding_window"] = None
    if family == "smollm3":
        sizes |= {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
    if family == "glm4":
        rope["partial_rotary_factor"] = 0.5
    return AutoConfig.for_model(family, **(sizes | changes))


def randomised(hf: Any, seed: int = 0) -> Any:
    """Weights that make every part matter: logits of order one, norms and biases away from their defaults."""
    generator = torch.Generator().manual_seed(seed)
    for weight in hf.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        fresh = noise * 1.5 / weight.shape[-1] ** 0.5 if weight.dim() > 1 else weight.detach() + 0.4 * noise
        weight.data.copy_(fresh)
    return hf.eval()


def build(family: str, scaling: str | None = None, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return randomised(AutoModelForCausalLM.from_config(tiny_config(family, scaling, **changes)))


def sample_ids(vocabulary: int, lengths: list[int]) -> Tensor:
    return torch.randint(vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def reference(hf: Any, ids: Tensor, lengths: list[int]) -> Tensor:
    """Transformers' logits, one sequence at a time."""
    return torch.cat([hf(input_ids=part[None]).logits[0] for part in ids.split(lengths)])


@torch.no_grad()
def difference(model: Any, hf: Any, lengths: list[int] | None = None) -> float:
    lengths = lengths or LENGTHS
    ids = sample_ids(model.vocab_size, lengths)
    expected = reference(hf, ids, lengths)
    assert expected.std() > 0.1  # or the comparison would say nothing
    return float((model.unembed(model.hidden(ids, lengths)) - expected).abs().max())


@pytest.fixture
def make_hf() -> Callable[..., Any]:
    return build


@pytest.fixture
def randomise() -> Callable[..., Any]:
    return randomised


@pytest.fixture
def logit_difference() -> Callable[..., float]:
    return difference


@pytest.fixture
def real_models() -> Path:
    return Path(os.environ.get("ASSAY_MODELS") or Path(__file__).parents[2] / ".models")
