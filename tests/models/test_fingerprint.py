"""The fingerprint sees every bit, and only the bits."""

from __future__ import annotations

import pytest
import torch

from assay.models import build_preset, fingerprint
from assay.models.fingerprint import tensor_sum

WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


@pytest.mark.parametrize("dtype", WORDS)
def test_every_single_bit_counts(dtype):
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = tensor_sum(weight)
    words = weight.view(WORDS[dtype]).flatten()
    width = 8 * dtype.itemsize
    for place in range(len(words)):
        for bit in range(width):
            mask = torch.tensor(1 << bit if bit < width - 1 else -(1 << bit), dtype=WORDS[dtype])
            words[place] ^= mask
            assert tensor_sum(weight) != before, (place, bit)
            words[place] ^= mask
    assert tensor_sum(weight) == before


@pytest.mark.parametrize("dtype", WORDS)
def test_changes_that_could_cancel_are_seen(dtype):
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    swapped, negated, shifted = weight.clone(), weight.clone(), weight.roll(1)
    swapped[[3, 40]] = weight[[40, 3]]
    negated[[3, 40]] *= -1
    assert len({tensor_sum(one) for one in (weight, swapped, negated, shifted)}) == 4


def test_cast_before_or_while_fingerprinting_is_the_same():
    model = build_preset("nano", vocab_size=30, max_length=32, seed=0)
    exact, rounded = fingerprint(model.weights()), fingerprint(model.weights(), torch.bfloat16)
    assert exact != rounded
    assert fingerprint(model.weights(), torch.float32) == exact
    assert fingerprint(model.to(torch.bfloat16).weights()) == rounded


def test_order_does_not_matter_but_names_and_shapes_do():
    a, b = torch.arange(6.0), torch.ones(2, 3)
    assert fingerprint([("a", a), ("b", b)]) == fingerprint([("b", b), ("a", a)])
    assert fingerprint([("a", a), ("b", b)]) != fingerprint([("b", a), ("a", b)])
    assert fingerprint([("a", a)]) != fingerprint([("a", a.view(2, 3))])
    assert fingerprint([("a", b.t())]) == fingerprint([("a", b.t().contiguous())])
