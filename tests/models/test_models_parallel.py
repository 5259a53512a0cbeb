"""The decoder and the vocabulary in parts compute what they compute whole, gradients included."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from processes import start
from torch import Tensor

from assay.mesh import Mesh, init_mesh, local_tensor
from assay.models import Decoder, ModelSpec
from assay.models.logprobs import token_logprobs
from assay.models.parallel import VocabularyEmbedding, VocabularyHead, check_sizes, shard_decoder, split
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


WORDS, SIZE, COUNT = 23, 8, 11  # 23 leaves the second of two ranks one word less than the first


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain_scores(hidden: Tensor, table: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(hidden @ table.T / temperature, -1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(1)


def score(mesh: Mesh) -> None:
    mesh = init_mesh(mesh.world)
    assert mesh.tp_group is not None
    targets = torch.randint(WORDS, (COUNT,), generator=torch.Generator().manual_seed(3))
    targets[:3] = torch.tensor([0, WORDS - 1, WORDS // 2 + 1])
    mix, spread = numbers(COUNT, seed=4), numbers(COUNT, seed=5)
    for temperature in (1.0, 0.6):
        for at_once in (1, 3 * WORDS, 10**6):
            hidden, table = 3 * numbers(COUNT, SIZE, seed=1), numbers(WORDS, SIZE, seed=2)
            for tensor in (hidden, table):
                tensor.requires_grad_(True)
            head = VocabularyHead(split(table, mesh, 0), mesh.tp_rank, mesh.tp_group)
            expected = plain_scores(hidden, table, targets, temperature)
            (expected[0] * mix + expected[1] * spread).sum().backward()
            ours = hidden.detach().clone().requires_grad_(True)
            found = head.scores(ours, targets, temperature, at_once)
            (found[0] * mix + found[1] * spread).sum().backward()
            assert hidden.grad is not None and ours.grad is not None and table.grad is not None
            for a, b in ((found[0], expected[0]), (found[1], expected[1]), (ours.grad, hidden.grad)):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
            torch.testing.assert_close(head.weight.grad.full_tensor(), table.grad, rtol=0, atol=1e-12)  # type: ignore[union-attr]
            torch.testing.assert_close(head(ours), hidden @ table.T, rtol=0, atol=1e-12)
    nothing = head.scores(ours[:0], targets[:0], 1.0, 5)
    assert nothing[0].shape == nothing[1].shape == (0,) and nothing[0].dtype == torch.float64
    (nothing[0].sum() + nothing[1].sum()).backward()


def large_logits(mesh: Mesh) -> None:
    """Neither overflow nor a loss of the small ones, in float32 and where the largest stands on another rank."""
    mesh = init_mesh(mesh.world)
    assert mesh.tp_group is not None
    table = torch.zeros(WORDS, SIZE)
    table[:, 0] = torch.linspace(-300, 300, WORDS)
    head = VocabularyHead(split(table, mesh, 0), mesh.tp_rank, mesh.tp_group)
    hidden, targets = torch.eye(SIZE)[:1].repeat(2, 1), torch.tensor([0, WORDS - 1])
    logprobs, entropies = head.scores(hidden, targets, 1.0, 10)
    torch.testing.assert_close(logprobs, torch.tensor([-600.0, 0.0]))
    torch.testing.assert_close(entropies, torch.zeros(2), rtol=0, atol=1e-6)


def blocked_tokens(mesh: Mesh) -> None:
    """Logits that overflow to -inf count for nothing, also where they are all that a rank has."""
    mesh = init_mesh(mesh.world)
    assert mesh.tp_group is not None
    targets = torch.zeros(COUNT, dtype=torch.int64)
    for blocked in (slice(5, 9), slice(-(-WORDS // mesh.world), WORDS)):
        hidden, table = numbers(COUNT, SIZE, seed=1), numbers(WORDS, SIZE, seed=2)
        hidden[:, 0] = hidden[:, 0].abs() + 1
        table[blocked] = 0.0
        table[blocked, 0] = torch.finfo(torch.float64).min
        allowed = torch.cat((table[: blocked.start], table[blocked.stop :])).requires_grad_(True)
        hidden.requires_grad_(True)
        ours = hidden.detach().clone().requires_grad_(True)
        head = VocabularyHead(split(table.requires_grad_(True), mesh, 0), mesh.tp_rank, mesh.tp_group)
        expected, found = plain_scores(hidden, allowed, targets, 0.6), head.scores(ours, targets, 0.6, 3 * WORDS)
        for scores in (expected, found):
            (scores[0] - 2 * scores[1]).sum().backward()
        assert hidden.grad is not None and ours.grad is not None and allowed.grad is not None
        for a, b in ((found[0], expected[0]), (found[1], expected[1]), (ours.grad, hidden.grad)):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        grad = head.weight.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(torch.cat((grad[: blocked.start], grad[blocked.stop :])), allowed.grad)
        assert not grad[blocked].any()


def embed(mesh: Mesh) -> None:
    mesh = init_mesh(mesh.world)
    assert mesh.tp_group is not None
    table = numbers(WORDS, SIZE, seed=7).requires_grad_(True)
    part = VocabularyEmbedding(split(table, mesh, 0), mesh.tp_rank, mesh.tp_group)
    ids = torch.tensor([0, 5, 5, 11, 12, WORDS - 1])
    mix = numbers(len(ids), SIZE, seed=8)
    (table[ids] * mix).sum().backward()
    found = part(ids)
    (found * mix).sum().backward()
    assert torch.equal(found, table[ids])
    assert torch.equal(part.weight.grad.full_tensor(), table.grad)  # type: ignore[union-attr, arg-type]


def all_of_it(mesh: Mesh) -> None:
    score(mesh)
    large_logits(mesh)
    blocked_tokens(mesh)
    embed(mesh)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_vocabulary_in_parts_is_a_whole_one(ranks: int) -> None:
    start(ranks, all_of_it)
