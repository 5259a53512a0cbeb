"""Ratios of sequences and corrections for the engine, against loops over single sequences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from assay.algos.losses import importance_correction, over_sequences, ppo_clip, sequence_logprobs

CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

LENGTHS = [3, 1, 0, 5, 2]


def random_tokens(seed: int = 0, spread: float = 0.3) -> tuple[Tensor, Tensor, list[float]]:
    generator = torch.Generator().manual_seed(seed)
    behaviour = -2 + torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    logprobs = behaviour + spread * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64).tolist()
    return logprobs.requires_grad_(), behaviour, advantages


def gspo_by_sequences(logprobs: Tensor, behaviour: Tensor, advantages: list[float], low: float, high: float) -> Tensor:
    """The paper's objective: each sequence has one ratio, which is differentiated as it stands."""
    terms, start = [], 0
    for length, advantage in zip(LENGTHS, advantages, strict=True):
        if length:
            at = slice(start, start + length)
            ratio = torch.exp((logprobs[at] - behaviour[at]).sum() / length)
            held = ratio.clamp(1 - low, 1 + high)
            terms.append(-torch.minimum(ratio * advantage, held * advantage))
        start += length
    return torch.stack(terms).mean()


@pytest.mark.parametrize("seed", range(10))
def test_gspo_is_ppo_with_ratios_of_sequences(seed: int) -> None:
    logprobs, behaviour, advantages = random_tokens(seed)
    expected = gspo_by_sequences(logprobs, behaviour, advantages, 0.05, 0.1)
    (expected_slope,) = torch.autograd.grad(expected, logprobs)
    counts = torch.tensor(LENGTHS)
    weights = (1 / (4 * counts.clamp(min=1))).double().repeat_interleave(counts)
    each = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(counts)
    losses, stats = ppo_clip(sequence_logprobs(logprobs, behaviour, LENGTHS), behaviour, each, 0.05, 0.1)
    total = (weights * losses).sum()
    (slope,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(slope, expected_slope)
    for part in stats["clip_fraction"].split(LENGTHS):  # a sequence is clipped as one
        assert part.all() or not part.any()


def test_some_sequences_are_clipped_and_some_are_not() -> None:
    logprobs, behaviour, advantages = random_tokens(1)
    each = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
    clipped = ppo_clip(sequence_logprobs(logprobs, behaviour, LENGTHS), behaviour, each, 0.05, 0.1)[1]["clip_fraction"]
    assert 0 < clipped.sum() < len(clipped)


@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.2), (0.7, 1.3), (0.0, math.inf)])
def test_corrections(mode: str, low: float, high: float) -> None:
    trainer, engine, _ = random_tokens(3)
    trainer = trainer.detach()
    weights, held = importance_correction(mode, trainer, engine, low, high, LENGTHS)
    expected, outside, start = [], [], 0
    for length in LENGTHS:
        ratios = [math.exp(float(trainer[i]) - float(engine[i])) for i in range(start, start + length)]
        if mode.startswith("sequence"):
            ratios = [math.prod(ratios)] * length
        for ratio in ratios:
            outside.append(not low <= ratio <= high)
            if mode.endswith("mask"):
                expected.append(0.0 if outside[-1] else ratio)
            else:
                expected.append(min(max(ratio, low), high))
        start += length
    assert weights.tolist() == pytest.approx(expected)
    assert held.tolist() == outside
    assert any(outside) or high == math.inf


def test_truncation_keeps_the_expectation_within_reach() -> None:
    """Without a bound the weighted engine's samples have the trainer's expectation: closed form on three tokens."""
    trainer, engine = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    rewards = torch.tensor([1.0, -2.0, 3.0])
    weights, _ = importance_correction("token_truncate", trainer.log(), engine.log(), 0.0, math.inf, None)
    torch.testing.assert_close((engine * weights * rewards).sum(), (trainer * rewards).sum())


def test_nothing_has_no_sequences() -> None:
    nothing = torch.zeros(0)
    assert over_sequences(nothing, [], torch.mean).tolist() == []
    assert over_sequences(nothing, [0, 0], torch.sum).tolist() == []
    with pytest.raises(AssertionError, match="whole"):
        over_sequences(torch.ones(3), [2], torch.sum)
