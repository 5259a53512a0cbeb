"""The built-in loss terms: policy loss (also user-defined), dual clip, replay, reference KL, entropy bonus."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.algos.batch import LossBatch, metrics
from assay.algos.recipes import RECIPES, make_algorithm
from assay.algos.terms import EntropyControl
from assay.types import UserError


def test_replay_needs_an_importance_ratio_or_a_correction() -> None:
    def replays(recipe: str, **changes: Any) -> bool:
        try:
            make_algorithm(recipe, **{"critic": False, **changes}).check_replay()
        except UserError:
            return False
        return True

    found = {recipe for recipe in RECIPES if replays(recipe)}
    assert found == {"grpo", "ppo", "dr_grpo", "dapo", "reinforce_pp", "cispo", "bnpo"}
    assert not replays("grpo", recompute_logprobs=True)  # its ratio is relative to the current policy
    for recipe in RECIPES:  # the correction is the ratio to the policy that sampled
        assert replays(recipe, correction="token_truncate")
    # A user-defined loss receives the log-probabilities of the policy that sampled.
    assert replays("simple", policy_loss=lambda *given: (given[0], {}))
    with pytest.raises(UserError, match="cannot be combined with replay"):
        make_algorithm("ppo").check_replay()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda losses: losses, "losses and statistics"),
        (lambda losses: (losses, None), "losses and statistics"),
        (lambda losses: (losses, {"weight": losses.mean()}), "statistic 'weight'"),
        (lambda losses: (losses, {"weight": 0.5}), "statistic 'weight'"),
        (lambda losses: (losses.numpy(), {}), "returned ndarray: return a tensor"),
        (lambda losses: (losses.mean(), {}), r"shape \(\) for 3 tokens"),
        (lambda losses: losses[7], "the loss function failed: IndexError"),
    ],
)
def test_output_of_a_user_defined_loss_is_checked(given: Callable[[Tensor], object], message: str) -> None:
    """A mean instead of a statistic per token would be averaged twice."""
    three = torch.ones(3)
    algorithm = make_algorithm("simple", policy_loss=lambda *_: given(three))
    with pytest.raises(UserError, match=message):
        algorithm.loss(LossBatch(three, three, three, three))


def test_a_loss_without_gradient_is_reported() -> None:
    three = torch.ones(3)
    algorithm = make_algorithm("simple", policy_loss=lambda logprobs, *_: (-logprobs.detach(), {}))
    with pytest.raises(UserError, match="no gradient"):
        algorithm.loss(LossBatch(three.clone().requires_grad_(), three, three, three))
    algorithm.loss(LossBatch(three, three, three, three))  # metrics only, as under torch.no_grad()


def test_out_of_memory_in_a_user_defined_loss_is_passed_on() -> None:
    """The trainer repeats the update with smaller micro-batches."""

    def loss(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    three = torch.ones(3)
    with pytest.raises(torch.OutOfMemoryError):
        make_algorithm("simple", policy_loss=loss).loss(LossBatch(three, three, three, three))


def test_ppo_ratio_equals_the_token_importance_correction_within_the_clip_range() -> None:
    """Ratios start from the engine's log-probabilities: within the clip range, that is an importance weight."""
    torch.manual_seed(0)
    logprobs = torch.randn(40, dtype=torch.float64).sub(2).requires_grad_()
    engine = logprobs.detach() + 0.05 * torch.randn(40, dtype=torch.float64)  # well within 0.8 and 1.2
    advantages, weights = torch.randn(40, dtype=torch.float64), torch.full((40,), 1 / 40, dtype=torch.float64)
    ratio_loss = make_algorithm("grpo").loss(LossBatch(logprobs, engine, advantages, weights))
    corrected = make_algorithm("simple", correction="token_truncate").loss(
        LossBatch(logprobs, logprobs.detach(), advantages, weights, engine_logprobs=engine)
    )
    plain = make_algorithm("simple").loss(LossBatch(logprobs, engine, advantages, weights))
    found, expected, without = (torch.autograd.grad(out.total, logprobs)[0] for out in (ratio_loss, corrected, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found, without, rtol=1e-3)


def test_dual_clip_applies_to_ppo_clip_and_is_logged() -> None:
    logprobs, nothing = torch.tensor([2.0, 2.0, 0.1]), torch.zeros(3)
    advantages, weights = torch.tensor([-1.0, 1.0, -1.0]), torch.ones(3)
    found = metrics(make_algorithm("grpo", dual_clip=3.0).loss(LossBatch(logprobs, nothing, advantages, weights)).sums)
    assert found["loss/policy"] == pytest.approx(3.0 - 1.2 + math.exp(0.1))
    assert found["policy/dual_clip_fraction"] == pytest.approx(1 / 3)
    assert "policy/dual_clip_fraction" not in metrics(
        make_algorithm("grpo").loss(LossBatch(logprobs, nothing, advantages, weights)).sums
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_reference_kl_adds_the_estimate_times_its_coefficient(estimator: str) -> None:
    logprobs, reference = [-1.0, -0.5, -3.0], [-1.5, -0.25, -1.0]
    differences = [a - b for a, b in zip(logprobs, reference, strict=True)]
    formulas = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}
    expected = sum(map(formulas[estimator], differences)) / 3
    one = torch.ones(3, dtype=torch.float64)
    policy = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    batch = LossBatch(policy, policy.detach(), 0 * one, one / 3, ref_logprobs=torch.tensor(reference).double())
    algorithm = make_algorithm("simple", kl=estimator, kl_coef=0.3)
    out = algorithm.loss(batch)
    assert float(out.total.detach()) == pytest.approx(0.3 * expected, abs=1e-12)
    assert metrics(out.sums)["policy/kl"] == pytest.approx(expected, abs=1e-12)
    assert algorithm.needs.ref_logprobs_in_loss and algorithm.needs.every_rollout


def test_reference_kl_is_absent_without_a_coefficient() -> None:
    one = torch.ones(2)
    assert "loss/kl" not in make_algorithm("grpo").loss(LossBatch(-one, -one, one, one / 2)).sums.losses
    assert not make_algorithm("grpo").needs.reference and not make_algorithm("grpo").needs.every_rollout


def test_adaptive_entropy_coefficient_grows_below_the_target_and_is_not_applied_above() -> None:
    control = EntropyControl(0.0)
    seen = []
    for entropy in (0.5, 0.19, 0.2, 0.1, 0.3, 0.15):
        control = control.after(entropy, 0.2, 0.005)
        seen.append((round(control.coef, 6), round(control.applied(0.2), 6)))
    assert seen == [(0, 0), (0.005, 0.005), (0.01, 0.01), (0.015, 0.015), (0.01, 0), (0.015, 0.015)]
    assert EntropyControl(0.999).after(0.0, 0.2, 0.005).coef == 1.0
    assert EntropyControl(0.3).applied(0.2) == 0.3  # nothing measured yet


def test_adaptive_entropy_coefficient_follows_the_target_and_is_restored_by_load_state_dict() -> None:
    algo = make_algorithm("grpo", entropy_target=0.2, entropy_coef=0.01, entropy_delta=0.005)
    found = []
    for step, entropy in enumerate((0.1, 0.1, 0.3, 0.1), 1):
        found.append(algo.end_step(step, [], {"policy/entropy": entropy})["policy/entropy_coef"])
        again = make_algorithm("grpo", entropy_target=0.2, entropy_coef=0.01, entropy_delta=0.005)
        again.load_state_dict(algo.state_dict())
        assert again.needs == algo.needs == pickle.loads(pickle.dumps(algo)).needs  # also in a separate process
        algo = again
    assert found == [0.01, 0.015, 0.02, 0.0]  # above the target the bonus is not applied
    assert algo.needs.entropy_gradient and not make_algorithm("grpo", entropy_target=0.2).needs.entropy_gradient
    assert make_algorithm("grpo", entropy_target=0.2).needs.every_rollout  # the controller follows their entropy
    assert make_algorithm("grpo").state_dict() == {} and make_algorithm("grpo").end_step(1, [], {}) == {}
