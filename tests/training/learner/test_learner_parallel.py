"""Parallel layouts: the choice of a mode, gradient sums and norms, and running out of memory on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from processes import start
from torch import Tensor, nn
from train_parts import cramped, make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.mesh import Mesh, init_mesh
from assay.models import HFModel
from assay.models.logprobs import token_logprobs
from assay.training.learner import parallel
from assay.training.learner.optim import clip_gradients, make_adamw
from assay.training.learner.pack import Row, rows_of
from assay.training.learner.parallel import in_lockstep, is_fsdp, parallelise, pick_mode, sum_gradients
from assay.training.learner.update import Updater
from assay.types import UserError

ALGO = make_algorithm("grpo")


def some_rows() -> list[Row]:
    groups = make_groups(tiny_decoder())
    ALGO.credit(groups)
    return rows_of(groups, ALGO)


def whole(model: Any) -> Tensor:
    return torch.cat([weight.detach().flatten().double() for _, weight in model.weights()])


def test_parallelise_on_one_process_changes_nothing() -> None:
    model = tiny_decoder()
    before = dict(model.named_parameters())
    assert parallelise(model, Mesh(), "fsdp") is model and not in_lockstep(model, Mesh())
    assert all(before[name] is weight for name, weight in model.named_parameters())


def test_mode_auto_shards_large_models_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = tiny_decoder(), Mesh(torch.device("cuda"))
    on_gpu = tiny_decoder()
    monkeypatch.setattr(type(on_gpu), "device", property(lambda self: gpu.device if self is on_gpu else Mesh().device))
    assert pick_mode("auto", model, Mesh()) == pick_mode("auto", on_gpu, gpu) == "ddp"
    monkeypatch.setattr(parallel, "LARGE", 1000)
    assert pick_mode("auto", model, Mesh()) == "ddp" and pick_mode("auto", on_gpu, gpu) == "fsdp"
    assert pick_mode("auto", model, gpu) == "ddp"  # its updates run in another process
    assert pick_mode("ddp", model, gpu) == "ddp" and pick_mode("fsdp", model, Mesh()) == "fsdp"


def small_gpt2() -> HFModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return HFModel(GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=64)).double())


def train_gpt2(mesh: Mesh, mode: str) -> Tensor:
    model = parallelise(small_gpt2(), mesh, mode)
    updater = Updater(model, make_adamw(model, 1e-2), token_budget=60, mesh=mesh)
    for _ in range(2):
        updater.step(some_rows(), ALGO, 1e-2)
    return whole(model)


def check_fallback(mesh: Mesh) -> None:
    expected = train_gpt2(Mesh(), "ddp")
    assert (expected - whole(small_gpt2())).abs().max() > 1e-3
    for mode in ("ddp", "fsdp"):
        assert (train_gpt2(mesh, mode) - expected).abs().max() < 1e-9
    with pytest.raises(UserError, match=r"parallel\.tp is not for models that run through transformers"):
        parallelise(small_gpt2(), init_mesh(2))


def check_low_precision(mesh: Mesh) -> None:
    """Computes in bfloat16, keeps float32 weights; a pass without gradients does not leave rounded weights behind."""
    exact = tiny_decoder(dtype=torch.float32)
    model = parallelise(copy.deepcopy(exact), mesh, "fsdp", torch.bfloat16)
    row = some_rows()[0]
    ids, trained = torch.tensor(row.ids), torch.tensor(row.trained, dtype=torch.bool)
    with torch.no_grad():
        rounded = token_logprobs(model, ids, [len(ids)], trained)[0]
        full = token_logprobs(exact, ids, [len(ids)], trained)[0]
    assert rounded.dtype == torch.float32 and 1e-5 < (rounded - full).abs().max() < 0.2
    assert torch.equal(whole(model), whole(exact))
    updater = Updater(model, make_adamw(model, 1e-2), dtype=torch.bfloat16, mesh=mesh)
    alone = Updater(exact, make_adamw(exact, 1e-2))
    (found, norm, _), (expected, expected_norm, _) = (u.step(some_rows(), ALGO, 1e-2) for u in (updater, alone))
    assert float(found.losses["loss/total"]) == pytest.approx(float(expected.losses["loss/total"]), abs=0.05)
    assert norm == pytest.approx(expected_norm, rel=0.1)
    assert all(weight.dtype == torch.float32 and is_fsdp(weight) for weight in model.parameters())


def check_buckets(mesh: Mesh) -> None:
    parallel.BUCKET = 10
    shapes = [(3,), (4, 2), (30,), (2,), (5, 1)]
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    weights.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    for index, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, index + 10.0 * mesh.rank)
    sum_gradients([*weights, frozen], mesh)
    for index, weight in enumerate(weights):
        assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 2 * index + 10.0))


def check_norm(mesh: Mesh) -> None:
    """Plain, sharded and replicated tensors together, against the norm of all full tensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = init_mesh(2).device_mesh
    assert grid is not None
    pieces = [torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)).double() for seed in range(4)]
    layouts: list[tuple[Any, Any]] = [
        (grid["tp"], [Shard(0)]),
        (grid["tp"], [Replicate()]),
        (grid, [Replicate(), Shard(1)]),
    ]
    split = [distribute_tensor(piece.clone(), *layout) for piece, layout in zip(pieces, layouts, strict=False)]
    weights = [nn.Parameter(torch.zeros_like(grad)) for grad in (*split, pieces[3])]
    for weight, grad in zip(weights, (*split, pieces[3].clone()), strict=True):
        weight.grad = grad
    expected = torch.cat([piece.flatten() for piece in pieces]).norm()
    assert float(clip_gradients(weights, 1.5)) == pytest.approx(float(expected), abs=1e-12)
    for weight, piece in zip(weights, pieces, strict=True):
        grad: Any = weight.grad
        found = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(found, piece * (1.5 / (expected + 1e-6)), rtol=0, atol=1e-12)


def check_memory(mesh: Mesh) -> None:
    """One rank runs out of memory: all ranks halve the budget, and nothing is counted twice."""
    rows = some_rows()
    longest = max(len(row.ids) for row in rows)
    model = cramped(longest + 5 if mesh.rank == 1 else 10**9)
    updater = Updater(model, make_adamw(model, 1e-2), token_budget=4096, mesh=mesh)
    with pytest.warns(UserWarning, match="out of memory"):
        sums, norm, _ = updater.step(rows, ALGO, 1e-2)
    alone = tiny_decoder()
    expected, expected_norm, _ = Updater(alone, make_adamw(alone, 1e-2)).step(rows, ALGO, 1e-2)
    assert set(mesh.all_gather_objects(updater.token_budget)) == {updater.token_budget} and updater.token_budget < 4096
    assert float(sums.tokens) == float(expected.tokens) and norm == pytest.approx(expected_norm, abs=1e-12)
    assert (whole(model) - whole(alone)).abs().max() < 1e-9

    updater.token_budget, model.room = longest, 1 if mesh.rank == 1 else 10**9  # type: ignore[assignment]
    said = "^out of memory" if mesh.rank == 1 else "^another rank ran out of memory"
    with pytest.raises(UserError, match=f"{said} with a single sequence"):
        updater.step(rows, ALGO, 1e-2)

    model = parallelise(cramped(1), mesh, "fsdp")
    updater = Updater(model, make_adamw(model, 1e-2), mesh=mesh)
    with pytest.raises(UserError, match=rf"rank {mesh.rank} ran out of memory: lower train\.token_budget, now 16384"):
        updater.step(rows, ALGO, 1e-2)


def all_checks(mesh: Mesh) -> None:
    for check in (check_buckets, check_norm, check_memory, check_low_precision, check_fallback):
        check(mesh)


@pytest.mark.slow
def test_two_ranks_sum_gradients_norms_and_budgets() -> None:
    start(2, all_checks)
