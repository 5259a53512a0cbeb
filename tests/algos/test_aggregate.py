"""Token weights against padded-matrix formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.algos.batch import AGGREGATES, token_weights

lengths_with_some_masked = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


def by_hand(losses: list[np.ndarray], mode: str, constant_length: int) -> float:
    trained = [sequence for sequence in losses if len(sequence)]
    if mode == "token":
        return float(np.concatenate(trained).mean())
    if mode == "sequence":
        return float(np.mean([sequence.mean() for sequence in trained]))
    return float(sum(sequence.sum() for sequence in losses) / (len(losses) * constant_length))


@pytest.mark.parametrize("mode", AGGREGATES)
@settings(deadline=None)
@given(lengths=lengths_with_some_masked, seed=st.integers(0, 1000))
def test_weighted_sum_is_the_aggregate(mode: str, lengths: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=length) for length in lengths]
    weights = token_weights(torch.tensor(lengths), mode, 16)
    assert weights.dtype == torch.float64
    assert weights.shape == (len(lengths),)
    total = sum(float(w) * loss.sum() for w, loss in zip(weights, losses, strict=True))
    assert total == pytest.approx(by_hand(losses, mode, 16), abs=1e-12)


def test_masked_sequences_count_only_for_the_constant() -> None:
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


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="token, sequence, constant"):
        token_weights(torch.tensor([1]), "tokens", 8)
