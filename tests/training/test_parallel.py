"""Parallel layouts equal one process: modes, gradients, memory, optimizer state; ranks that differ are reported."""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mesh_parts import SPECS, STEPS, Case, muon_updater, train, train_cases, trained_muon_updater
from processes import start
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from train_parts import cramped, make_adamw, make_groups, tiny_decoder

from assay.algos import make_algorithm
from assay.build.problems import build_algorithm
from assay.config import TrainConfig
from assay.mesh import Mesh, check_equal, init_mesh, local_tensor
from assay.models import HFModel
from assay.models.logprobs import token_logprobs
from assay.runs import checkpoints
from assay.runs.files import disk_error
from assay.tasks import make_task
from assay.tasks.base import LazyPrompts
from assay.text import Renderer, char_tokenizer
from assay.training import checkpoint, parallel
from assay.training.learner.optim import clip_gradients, optimizer_tensors
from assay.training.learner.pack import Row, rows_of
from assay.training.learner.update import Updater
from assay.types import Prompt, UserError

ALGO = make_algorithm("grpo")
LAYOUTS = ((1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"))  # tensor-parallel ranks of four, and the others' mode


def some_rows() -> list[Row]:
    groups = make_groups(tiny_decoder())
    ALGO.credit(groups)
    return rows_of(groups, ALGO)


def whole(model: Any) -> Tensor:
    return torch.cat([weight.detach().flatten().double() for _, weight in model.weights()])


def test_parallelise_on_one_process_changes_nothing() -> None:
    model = tiny_decoder()
    before = dict(model.named_parameters())
    assert parallel.parallelise(model, Mesh(), "fsdp") is model and not parallel.in_lockstep(model, Mesh())
    assert all(before[name] is weight for name, weight in model.named_parameters())


def test_mode_auto_shards_large_models_on_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gpu = tiny_decoder(), Mesh(torch.device("cuda"))
    on_gpu = tiny_decoder()
    monkeypatch.setattr(type(on_gpu), "device", property(lambda self: gpu.device if self is on_gpu else Mesh().device))
    assert parallel.pick_mode("auto", model, Mesh()) == parallel.pick_mode("auto", on_gpu, gpu) == "ddp"
    monkeypatch.setattr(parallel, "LARGE", 1000)
    assert parallel.pick_mode("auto", model, Mesh()) == "ddp" and parallel.pick_mode("auto", on_gpu, gpu) == "fsdp"
    assert parallel.pick_mode("auto", model, gpu) == "ddp"  # its updates run in another process
    assert parallel.pick_mode("ddp", model, gpu) == "ddp" and parallel.pick_mode("fsdp", model, Mesh()) == "fsdp"


def small_gpt2() -> HFModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return HFModel(GPT2LMHeadModel(GPT2Config(vocab_size=23, n_embd=16, n_layer=2, n_head=2, n_positions=64)).double())


def train_gpt2(mesh: Mesh, mode: str) -> Tensor:
    model = parallel.parallelise(small_gpt2(), mesh, mode)
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
        parallel.parallelise(small_gpt2(), init_mesh(2))


def check_low_precision(mesh: Mesh) -> None:
    """Computes in bfloat16, keeps float32 weights; a pass without gradients does not leave rounded weights behind."""
    exact = tiny_decoder(dtype=torch.float32)
    model = parallel.parallelise(copy.deepcopy(exact), mesh, "fsdp", torch.bfloat16)
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
    assert all(weight.dtype == torch.float32 and parallel.is_fsdp(weight) for weight in model.parameters())


def check_buckets(mesh: Mesh) -> None:
    parallel.BUCKET = 10
    shapes = [(3,), (4, 2), (30,), (2,), (5, 1)]
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    weights.append(nn.Parameter(torch.zeros(2, dtype=torch.float64)))
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    for index, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, index + 10.0 * mesh.rank)
    parallel.sum_gradients([*weights, frozen], mesh)
    for index, weight in enumerate(weights):
        assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 2 * index + 10.0))


def check_norm(mesh: Mesh) -> None:
    """Plain, sharded and replicated tensors together, against the norm of all full tensors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    grid = init_mesh(2).device_mesh
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

    model = parallel.parallelise(cramped(1), mesh, "fsdp")
    updater = Updater(model, make_adamw(model, 1e-2), mesh=mesh)
    with pytest.raises(UserError, match=rf"rank {mesh.rank} ran out of memory: lower train\.token_budget, now 16384"):
        updater.step(rows, ALGO, 1e-2)


def all_checks(mesh: Mesh) -> None:
    for check in (check_buckets, check_norm, check_memory, check_low_precision, check_fallback):
        check(mesh)


@pytest.mark.slow
def test_two_ranks_sum_gradients_norms_and_budgets() -> None:
    start(2, all_checks)


def differences(case: Case, folder: Path) -> tuple[float, float]:
    """Largest differences from one process: of any metric of any step (relative above 1), and of any final weight."""
    metrics, weights = train(Case(case.family, double=case.double), Mesh())
    left = json.loads((folder / f"{case.name}.json").read_text())
    found = load_file(folder / f"{case.name}.safetensors")
    assert len(set(left["fingerprints"])) == 1, "ranks hold different weights"
    assert weights.keys() == found.keys() and len(left["metrics"]) == STEPS
    assert metrics[0]["optim/grad_norm"] > 0.1 and metrics[0]["policy/kl"] > 0.1  # clipped, and with a reference
    gaps = []
    for here, there in zip(metrics, left["metrics"], strict=True):
        assert here.keys() == there.keys()
        gaps += [abs(here[key] - there[key]) / max(1.0, abs(here[key])) for key in here]
    return max(gaps), max(float((weights[name] - found[name]).abs().max()) for name in weights)


@pytest.mark.slow
def test_every_layout_of_every_family_equals_one_process(tmp_path: Path) -> None:
    cases = [Case(family, mode, tp, family != "qwen2") for family in SPECS for tp, mode in LAYOUTS]
    start(4, train_cases, tmp_path, cases)
    for case in cases:
        metric, weight = differences(case, tmp_path)
        limit = 1e-9 if case.double else 1e-4
        assert metric < limit and weight < limit, (case.name, metric, weight)


TENSORS = {"a|exp_avg": torch.randn(3, 4, dtype=torch.float64), "b|momentum": torch.randn(5), "a|step": torch.tensor(3)}


def test_tensors_are_loaded_from_shards_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel.save_sharded(tmp_path / "parts", TENSORS, Mesh())
    (tmp_path / "whole").mkdir()
    save_file(TENSORS, tmp_path / "whole" / "optimizer.safetensors")
    (tmp_path / "several").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FILE_BYTES", 50)
        checkpoint.write_files(checkpoint.files_of(TENSORS, tmp_path / "several"))
    assert len(list((tmp_path / "several").iterdir())) == 2
    for folder in (tmp_path / "parts", tmp_path / "whole", tmp_path / "several"):
        assert {file.suffix for file in folder.iterdir()} == {".safetensors"}  # and no pickle
        assert parallel.saved_shapes(folder) == {name: tensor.shape for name, tensor in TENSORS.items()}
        found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
        parallel.load_tensors(folder, found)
        assert all(found[name].equal(tensor) for name, tensor in TENSORS.items())


def moments(found: Updater) -> dict[str, Tensor]:
    tensors = optimizer_tensors(found.policy.named_parameters(), found.optimizer)
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in tensors.items()}


def move(_: Mesh, folder: Path) -> None:
    """State saved in any layout is loaded bit by bit in any other."""
    for step, layout in enumerate(LAYOUTS):
        saved = trained_muon_updater(*layout)
        checkpoint.save(folder, {"step": step}, saved.policy, saved.optimizer, char_tokenizer(), saved.mesh)
        assert (checkpoints.folder(folder, step) / "optimizer").is_dir() == parallel.is_sharded(saved.policy)
        assert checkpoints.last_intact(folder) == (step, [])
        expected = moments(saved)
        assert len(expected) > 20
        for other in LAYOUTS:
            found = muon_updater(*other)
            checkpoint.load_optimizer(folder, step, found.policy, found.optimizer)
            got = moments(found)
            assert got.keys() == expected.keys() and all(got[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_optimizer_state_moves_between_layouts(tmp_path: Path) -> None:
    start(4, move, tmp_path)


def fill_disk(mesh: Mesh, folder: Path) -> None:
    saved = trained_muon_updater(1, "fsdp")
    checkpoint.save(folder, {"step": 1}, saved.policy, saved.optimizer, char_tokenizer(), saved.mesh)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if mesh.rank == 1:
        dcp.HuggingFaceStorageWriter.write_data = full  # type: ignore[method-assign, assignment]
    kind, said = (UserError, "the disk is full") if mesh.is_main else (RuntimeError, "No space left")
    with pytest.raises(kind, match=said) as caught:
        checkpoint.save(folder, {"step": 2}, saved.policy, saved.optimizer, char_tokenizer(), saved.mesh)
    assert mesh.is_main or disk_error(caught.value)
    mesh.barrier()
    assert checkpoints.last_intact(folder) == (1, [])
    assert not checkpoints.unfinished(checkpoints.folder(folder, 2)).exists()


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_rank(tmp_path: Path) -> None:
    start(2, fill_disk, tmp_path)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"engine": {"name": "native"}}, 1, "needs engine servers: set engine.name to assay, vllm or sglang"),
        ({"engine": {"name": "assay"}}, 2, "set parallel.tp to 1"),
        ({"engine": {"name": "assay"}, "algo": {"recipe": "remax"}}, 1, "no greedy baselines"),
        ({"engine": {"name": "assay"}}, 1, ""),
    ],
)
def test_which_layouts_of_processes_can_train_asynchronously(changes: Any, tp: int, message: str) -> None:
    ranks: Any = SimpleNamespace(world=2, tp_size=tp, dp_size=2 // tp)
    cfg = TrainConfig(source={"name": "async", "max_staleness": 0}, **changes)
    algo = build_algorithm(cfg)
    parallel.check_layout(cfg, Mesh(), algo)  # one process can
    if message:
        with pytest.raises(UserError, match=message):
            parallel.check_layout(cfg, ranks, algo)
    else:
        parallel.check_layout(cfg, ranks, algo)


def test_quantized_weights_are_not_sharded() -> None:
    ranks: Any = SimpleNamespace(world=2, tp_size=1, dp_size=2)
    cfg = TrainConfig(lora={"rank": 2, "quantize": "nf4"}, parallel={"mode": "fsdp"})
    with pytest.raises(UserError, match="quantized weights cannot be sharded"):
        parallel.check_layout(cfg, ranks, build_algorithm(cfg))


def test_the_rank_that_differs_is_reported_with_both_values() -> None:
    usual, other = {"seed": "0", "optim.lr": "0.1", "a": "1"}, {"seed": "1", "optim.lr": "0.2", "a": "1"}
    check_equal([("n0", usual), ("n0", dict(usual)), ("n1", {"a": "1", "only here": "x"})], "-")
    said = "rank 0 on n0 differs: seed is 1 there, and 0 on rank 1; optim.lr is 0.2 there, and 0.1 on rank 1; mend it"
    with pytest.raises(UserError) as raised:
        check_equal([("n0", other), ("n0", usual), ("n1", usual)], "mend it")
    assert str(raised.value) == said
    many = {str(key): "x" for key in range(9)}
    with pytest.raises(UserError, match=r"rank 1 on n1 differs: 0 is y there.*\(and 6 more differences\)"):
        check_equal([("n0", many), ("n1", dict.fromkeys(many, "y"))], "-")


def test_only_settings_of_one_host_may_differ(tmp_path: Path) -> None:
    cfg = TrainConfig()
    cfg.model.tokenizer, cfg.task.path, cfg.runs_dir, cfg.reward.workers = "/here/words", "/here/data", "/here", 7
    assert parallel.compared_settings(cfg) == parallel.compared_settings(TrainConfig())
    for change in (
        {"seed": 1},
        {"model": "/elsewhere"},
        {"optim": {"lr": 0.5}},
        {"algo": {"updates": 3}},
        {"task": {"args": {"size": 3}}},
    ):
        assert parallel.compared_settings(TrainConfig.model_validate(change)) != parallel.compared_settings(
            TrainConfig()
        )
    file = tmp_path / "mine.py"
    found = []
    for text in ("def reward(): return 0", "def reward(): return 1"):
        file.write_text(text)
        found.append(parallel.compared_settings(TrainConfig.model_validate({"reward": {"function": f"{file}:reward"}})))
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"reward.function"}  # its code differs


def test_descriptions_of_code_and_prompts_are_equal_in_every_process() -> None:
    assert parallel.code_versions() == parallel.code_versions() and len(parallel.code_versions()) == 9
    one = Prompt("a/1", ({"role": "user", "content": "1 + 1"},), "2", fields={"odd": object(), (1, 2): 3, "n": {4}})
    same = Prompt("a/1", ({"role": "user", "content": "1 + 1"},), "2", fields={"odd": object(), (1, 2): 3, "n": {5}})
    assert (
        parallel.describe_prompts([one])
        == parallel.describe_prompts([same])
        != parallel.describe_prompts([Prompt("a/1", one.messages, "3")])
    )
    made: list[int] = []
    endless = LazyPrompts(lambda index: made.append(index) or one, 2**31)  # type: ignore[func-returns-value]
    assert parallel.describe_prompts(endless).startswith("2147483648 (hash ") and len(made) < 100


def refused(mesh: Mesh, said: str, work: Callable[[], None]) -> None:
    with pytest.raises(UserError, match=said):
        work()
    mesh.barrier()


def differ(mesh: Mesh) -> None:
    second = mesh.rank == 1
    cfg = TrainConfig.model_validate({"device": "cpu", "optim": {"lr": 0.1 if second else 0.2}})
    refused(
        mesh, r"rank 1 on .* differs: optim\.lr is 0\.1 there, and 0\.2 on rank 0", lambda: parallel.start_mesh(cfg)
    )
    train, policy, renderer = make_task("abacus").prompts("train")[:40], tiny_decoder(), Renderer(char_tokenizer())
    parallel.check_inputs(mesh, {"train": train, "sft": ()}, renderer, policy)
    fewer = train[:39] if second else train
    refused(
        mesh, r"train prompts is 39 \(hash", lambda: parallel.check_inputs(mesh, {"train": fewer}, renderer, policy)
    )
    spoken = Renderer(char_tokenizer(), system="Think." if second else None)
    refused(mesh, "first prompts' tokens", lambda: parallel.check_inputs(mesh, {"train": train}, spoken, policy))
    flip(next(policy.parameters()), second)
    refused(mesh, "rank 1 on .* fingerprint of the model", lambda: parallel.check_weights(mesh, "model", policy))


def flip(weight: torch.Tensor, here: bool) -> None:
    """The last bit of one number."""
    if here:
        local_tensor(weight.detach()).flatten().view(torch.int32)[:1].bitwise_xor_(1)


@pytest.mark.slow
def test_different_settings_data_or_weights_are_reported_on_all_ranks() -> None:
    start(2, differ)


def save(folder: Path, updater: Updater, step: int) -> None:
    checkpoint.save(folder, {"step": step}, updater.policy, updater.optimizer, char_tokenizer(), updater.mesh)


SHARED = [  # layout, and a weight of which several ranks hold the same part
    (1, "ddp", "model.norm.weight"),
    (2, "ddp", "model.layers.0.mlp.up_proj.weight"),  # a part, which one other rank has too
    (2, "ddp", "model.norm.weight"),
    (2, "fsdp", "model.norm.weight"),  # whole for tensor parallelism, a part for FSDP
]


def spoil_replicas(mesh: Mesh, root: Path) -> None:
    for number, (tp, mode, name) in enumerate(SHARED):
        folder, updater = root / f"{number}", trained_muon_updater(tp, mode)
        save(folder, updater, 1)
        weight = dict(updater.policy.named_parameters())[name]
        for tensor in (weight, *updater.optimizer.state[weight].values()):
            if tensor.numel() > 1:
                flip(tensor, mesh.rank == mesh.world - 1)
                refused(
                    mesh, f"{name}.* the checkpoint of step 2 is not written", lambda f=folder, u=updater: save(f, u, 2)
                )
                flip(tensor, mesh.rank == mesh.world - 1)
        assert checkpoints.steps(folder) == [1]
        save(folder, updater, 2)


@pytest.mark.slow
def test_replicas_and_shards_that_differ_by_a_bit_are_not_saved(tmp_path: Path) -> None:
    start(4, spoil_replicas, tmp_path)
