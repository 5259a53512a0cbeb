"""The fingerprint sees every bit, and only the bits."""

from __future__ import annotations

import pytest
import torch

from assay.models import build_preset, fingerprint
from assay.models.fingerprint import CHUNK, chunk_sums, combined

WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def sum_of(weight):
    return combined(chunk_sums(weight, 1).tolist())


WRITTEN_DOWN = {
    torch.float32: "4b63e723a3c8a3584afc29dfc3b18ecd",
    torch.bfloat16: "a604a061b0d3594c4d825e70a6abf1a0",
    torch.float64: "79d4641d4b6062a3f182c5dfed814fdc",
}


@pytest.mark.parametrize("dtype", WRITTEN_DOWN)
def test_what_was_written_to_files_still_holds(dtype):
    """Weights of several chunks, of one, of a few words and of none."""
    long = (torch.arange(2_500_000) % 251 / 16).to(dtype)
    weights = [("long", long), ("a.b", long[:7].view(7, 1)), ("none", long[:0]), ("chunk", long[:CHUNK])]
    assert fingerprint(weights) == WRITTEN_DOWN[dtype]
    assert fingerprint([]) == fingerprint(iter(()))


def test_chunks_taken_one_by_one_or_many_at_once_have_the_same_sums():
    weight = torch.randn(11 * CHUNK // 2, generator=torch.Generator().manual_seed(0))
    one_by_one = chunk_sums(weight, 1).tolist()
    assert len(set(one_by_one)) == 6
    assert chunk_sums(weight, 2).tolist() == chunk_sums(weight, 9).tolist() == one_by_one


@pytest.mark.parametrize("dtype", WORDS)
def test_every_single_bit_counts(dtype):
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = sum_of(weight)
    words = weight.view(WORDS[dtype]).flatten()
    width = 8 * dtype.itemsize
    for place in range(len(words)):
        for bit in range(width):
            mask = torch.tensor(1 << bit if bit < width - 1 else -(1 << bit), dtype=WORDS[dtype])
            words[place] ^= mask
            assert sum_of(weight) != before, (place, bit)
            words[place] ^= mask
    assert sum_of(weight) == before


@pytest.mark.parametrize("dtype", WORDS)
def test_changes_that_could_cancel_are_seen(dtype):
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    swapped, negated, shifted = weight.clone(), weight.clone(), weight.roll(1)
    swapped[[3, 40]] = weight[[40, 3]]
    negated[[3, 40]] *= -1
    assert len({sum_of(one) for one in (weight, swapped, negated, shifted)}) == 4


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
