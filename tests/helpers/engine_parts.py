"""Small models, and the comparison of tokens that the design defines, shared by the engine's tests."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.engine.native.compiled import load_library
from assay.models.base import PolicyModel
from assay.models.decoder import Decoder
from assay.models.spec import ModelSpec

GAP = 1e-4  # a first divergence is allowed where the two best logits are closer than this


def small_spec(family: str = "qwen3", **changes: object) -> ModelSpec:
    sizes = {"vocab_size": 61, "hidden": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}
    kind = {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3", "tied": family != "llama"}
    return ModelSpec(**({"family": family, "max_length": 96} | sizes | kind | changes))  # type: ignore[arg-type]


THETAS = {"rope_theta": 500.0, "local_rope_theta": 50.0}
# Families whose layers differ from those of Llama and Qwen; windows are shorter than most sequences of the tests.
UNUSUAL_SPECS = {
    "mistral": small_spec("mistral", layers=2, windows=(9, 9), head_dim=12, tied=False),
    "gemma3": small_spec("gemma3_text", windows=(6, 0, 6), query_scalar=5, qk_norm=True, tied=False, **THETAS),
    "smollm3": small_spec("smollm3", no_rope=(1,)),
    "olmo2": small_spec("olmo2", layers=2, kv_heads=4, qk_norm=True, tied=False),
    "phi3": small_spec("phi3", layers=2, windows=(11, 11), rotary=6, tied=False),
    "glm4": small_spec("glm4", layers=2, rotary=4, qkv_bias=True, tied=False),
}


def small_decoder(spec: ModelSpec, seed: int = 0, scale: float = 0.25, spread: float = 0.3) -> Decoder:
    """Random weights large enough that attention and every bias matter."""
    model = Decoder(spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.empty(weight.shape).normal_(0.0, 1.0, generator=generator)
            weight.copy_(noise * scale if weight.dim() == 2 else 1.0 + spread * noise)
    return model


def needed_library() -> Any:
    """The compiled C library; skips the test without a C compiler."""
    library = load_library(os.environ.get("CC", "cc"))
    if library is None:
        pytest.skip("there is no C compiler here")
    return library


def random_prompts(count: int, vocabulary: int, seed: int = 0, shortest: int = 1, longest: int = 20) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


@torch.no_grad()
def logits_after(model: PolicyModel, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), V] of a whole sequence, by the trainer's forward pass."""
    return model.unembed(model.hidden(torch.tensor(list(ids)), [len(ids)])).float()


def assert_same_tokens(model: PolicyModel, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
    """Identical, or a first divergence at a top-two gap below `GAP`."""
    for place, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            best, second = logits_after(model, [*prompt, *ours[:place]])[-1].topk(2).values
            assert best - second < GAP, f"token {place}: {a} is not {b}"
            return
    assert len(ours) == len(theirs)


def greedy_by_transformers(hf: Any, prompt: Sequence[int], new_tokens: int, stops: Sequence[int]) -> list[int]:
    ids = torch.tensor([list(prompt)])
    options = {"do_sample": False, "max_new_tokens": new_tokens, "eos_token_id": list(stops), "pad_token_id": 0}
    output = hf.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return output[0, len(prompt) :].tolist()
