"""Muon against singular values, plain float64 steps, torch's own Muon, and itself on sharded matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from muon_shards import noise, train, worker
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from train_parts import tiny_decoder

from assay.config import OptimConfig
from assay.training.learner.optim import ITERATIONS, QUINTIC, make_optimizer, orthogonalised

SHAPES = [(8, 8), (24, 6), (5, 17), (1, 7), (9, 1)]


def by_svd(matrix: Tensor) -> Tensor:
    """The iteration as it acts on singular values, one number at a time."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    values = []
    for value in (s / s.square().sum().sqrt()).tolist():
        for _ in range(ITERATIONS):
            value = sum(factor * value**power for factor, power in zip(QUINTIC, (1, 3, 5), strict=True))
        values.append(value)
    return u @ torch.tensor(values, dtype=matrix.dtype).diag() @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-9, 1e6])
def test_singular_values_become_about_one_and_singular_vectors_stay(shape: tuple[int, int], size: float) -> None:
    matrix = size * noise(shape)
    found = orthogonalised(matrix)
    assert torch.allclose(found, by_svd(matrix), rtol=0, atol=1e-10)
    values = torch.linalg.svdvals(found)
    assert float(values.min()) > 0.6 and float(values.max()) < 1.25
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float((found - u @ v).abs().max()) < 0.4


def test_a_zero_matrix_stays_zero() -> None:
    assert not orthogonalised(torch.zeros(3, 4)).any()


def test_single_precision_is_close_and_keeps_its_dtype() -> None:
    matrix = noise((12, 20))
    found = orthogonalised(matrix.float())
    assert found.dtype == torch.float32 and torch.allclose(found.double(), orthogonalised(matrix), atol=1e-4)


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
    ours = make_optimizer(model, OptimConfig(name="muon", lr=0.01, matrix_lr=0.02, embedding_lr=0.03, weight_decay=0.1))
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
    optimizer = make_optimizer(model, OptimConfig(name="muon", matrix_lr=0.02))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)) and not optimizer.state


def test_a_matrix_in_one_shard_equals_the_whole_matrix(tmp_path: Path) -> None:
    worker(0, (1,), [[Shard(0)]], str(tmp_path / "meeting"))


@pytest.mark.slow
def test_two_shards_are_orthogonalised_as_one_matrix(tmp_path: Path) -> None:
    placements: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]
    torch.multiprocessing.spawn(worker, ((2,), placements, str(tmp_path / "meeting")), nprocs=2)


@pytest.mark.slow
def test_two_by_two_shards_are_orthogonalised_as_one_matrix(tmp_path: Path) -> None:
    placements: list[list[Placement]] = [[Shard(0), Shard(1)], [Shard(1), Shard(0)], [Replicate(), Shard(0)]]
    torch.multiprocessing.spawn(worker, ((2, 2), placements, str(tmp_path / "meeting")), nprocs=4)
