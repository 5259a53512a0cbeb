"""Schedules, clipping, parameter groups, AdamW; Muon against singular values, plain steps, torch's own, and shards."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from muon_shards import noise, train, worker
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from train_parts import SPEC, make_adamw, tiny_decoder

from assay.config import OptimConfig
from assay.training.learner import optim
from assay.types import UserError


def test_warm_up_rises_in_equal_steps_to_one() -> None:
    for kind in ("constant", "linear", "cosine"):
        assert [optim.lr_factor(kind, step, 100, warmup=4) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
        assert optim.lr_factor(kind, 4, 100, warmup=4) == 1.0


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("total", "warmup"), [(10, 0), (50, 7), (1, 0)])
def test_schedules_have_their_closed_forms(total: int, warmup: int, final: float) -> None:
    for step in range(warmup, total + 1):
        part = (step - warmup) / (total - warmup)
        assert optim.lr_factor("constant", step, total, warmup, final) == 1.0
        assert optim.lr_factor("linear", step, total, warmup, final) == pytest.approx(1 + (final - 1) * part)
        cosine = final + (1 - final) * (1 + math.cos(math.pi * part)) / 2
        assert optim.lr_factor("cosine", step, total, warmup, final) == pytest.approx(cosine)
    assert optim.lr_factor("linear", total, total, warmup, final) == pytest.approx(final)
    assert optim.lr_factor("cosine", total, total, warmup, final) == pytest.approx(final)


def test_warmup_longer_than_the_run_is_allowed() -> None:
    assert [optim.lr_factor("linear", step, 3, warmup=10) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert 0 <= optim.lr_factor("cosine", 0, 0) <= 1


@pytest.mark.parametrize("max_norm", [1.0, 1e3])
def test_clipping_equals_that_of_torch(max_norm: float) -> None:
    ours, theirs = tiny_decoder(), tiny_decoder()
    for model in (ours, theirs):
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.grad = torch.empty(p.shape, dtype=p.dtype).normal_(generator=generator)
    norm = optim.clip_gradients(ours.parameters(), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    assert float(norm) == pytest.approx(float(expected))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, rtol=1e-12)


def test_a_limit_of_zero_never_clips() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([3.0, 4.0, 0.0])
    assert float(optim.clip_gradients([weight], 0.0)) == 5.0
    assert weight.grad.tolist() == [3.0, 4.0, 0.0]


def test_only_matrices_decay() -> None:
    model = tiny_decoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_adamw(model, lr=0.1, weight_decay=0.5)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if p.dim() >= 2 else before[name]
        assert torch.allclose(p, expected, rtol=1e-12), name


def test_a_step_equals_adamw_by_its_definition() -> None:
    model, other = tiny_decoder(), tiny_decoder()
    ours = make_adamw(model, lr=1.0, betas=(0.8, 0.9), eps=1e-6)
    theirs = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.0, fused=False)
    optim.set_lr(ours, 0.01)
    for seed in range(3):
        for each in (model, other):
            generator = torch.Generator().manual_seed(seed)
            for p in each.parameters():
                p.grad = torch.empty(p.shape, dtype=p.dtype).normal_(generator=generator)
        ours.step()
        theirs.step()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


RATES = {"matrix_lr": 0.02, "embedding_lr": 0.2, "head_lr": 0.004}
LAYERS = ["model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"]
NORMS = ["model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.q_proj.bias"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group_with_the_rate_of_its_kind(name: str, tied: bool) -> None:
    model = tiny_decoder(spec=replace(SPEC, tied=tied, qkv_bias=True))
    optimizer = optim.make_optimizer(model, OptimConfig.model_validate({"name": name, "lr": 1e-3, **RATES}))
    listed = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters())
    names = dict(model.named_parameters())
    for factor in (1.0, 0.05):
        optim.set_lr(optimizer, 1e-3 * factor)
        rates = {
            n: g["lr"] for n, p in names.items() for g in optimizer.param_groups if any(p is q for q in g["params"])
        }
        expected = dict.fromkeys(LAYERS, 0.02) | dict.fromkeys(NORMS, 1e-3) | {"model.embed_tokens.weight": 0.2}
        expected |= {} if tied else {"lm_head.weight": 0.004}
        assert {n: rates[n] for n in expected} == pytest.approx({n: r * factor for n, r in expected.items()})


def test_muon_needs_a_learning_rate_for_matrices() -> None:
    with pytest.raises(UserError, match=r"optim\.matrix_lr"):
        optim.make_optimizer(tiny_decoder(), OptimConfig(name="muon"))


def test_a_fallback_model_has_the_same_kinds() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from assay.models import HFModel

    model = HFModel(GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16)))
    optimizer = optim.make_optimizer(model, OptimConfig(name="muon", matrix_lr=0.1))
    kinds = {id(p): group["kind"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: kinds[id(p)] for name, p in model.named_parameters()}
    assert found.pop("hf.transformer.wte.weight") == found.pop("hf.transformer.wpe.weight") == "embedding"
    expected = {n: "matrix" if n.endswith(("attn.weight", "proj.weight", "fc.weight")) else "rest" for n in found}
    assert found == expected and "matrix" in found.values()


SHAPES = [(8, 8), (24, 6), (5, 17), (1, 7), (9, 1)]


def by_svd(matrix: Tensor) -> Tensor:
    """The iteration as it acts on singular values, one number at a time."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    values = []
    for value in (s / s.square().sum().sqrt()).tolist():
        for _ in range(optim.ITERATIONS):
            value = sum(factor * value**power for factor, power in zip(optim.QUINTIC, (1, 3, 5), strict=True))
        values.append(value)
    return u @ torch.tensor(values, dtype=matrix.dtype).diag() @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_singular_values_become_about_one_and_singular_vectors_stay(shape: tuple[int, int], size: float) -> None:
    matrix = size * noise(shape)
    found = optim.orthogonalised(matrix)
    assert torch.allclose(found, by_svd(matrix), rtol=0, atol=1e-10)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.25
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float((found - u @ v).abs().max()) < 0.4


def test_a_zero_matrix_stays_zero() -> None:
    assert not optim.orthogonalised(torch.zeros(3, 4)).any()


def test_single_precision_is_close_and_keeps_its_dtype() -> None:
    matrix = noise((12, 20))
    found = optim.orthogonalised(matrix.float())
    assert found.dtype == torch.float32 and torch.allclose(found.double(), optim.orthogonalised(matrix), atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_the_definition_by_singular_value_decomposition(shape: tuple[int, int]) -> None:
    gradients = [noise(shape, seed) for seed in (1, 2, 3)]
    expected, momentum = noise(shape), torch.zeros(shape, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.9 * momentum + 0.1 * gradient
        step = by_svd(0.9 * momentum + 0.1 * gradient) * max(1, shape[0] / shape[1]) ** 0.5
        expected = expected - 0.05 * 0.1 * expected - 0.05 * step
    found = train(nn.Parameter(noise(shape)), gradients)
    assert torch.allclose(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("fused", [True, False])
def test_vectors_and_embeddings_are_updated_by_adamw(fused: bool) -> None:
    model, other = tiny_decoder(), tiny_decoder()
    ours = optim.make_optimizer(
        model, OptimConfig(name="muon", lr=0.01, matrix_lr=0.02, embedding_lr=0.03, weight_decay=0.1)
    )
    for group in ours.param_groups:
        group["fused"] = fused
    layers = [group for group in ours.param_groups if group["kind"] == "matrix"]
    chosen = {id(p) for group in layers for p in group["params"]}
    names = [name for name, p in model.named_parameters() if id(p) not in chosen]
    embedding, *vectors = (dict(other.named_parameters())[name] for name in names)
    groups = [{"params": [embedding], "lr": 0.03, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), fused=False)
    for seed in range(3):
        for each in (model, other):
            for number, p in enumerate(each.parameters()):
                p.grad = noise(tuple(p.shape), 100 * seed + number)
        ours.step()
        theirs.step()
    assert len(names) > 5
    for name in names:
        mine, plain = dict(model.named_parameters())[name], dict(other.named_parameters())[name]
        assert torch.allclose(mine, plain, rtol=0, atol=1e-12), name


def test_a_parameter_without_gradient_stays() -> None:
    model = tiny_decoder()
    optimizer = optim.make_optimizer(model, OptimConfig(name="muon", matrix_lr=0.02))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)) and not optimizer.state


def test_a_matrix_in_one_shard_equals_the_whole_matrix(tmp_path: Path) -> None:
    worker(0, (1,), [[Shard(0)]], str(tmp_path / "meeting"))


@pytest.mark.slow
def test_two_by_two_shards_are_orthogonalised_as_one_matrix(tmp_path: Path) -> None:
    placements: list[list[Placement]] = [
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(0)],
    ]
    torch.multiprocessing.spawn(worker, ((2, 2), placements, str(tmp_path / "meeting")), nprocs=4)
