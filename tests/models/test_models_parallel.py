"""The decoder in parts computes what it computes whole."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from processes import start

from assay.mesh import Mesh, init_mesh, local_tensor
from assay.models import Decoder, ModelSpec
from assay.models.logprobs import token_logprobs
from assay.models.parallel import check_sizes, shard_decoder
from assay.types import UserError

LENGTHS = [5, 1, 9]
QWEN3 = ModelSpec("qwen3", 23, 16, 2, 4, 2, 4, 24, 64, qk_norm=True)
GEMMA3 = replace(QWEN3, family="gemma3_text", windows=(3, 0), local_rope_theta=50.0, query_scalar=3)
LLAMA = replace(QWEN3, family="llama", tied=False, qk_norm=False, qkv_bias=True, out_bias=True, mlp_bias=True)


def random_decoder(spec: ModelSpec) -> Decoder:
    model = Decoder(spec).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(0.3 * noise if weight.dim() == 2 else 1.0 + 0.2 * noise)
    return model


def compare(mesh: Mesh, spec: ModelSpec) -> None:
    mesh = init_mesh(2)
    whole = random_decoder(spec)
    before = {name: weight.detach().clone() for name, weight in whole.weights()}
    parts = copy.deepcopy(whole)
    shard_decoder(parts, mesh)
    assert [name for name, _ in parts.named_parameters()] == list(before)
    assert all(torch.equal(weight, before[name]) for name, weight in parts.weights())
    held = sum(local_tensor(weight).numel() for weight in parts.parameters())
    assert held < 0.6 * sum(weight.numel() for weight in before.values())

    ids = torch.randint(spec.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    chosen = torch.ones(len(ids), dtype=torch.bool)
    chosen[[0, 5, 6]] = False
    results = []
    for model in (whole, parts):
        logprobs, entropy = token_logprobs(model, ids, LENGTHS, chosen, 0.7)
        (logprobs * torch.arange(len(logprobs)) + 0.3 * entropy).sum().backward()
        results.append((model.unembed(model.hidden(ids, LENGTHS)), logprobs, entropy))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    for (name, expected), found in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=0, atol=1e-11, msg=name)  # type: ignore[attr-defined]
        if found.placements[0].is_replicate():  # type: ignore[attr-defined]
            # full_tensor() shows one copy; each rank holds its own, and all of them must be right
            torch.testing.assert_close(local_tensor(found.grad), expected.grad, rtol=0, atol=1e-11, msg=name)


def both(mesh: Mesh) -> None:
    compare(mesh, QWEN3)
    compare(mesh, LLAMA)
    compare(mesh, GEMMA3)


@pytest.mark.slow
def test_values_gradients_and_weights_are_those_of_the_whole() -> None:
    start(2, both)


@pytest.mark.parametrize(
    ("changes", "tp", "said"),
    [
        ({"heads": 6, "kv_heads": 2}, 4, "tp = 4 does not divide the 6 attention heads of this model: choose 1 or 2"),
        ({}, 4, "tp = 4 does not divide the 2 key-value heads of this model: choose 1 or 2"),
        ({"intermediate": 25}, 2, "tp = 2 does not divide the 25 MLP units of this model: choose 1"),
        ({"kv_heads": 4, "vocab_size": 5}, 4, "tp = 4 is too much for a vocabulary of 5"),
        ({"family": "phi3"}, 2, "phi3 models cannot be split over ranks"),
        ({"family": "glm4"}, 2, "glm4 models cannot be split over ranks"),
        ({"family": "olmo2"}, 2, "olmo2 models cannot be split over ranks"),
    ],
)
def test_a_model_that_cannot_be_split_is_told(changes: dict[str, int], tp: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_sizes(replace(QWEN3, **changes), tp)  # type: ignore[arg-type]


def test_odd_vocabularies_can_be_split() -> None:
    check_sizes(QWEN3, 2)
