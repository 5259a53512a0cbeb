"""Covariances of log-probabilities and advantages, against plain loops."""

from __future__ import annotations

import random

import pytest
import torch

from assay.algos.losses import clip_cov, covariances, kl_cov


def tokens(count: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = random.Random(seed)
    values = [(-abs(draw.gauss(0, 2)), draw.gauss(0, 1)) for _ in range(count)]
    return torch.tensor([v[0] for v in values]).double(), torch.tensor([v[1] for v in values]).double()


def by_hand(logprobs: torch.Tensor, advantages: torch.Tensor) -> list[float]:
    one, other = logprobs.tolist(), advantages.tolist()
    mean, mean_advantage = sum(one) / len(one), sum(other) / len(other)
    return [(x - mean) * (a - mean_advantage) for x, a in zip(one, other, strict=True)]


def test_covariances_are_the_parts_of_the_covariance() -> None:
    logprobs, advantages = tokens()
    found = covariances(logprobs, advantages)
    assert found.tolist() == pytest.approx(by_hand(logprobs, advantages))
    both = torch.cov(torch.stack([logprobs, advantages]), correction=0)
    assert float(found.mean()) == pytest.approx(float(both[0, 1]))


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.03, 0.5, 1.0])
def test_kl_cov_marks_the_largest(fraction: float) -> None:
    logprobs, advantages = tokens()
    values = by_hand(logprobs, advantages)
    count = max(int(fraction * 200), 1)
    largest = sorted(range(200), key=lambda i: -values[i])[:count]
    marked = kl_cov(logprobs, advantages, fraction, 0.0, 0.0)
    assert {i for i, chosen in enumerate(marked.tolist()) if chosen} == set(largest)


def test_clip_cov_draws_from_those_within_bounds() -> None:
    logprobs, advantages = tokens()
    values = by_hand(logprobs, advantages)
    within = {i for i, value in enumerate(values) if 0.5 <= value <= 2.0}
    marked = clip_cov(logprobs, advantages, 0.05, 0.5, 2.0)
    chosen = {i for i, one in enumerate(marked.tolist()) if one}
    assert chosen < within and len(chosen) == 10
    assert chosen != set(sorted(within)[:10])  # drawn, not the first ones
    assert clip_cov(logprobs, advantages, 0.05, 0.5, 2.0).equal(marked)  # and the same when a run is resumed
    assert set(clip_cov(logprobs, advantages, 1.0, 0.5, 2.0).nonzero().squeeze(1).tolist()) == within
    assert not clip_cov(logprobs, advantages, 0.5, 1e6, 1e7).any()


@pytest.mark.parametrize("choose", [kl_cov, clip_cov])
def test_no_tokens_have_no_marks(choose) -> None:
    assert choose(torch.zeros(0), torch.zeros(0), 0.1, 0.0, 1.0).tolist() == []
