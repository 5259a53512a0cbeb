"""The KL divergence from the reference model as a loss term."""

from __future__ import annotations

import math

import pytest
import torch

from assay.algos.batch import LossBatch, metrics
from assay.algos.recipes import make_algorithm
from assay.types import UserError


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


def test_reference_kl_is_absent_without_a_coefficient_and_needs_an_estimator() -> None:
    one = torch.ones(2)
    assert "loss/kl" not in make_algorithm("grpo").loss(LossBatch(-one, -one, one, one / 2)).sums.losses
    assert not make_algorithm("grpo").needs.reference
    with pytest.raises(UserError, match=r"kl_coef = 0\.1 needs an estimator"):
        make_algorithm("simple", kl_coef=0.1)
