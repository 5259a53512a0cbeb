"""The policy loss as a term: user-defined losses, importance ratios, dual clipping, replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.algos.batch import LossBatch, metrics
from assay.algos.recipes import RECIPES, make_algorithm
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
    assert not replays("grpo", recompute_logprobs=True)  # its ratio starts from the policy as it is
    for recipe in RECIPES:  # trainer against engine: whoever sampled, and whenever
        assert replays(recipe, correction="token_truncate")
    assert replays("simple", policy_loss=lambda *given: (given[0], {}))  # it is given who sampled
    with pytest.raises(UserError, match="cannot be combined with replay"):
        make_algorithm("ppo").check_replay()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda losses: losses, "losses and statistics"),
        (lambda losses: (losses, None), "losses and statistics"),
        (lambda losses: (losses, {"weight": losses.mean()}), "statistic 'weight'"),
        (lambda losses: (losses, {"weight": 0.5}), "statistic 'weight'"),
    ],
)
def test_output_of_a_user_defined_loss_is_checked(given: Callable[[Tensor], object], said: str) -> None:
    """A mean in place of a statistic of each token would be divided by their number once more."""
    three = torch.ones(3)
    algorithm = make_algorithm("simple", policy_loss=lambda *_: given(three))
    with pytest.raises(UserError, match=said):
        algorithm.loss(LossBatch(three, three, three, three))


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
