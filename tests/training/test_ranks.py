"""Ranks that differ, with processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh_parts import trained_muon_updater
from processes import start
from train_parts import tiny_decoder

from assay.build.problems import build_algorithm
from assay.config import TrainConfig
from assay.mesh import Mesh, check_equal, init_mesh, local_tensor
from assay.runs import checkpoints
from assay.tasks import make_task
from assay.tasks.base import LazyPrompts
from assay.text import Renderer, char_tokenizer
from assay.training import checkpoint
from assay.training.learner.update import Updater
from assay.training.parallel import (
    check_inputs,
    check_layout,
    check_weights,
    code_versions,
    compared_settings,
    describe_prompts,
)
from assay.types import Prompt, UserError


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
    check_layout(cfg, Mesh(), algo)  # one process can
    if message:
        with pytest.raises(UserError, match=message):
            check_layout(cfg, ranks, algo)
    else:
        check_layout(cfg, ranks, algo)


def test_quantized_weights_are_not_sharded() -> None:
    ranks: Any = SimpleNamespace(world=2, tp_size=1, dp_size=2)
    cfg = TrainConfig(lora={"rank": 2, "quantize": "nf4"}, parallel={"mode": "fsdp"})
    with pytest.raises(UserError, match="quantized weights cannot be sharded"):
        check_layout(cfg, ranks, build_algorithm(cfg))


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
    assert compared_settings(cfg) == compared_settings(TrainConfig())
    for change in (
        {"seed": 1},
        {"model": "/elsewhere"},
        {"optim": {"lr": 0.5}},
        {"algo": {"updates": 3}},
        {"task": {"args": {"size": 3}}},
    ):
        assert compared_settings(TrainConfig.model_validate(change)) != compared_settings(TrainConfig())
    file = tmp_path / "mine.py"
    found = []
    for text in ("def reward(): return 0", "def reward(): return 1"):
        file.write_text(text)
        found.append(compared_settings(TrainConfig.model_validate({"reward": {"function": f"{file}:reward"}})))
    assert {key for key in found[0] if found[0][key] != found[1][key]} == {"reward.function"}  # its code differs


def test_descriptions_of_code_and_prompts_are_equal_in_every_process(tmp_path: Path) -> None:
    assert code_versions() == code_versions() and len(code_versions()) == 9
    one = Prompt("a/1", ({"role": "user", "content": "1 + 1"},), "2", fields={"odd": object(), (1, 2): 3, "n": {4}})
    same = Prompt("a/1", ({"role": "user", "content": "1 + 1"},), "2", fields={"odd": object(), (1, 2): 3, "n": {5}})
    assert describe_prompts([one]) == describe_prompts([same]) != describe_prompts([Prompt("a/1", one.messages, "3")])
    made: list[int] = []
    endless = LazyPrompts(lambda index: made.append(index) or one, 2**31)  # type: ignore[func-returns-value]
    assert describe_prompts(endless).startswith("2147483648 (hash ") and len(made) < 100


def refused(mesh: Mesh, said: str, work: Callable[[], None]) -> None:
    with pytest.raises(UserError, match=said):
        work()
    mesh.barrier()


def differ(mesh: Mesh) -> None:
    second = mesh.rank == 1
    refused(
        mesh,
        "rank 1 on .* differs: tp is 2 there, and 1 on rank 0",
        lambda: init_mesh(1, "cpu", {"tp": f"{1 + second}"}),
    )
    train, policy, renderer = make_task("abacus").prompts("train")[:40], tiny_decoder(), Renderer(char_tokenizer())
    check_inputs(mesh, {"train": train, "sft": ()}, renderer, policy)
    fewer = train[:39] if second else train
    refused(mesh, r"train prompts is 39 \(hash", lambda: check_inputs(mesh, {"train": fewer}, renderer, policy))
    spoken = Renderer(char_tokenizer(), system="Think." if second else None)
    refused(mesh, "first prompts' tokens", lambda: check_inputs(mesh, {"train": train}, spoken, policy))
    flip(next(policy.parameters()), second)
    refused(mesh, "rank 1 on .* fingerprint of the model", lambda: check_weights(mesh, "model", policy))


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
