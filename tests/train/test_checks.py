"""Checks of a run: settings without effect or with risks, and ranks that differ (with processes over gloo)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mesh_parts import trained_muon_updater
from processes import start
from train_parts import make_groups, tiny_decoder, weights_of

from assay.config import TrainConfig
from assay.config.settings import load_settings, to_toml
from assay.envs import make_env
from assay.mesh import Mesh, check_equal, init_mesh, local_tensor
from assay.runs import checkpoints
from assay.runs.console import Console
from assay.tasks import Task, make_task
from assay.tasks.base import LazyPrompts
from assay.text import Renderer, char_tokenizer
from assay.train import checkpoint
from assay.train.build import load_problems
from assay.train.checks import (
    check_async_ranks,
    check_inputs,
    check_weights,
    code_versions,
    compared_settings,
    describe_prompts,
    risky_settings,
    unused_settings,
)
from assay.train.components import build_algorithm
from assay.train.learner.optim import make_adamw
from assay.train.learner.update import Updater
from assay.types import Prompt, UserError

ROOT = Path(__file__).resolve().parents[2]


def settings(file: Path | None = None, **changes: Any) -> TrainConfig:
    return load_settings(TrainConfig, file, {key.replace("__", "."): value for key, value in changes.items()})


def unused(file: Path | None = None, task: Task | None = None, **changes: Any) -> list[str]:
    cfg = settings(file, **changes)
    return list(unused_settings(cfg, build_algorithm(cfg), task))


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda file: file.stem)
def test_shipped_settings_have_an_effect(file: Path) -> None:
    assert unused(file) == []


@pytest.mark.parametrize(
    ("changes", "missing", "then"),
    [
        ({"algo__reference": "big"}, "algo.kl_coef and algo.reward_kl_coef are 0", {"algo__kl_coef": 0.1}),
        ({"algo__correction_high": 3.0}, "algo.correction is not set", {"algo__correction": "token_mask"}),
        ({"algo__cov_fraction": 0.1}, "algo.cov is not set", {"algo__cov": "clip_cov"}),
        ({"algo__cov": "kl_cov"}, "one update per batch", {"algo__updates": 2}),
        ({"algo__cov": "kl_cov"}, "one update per batch", {"train__passes": 2}),
        ({"algo__cov": "kl_cov"}, "one update per batch", {"algo__minibatch_size": 4}),
        ({"algo__cov": "kl_cov"}, "one update per batch", {"replay__groups": 2}),
        ({"algo__cov": "kl_cov"}, "one update per batch", {"algo__cov": "clip_cov"}),
        ({"algo__entropy_delta": 0.1}, "algo.entropy_target is not set", {"algo__entropy_target": 0.5}),
        ({"algo__pass_rate_retry": 5}, "neither algo.pass_rate_low", {"algo__pass_rate_low": 0.1}),
        ({"algo__recipe": "simple", "algo__dual_clip": 3.0}, "algo.policy_loss is not", {"algo__recipe": "grpo"}),
        ({"critic__gae_lambda": 0.9}, "algo.critic is off", {"algo__recipe": "ppo"}),
        ({"env__max_tokens": 5}, "no environment is set", {"env__name": "guess"}),
        ({"algo__step_credit": True}, "no environment is set", {"env__name": "guess"}),
        (
            {"algo__critic": True, "algo__advantage": "none"},
            "the critic determines advantages",
            {"algo__critic": False},
        ),
    ],
)
def test_a_setting_without_effect_is_reported_with_the_setting_that_it_needs(
    changes: Any, missing: str, then: Any, tmp_path: Path
) -> None:
    (found,) = unused(**changes)
    name = list(changes)[-1].replace("__", ".")
    assert found.startswith(f"{name} has no effect: ") and missing in found
    assert unused(**changes | then) == []
    resolved = tmp_path / "config.toml"  # as a resumed run reads it, with every setting in it
    resolved.write_text(to_toml(settings(**changes)))
    assert unused(resolved) == [found]


@pytest.mark.parametrize(
    ("staleness", "correction", "passes"), [(0, None, 1), (1, None, 1), (1, "token_truncate", 1), (0, None, 2)]
)
def test_kl_cov_is_reported_exactly_if_it_does_not_change_the_update(
    staleness: int, correction: str | None, passes: int
) -> None:
    """Compares the weights after updates with and without it, on answers of this or of an earlier policy."""
    source = {"source__name": "async", "source__max_staleness": staleness, "train__passes": passes}
    weights = []
    for cov in ("kl_cov", None):
        cfg = settings(**source, algo__correction=correction, algo__cov=cov)
        algo, policy = build_algorithm(cfg), tiny_decoder(seed=1)
        groups = make_groups(tiny_decoder(seed=1 + staleness), off_policy=0.0)
        algo.credit(groups)
        Updater(policy, make_adamw(policy, 1e-2)).update(groups, algo, 1e-2, passes)
        weights.append(weights_of(policy))
    no_effect = (weights[0] - weights[1]).abs().max() < 1e-8
    reported = unused(**source, algo__correction=correction, algo__cov="kl_cov")
    assert bool(reported) == no_effect == (passes == 1 and (not staleness or correction is not None))


@pytest.mark.parametrize("name", ["guess", "countdown_tries", "single"])
def test_reward_settings_have_an_effect_only_with_a_judge(name: str) -> None:
    changes = {"reward__correct": 2.0, "reward__extract": "hash", "reward__function": "f.py:f", "reward__workers": 0}
    env = make_env(name, task=make_task("abacus") if name == "single" else None)
    found = unused(task=env, env__name=name, **changes)
    assert [line.split()[0] for line in found] == (
        [] if name == "single" else ["reward.extract", "reward.correct", "reward.function"]
    )
    assert all(f"has no effect: all rewards come from {name} " in line for line in found)
    assert unused(task=make_task("abacus"), **changes) == [] == unused(task=env, env__name=name)


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"algo__recipe": "reinforce", "algo__updates": 3}, "all but the first of 3 updates"),
        ({"algo__recipe": "rloo", "train__passes": 2}, "all but the first of 2 updates"),
        ({"algo__recipe": "rloo", "train__prompts": 16, "algo__minibatch_size": 5}, "all but the first of 4 updates"),
        ({"algo__recipe": "dapo", "algo__policy_loss": "reinforce", "algo__minibatch_size": 16}, ""),
        ({"algo__recipe": "simple", "algo__updates": 2, "algo__correction": "token_mask"}, "all but the first of 2"),
        ({"algo__recipe": "reinforce"}, ""),
        ({"algo__recipe": "grpo", "algo__updates": 4, "train__passes": 2}, ""),
        ({"algo__recipe": "reinforce", "algo__policy_loss": "ppo_clip", "algo__updates": 4}, ""),
        ({"sampling__top_k": 5}, "sampling is truncated"),
    ],
)
def test_warnings_of_updates_without_a_ratio_and_of_truncated_sampling(changes: Any, warned: str) -> None:
    cfg = settings(**changes)
    found = list(risky_settings(cfg, build_algorithm(cfg)))
    assert len(found) == bool(warned) and all(warned in line and "\n" not in line for line in found)


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
    ranks: Any = SimpleNamespace(world=2, tp_size=tp)
    cfg = TrainConfig(source={"name": "async", "max_staleness": 0}, **changes)
    algo = build_algorithm(cfg)
    check_async_ranks(cfg, Mesh(), algo)  # one process can
    if message:
        with pytest.raises(UserError, match=message):
            check_async_ranks(cfg, ranks, algo)
    else:
        check_async_ranks(cfg, ranks, algo)


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


def spoil_replicas(mesh: Mesh, folder: Path, tp: int, mode: str, name: str) -> None:
    updater = trained_muon_updater(tp, mode)
    save(folder, updater, 1)
    weight = dict(updater.policy.named_parameters())[name]
    for tensor in (weight, *updater.optimizer.state[weight].values()):
        if tensor.numel() > 1:
            flip(tensor, mesh.rank == mesh.world - 1)
            refused(mesh, f"{name}.* the checkpoint of step 2 is not written", lambda: save(folder, updater, 2))
            flip(tensor, mesh.rank == mesh.world - 1)
    assert checkpoints.steps(folder) == [1]
    save(folder, updater, 2)


@pytest.mark.slow
def test_replicas_that_differ_by_a_bit_are_not_saved(tmp_path: Path) -> None:
    start(2, spoil_replicas, tmp_path, 1, "ddp", "model.norm.weight")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "mode", "name"),
    [
        (2, "ddp", "model.layers.0.mlp.up_proj.weight"),  # a part, which one other rank has too
        (2, "ddp", "model.norm.weight"),
        (2, "fsdp", "model.norm.weight"),  # whole for tensor parallelism, a part for FSDP
    ],
)
def test_shards_held_by_several_ranks_are_compared(tmp_path: Path, tp: int, mode: str, name: str) -> None:
    start(4, spoil_replicas, tmp_path, tp, mode, name)


@pytest.mark.parametrize("repeated", [0, 3])
def test_problems_with_the_same_id_are_reported_once(
    repeated: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, count in (("train", 6), ("test", 3)):
        ids = ["same" if index <= repeated * (split == "train") else f"{split}-{index}" for index in range(count)]
        rows = [{"id": name, "question": f"{split} {index}?", "answer": "1"} for index, name in enumerate(ids)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = settings(task__name="jsonl", task__path=str(tmp_path), task__args={"val_size": 1}, eval__every=0)
    load_problems(cfg, build_algorithm(cfg), Console())
    warned = [line for line in capsys.readouterr().out.splitlines() if "the id of another problem" in line]
    assert len(warned) == (repeated > 0)
    if repeated:
        assert "'same'" in warned[0] and "pass rate" in warned[0]
