"""The reference model: fixed or dynamic, loaded, frozen or served, in the loss and in the reward."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from serve_parts import serving
from small_run import SmallRuns, abacus_words, llama_folder
from torch import Tensor
from train_parts import full_logprobs, make_adamw, make_groups, tiny_decoder

from assay.algos import Scorers, make_algorithm
from assay.config import TrainConfig
from assay.models import Lora, load_model, save_model
from assay.models.lora import adapted_layers
from assay.runs.rollouts import read_rollouts
from assay.training.learner.learner import set_reference
from assay.training.learner.update import Updater
from assay.types import Rollout


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)


def test_refresh_reference_copies_the_policy_every_n_steps(small: SmallRuns) -> None:
    words = ("--train.steps", 5, "--save.every", 1, "--save.keep", 9, "--algo.kl_coef", 0.1)
    assert small.train(*words, "--algo.refresh_reference", 2) == 0
    models = [weights(small.checkpoint(step) / "model") for step in range(6)]
    references = [weights(small.checkpoint(step) / "reference") for step in range(6)]
    assert all(equal(references[step], models[step // 2 * 2]) for step in range(6))
    assert not equal(models[1], models[0]) and not equal(models[2], models[4])
    kl = [row["policy/kl"] for row in small.metrics() if "policy/kl" in row]
    assert [abs(value) < 1e-6 for value in kl] == [True, False, True, False, True]


def test_reference_ema_is_the_moving_average_of_the_policies(small: SmallRuns) -> None:
    words = ("--train.steps", 4, "--save.every", 1, "--save.keep", 9, "--algo.kl_coef", 0.1)
    assert small.train(*words, "--algo.reference_ema", 0.75) == 0
    average = {key: value.double() for key, value in weights(small.checkpoint(0) / "model").items()}
    for step in range(1, 5):
        policy = weights(small.checkpoint(step) / "model")
        average = {key: 0.75 * value + 0.25 * policy[key].double() for key, value in average.items()}
        found = weights(small.checkpoint(step) / "reference")
        assert found.keys() == average.keys()
        assert all((found[key].double() - average[key]).abs().max() < 1e-6 for key in found)
    start = weights(small.checkpoint(0) / "model")
    assert max(float((average[key] - start[key]).abs().max()) for key in start) > 1e-4


def test_a_moving_average_is_kept_in_float32(tmp_path: Path) -> None:
    policy = tiny_decoder(dtype=torch.float32)
    save_model(policy, tmp_path)
    for algo, dtype in (({"reference_ema": 0.99}, torch.float32), ({"refresh_reference": 2}, torch.bfloat16)):
        updater = Updater(policy, make_adamw(policy, 1e-2), dtype=torch.bfloat16)
        set_reference(updater, TrainConfig.model_validate({"algo": algo}), str(tmp_path))
        assert {weight.dtype for weight in updater.reference.parameters()} == {dtype}


def test_a_dynamic_reference_follows_the_merged_weights() -> None:
    policy, reference = tiny_decoder(), tiny_decoder(seed=5)
    policy.add_lora(Lora(rank=2, alpha=4.0))
    with torch.no_grad():
        for _, layer in adapted_layers(policy):
            layer.lora_B.weight.normal_(generator=torch.Generator().manual_seed(1))
    before = {name: weight.clone() for name, weight in reference.named_parameters()}
    updater = Updater(policy, make_adamw(policy, 1e-2), reference=reference)
    updater.update_reference(0.9)
    adapted = dict(adapted_layers(policy))
    for name, weight in reference.named_parameters():
        layer = adapted.get(name.removesuffix(".weight"))
        own = dict(policy.named_parameters())[name]
        if layer is not None:
            own = own + 4.0 / 2 * layer.lora_B.weight @ layer.lora_A.weight
        assert (weight - (0.9 * before[name] + 0.1 * own)).abs().max() < 1e-12
    assert len(adapted) == 14
    assert not torch.equal(reference.model.norm.weight, policy.model.norm.weight)
    updater.update_reference(0.0)
    assert torch.equal(reference.model.norm.weight, policy.model.norm.weight)


@pytest.mark.parametrize("budget", [10**6, 25])
def test_ref_logprobs_equal_a_plain_softmax(budget: int) -> None:
    policy, reference = tiny_decoder(), tiny_decoder(seed=5)
    groups = make_groups(policy)
    updater = Updater(policy, make_adamw(policy, 1e-2), reference=reference, token_budget=budget, temperature=0.7)
    found = updater.ref_logprobs(groups, make_algorithm("rloo", reward_kl_coef=0.1))
    for rollout, values in zip([r for g in groups for r in g.rollouts], found, strict=True):
        ids, mask = rollout.token_ids, rollout.loss_mask
        every = full_logprobs(reference, ids, temperature=0.7)
        expected = [float(every[i - 1, ids[i]]) for i in range(len(ids)) if mask[i]]
        assert values == pytest.approx(expected, abs=1e-10)


def transformers_logprobs(folder: Path, rollout: Rollout) -> list[float]:
    """Of what the policy wrote, by transformers' own model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        every = model(torch.tensor([rollout.token_ids])).logits[0].double().log_softmax(-1)
    written = zip(rollout.token_ids, rollout.loss_mask, strict=True)
    return [float(every[i - 1, token]) for i, (token, mask) in enumerate(written) if mask]


def test_a_larger_model_can_be_the_reference(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    """KL in loss and reward, against transformers' logits of both models."""
    policy = llama_folder(small.folder / "policy", 32, abacus_words())
    reference = llama_folder(small.folder / "larger", 64, abacus_words(), padding=5)
    words = ("--model", policy, "--algo.reference", reference, "--algo.kl_coef", 0.1, "--algo.reward_kl_coef", 0.2)
    assert small.train(*words, "--train.steps", 1, "--train.offload_reference", "true") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index(f"loading {policy}") < lines.index(f"loading the reference {reference}")
    rollouts = [r for group in read_rollouts(small.runs / "small", 1) for r in group.rollouts]
    gaps = []
    for rollout in rollouts:
        own, other = (transformers_logprobs(folder, rollout) for folder in (policy, reference))
        gaps.append([one - two for one, two in zip(own, other, strict=True)])
        assert rollout.reward == pytest.approx(rollout.verdict.reward - 0.2 * sum(gaps[-1]), abs=1e-3)
    (row,) = [row for row in small.metrics() if "policy/kl" in row]
    every = torch.tensor([gap for own in gaps for gap in own], dtype=torch.float64)
    assert row["policy/kl"] == pytest.approx(float(((-every).exp() - 1 + every).mean()), rel=1e-3)
    assert row["reward/kl"] == pytest.approx(sum(map(sum, gaps)) / len(gaps), abs=1e-3) and every.abs().max() > 0.5
    assert not (small.runs / "small" / "reference").exists()


@pytest.mark.parametrize(
    ("settings", "scoring", "updating"),
    [({"reward_kl_coef": 0.1}, 2, 0), ({"reward_kl_coef": 0.1, "kl": "k3", "kl_coef": 0.1}, 2, 2)],
)
def test_an_offloaded_reference_is_on_the_device_only_while_it_is_used(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, float], scoring: int, updating: int
) -> None:
    policy, reference = tiny_decoder(), tiny_decoder(seed=5)
    algo, groups = make_algorithm("simple", **settings), make_groups(policy)
    updater = Updater(policy, make_adamw(policy, 1e-2), reference=reference, offload_reference=True)
    moved: list[object] = []
    monkeypatch.setattr(reference, "to", moved.append)
    algo.credit(groups, Scorers(partial(updater.ref_logprobs, algo=algo)))
    assert moved == [policy.device, "cpu"][:scoring]
    moved.clear()
    updater.update(groups, algo, 1e-3)
    assert moved == [policy.device, "cpu"][:updating]


WORDS = ("--dtype", "float64", "--engine.dtype", "float64", "--train.steps", 2, "--save.every", 1, "--save.keep", 0)
WORDS = (*WORDS, "--algo.kl_coef", 0.1, "--algo.reward_kl_coef", 0.05, "--sampling.temperature", 0.8)


def test_a_served_reference_gives_the_run_of_a_local_one(small: SmallRuns) -> None:
    assert small.train(*WORDS) == 0
    start = load_model(str(small.checkpoint(0) / "model"), dtype=torch.float64)
    with serving(start, dtype=torch.float64) as server:
        assert small.train(*WORDS, "--reference.url", server.url, "--name", "served") == 0
    local, served = small.timeless(), small.timeless("served")
    assert [row.keys() for row in local] == [row.keys() for row in served]
    for row, own in zip(local, served, strict=True):
        assert row == pytest.approx(own, rel=0, abs=1e-9)
    assert max(row.get("policy/kl", 0.0) for row in local) > 0 and not (small.runs / "served" / "reference").exists()
    weights = [load_file(small.checkpoint(2, name) / "model" / "model.safetensors") for name in ("small", "served")]
    assert all((weights[0][key] - weights[1][key]).abs().max() < 1e-9 for key in weights[0])
