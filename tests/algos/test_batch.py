"""Token weights, KL estimators (expected gradients by summing over a small vocabulary) and sums over processes."""

from __future__ import annotations

import math
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import start

from assay.algos.component import AGGREGATES, KL, Sums, metrics, token_weights
from assay.mesh import Mesh

lengths_with_some_masked = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


def by_hand(losses: list[np.ndarray], mode: str, constant_length: int) -> float:
    trained = [sequence for sequence in losses if len(sequence)]
    if mode == "token":
        return float(np.concatenate(trained).mean())
    if mode == "sequence":
        return float(np.mean([sequence.mean() for sequence in trained]))
    return float(sum(sequence.sum() for sequence in losses) / (len(losses) * constant_length))


@pytest.mark.parametrize("mode", AGGREGATES)
@settings(max_examples=30)
@given(lengths=lengths_with_some_masked, seed=st.integers(0, 1000))
def test_weighted_sum_equals_the_aggregation(mode: str, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=length) for length in lengths]
    weights = token_weights(torch.tensor(lengths), mode, 16)
    assert weights.dtype == torch.float64
    assert weights.shape == (len(lengths),)
    total = sum(float(w) * loss.sum() for w, loss in zip(weights, losses, strict=True))
    assert total == pytest.approx(by_hand(losses, mode, 16), abs=1e-12)


def test_masked_sequences_count_only_in_constant_aggregation() -> None:
    full, masked = torch.tensor([2, 4]), torch.tensor([2, 4, 0, 0])
    for mode in ("token", "sequence"):
        torch.testing.assert_close(token_weights(masked, mode, 8)[:2], token_weights(full, mode, 8))
    torch.testing.assert_close(token_weights(masked, "constant", 8)[:2], token_weights(full, "constant", 8) / 2)


@pytest.mark.parametrize("mode", AGGREGATES)
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_batches_without_tokens_have_finite_weights(mode: str, lengths: list[int]) -> None:
    weights = token_weights(torch.tensor(lengths, dtype=torch.long), mode, 8)
    assert weights.isfinite().all()
    assert len(weights) == len(lengths)


POLICY_LOGITS = torch.tensor([0.2, -1.0, 0.7, 0.0], dtype=torch.float64)
REF_LOGPROBS = torch.tensor([0.5, -0.3, 0.1, -0.9], dtype=torch.float64).log_softmax(0)


def expected_value_and_gradient(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens sampled from the policy: probabilities weigh the estimate but are not differentiated, as in training."""
    logits = POLICY_LOGITS.clone().requires_grad_()
    estimate = KL[name](logits.log_softmax(0), REF_LOGPROBS)
    mean = (logits.detach().softmax(0) * estimate).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


def true_gradient(direction: str) -> tuple[torch.Tensor, torch.Tensor]:
    logits = POLICY_LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    if direction == "policy||ref":
        divergence = (logprobs.exp() * (logprobs - REF_LOGPROBS)).sum()
    else:
        divergence = (REF_LOGPROBS.exp() * (REF_LOGPROBS - logprobs)).sum()
    return divergence.detach(), torch.autograd.grad(divergence, logits)[0]


def test_expected_values_and_gradients_are_as_documented() -> None:
    for name in ("k1", "k3"):
        torch.testing.assert_close(expected_value_and_gradient(name)[0], true_gradient("policy||ref")[0])
    k1, k2, k3 = (expected_value_and_gradient(name)[1] for name in ("k1", "k2", "k3"))
    torch.testing.assert_close(k1, torch.zeros_like(k1), atol=1e-12, rtol=0)
    torch.testing.assert_close(k2, true_gradient("policy||ref")[1])
    torch.testing.assert_close(k3, true_gradient("ref||policy")[1])
    assert not torch.allclose(k2, k3)


@pytest.mark.parametrize("name", list(KL))
def test_kl_estimators_stay_finite_in_float32_far_from_the_reference(name: str) -> None:
    assert KL[name](torch.tensor([-300.0, 0.0]), torch.tensor([0.0, -300.0])).isfinite().all()


def test_the_log_ratio_in_k3_is_limited_to_10() -> None:
    logprobs = torch.tensor([-1.0, -9.5, -12.0, -50.0], dtype=torch.float64, requires_grad=True)
    found = KL["k3"](logprobs, torch.zeros(4, dtype=torch.float64))
    limited = torch.tensor([1.0, 9.5, 10.0, 10.0], dtype=torch.float64)
    torch.testing.assert_close(found.detach(), limited.exp() - 1 - limited)
    found.sum().backward()
    expected = [1 - math.exp(1.0), 1 - math.exp(9.5), 0.0, 0.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(expected)


PARTS = [(3, 0.5, 0, 5), (4, -0.5, 2, 4), (1, 3, 2, 1)]  # tokens, loss, statistic per token, maximum


def sums(tokens: float, loss: float, x: float, largest: float) -> Sums:
    values = [torch.tensor(value, dtype=torch.float64) for value in (tokens, loss, x, largest)]
    return Sums(values[0], {"loss/total": values[1]}, {"policy/x": values[2]}, {"policy/m": values[3]})


def test_sums_add_up_to_the_metrics_of_the_whole_batch() -> None:
    total = reduce(add, (sums(*part) for part in PARTS))
    assert isinstance(total, Sums)
    assert metrics(total) == {"loss/total": 3.0, "policy/x": 0.5, "policy/m": 5.0}
    assert metrics(total, updates=3)["loss/total"] == 1.0


def check_reduced(mesh: Mesh) -> None:
    expected = sums(*PARTS[0]) + sums(*PARTS[1])
    assert metrics(sums(*PARTS[mesh.rank]).all_reduce()) == metrics(expected)


@pytest.mark.slow
def test_all_reduce_over_two_processes() -> None:
    start(2, check_reduced)
