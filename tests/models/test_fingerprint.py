"""Fingerprints depend on every bit of the weights, on names and shapes, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from assay.models import build_preset, fingerprint
from assay.models.fingerprint import CHUNK, chunk_sums, combined

WORDS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def sum_of(weight):
    return combined(chunk_sums(weight, 1).tolist())


EXPECTED = {
    torch.float32: "4b63e723a3c8a3584afc29dfc3b18ecd",
    torch.bfloat16: "a604a061b0d3594c4d825e70a6abf1a0",
    torch.float64: "79d4641d4b6062a3f182c5dfed814fdc",
}


@pytest.mark.parametrize("dtype", EXPECTED)
def test_fingerprints_equal_those_saved_in_existing_files(dtype):
    """For weights of several chunks, one chunk, a few words, and no words."""
    long = (torch.arange(2_500_000) % 251 / 16).to(dtype)
    weights = [("long", long), ("a.b", long[:7].view(7, 1)), ("none", long[:0]), ("chunk", long[:CHUNK])]
    assert fingerprint(weights) == EXPECTED[dtype]
    assert fingerprint([]) == fingerprint(iter(()))


def test_chunk_sums_do_not_depend_on_the_number_of_chunks_per_operation():
    weight = torch.randn(11 * CHUNK // 2, generator=torch.Generator().manual_seed(0))
    one_by_one = chunk_sums(weight, 1).tolist()
    assert len(set(one_by_one)) == 6
    assert chunk_sums(weight, 2).tolist() == chunk_sums(weight, 9).tolist() == one_by_one


@pytest.mark.parametrize("dtype", WORDS)
def test_fingerprint_changes_with_every_single_bit(dtype):
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = sum_of(weight)
    words = weight.view(WORDS[dtype]).flatten()
    width = 8 * dtype.itemsize
    for index in range(len(words)):
        for bit in range(width):
            mask = torch.tensor(1 << bit if bit < width - 1 else -(1 << bit), dtype=WORDS[dtype])
            words[index] ^= mask
            assert sum_of(weight) != before, (index, bit)
            words[index] ^= mask
    assert sum_of(weight) == before


@pytest.mark.parametrize("dtype", WORDS)
def test_fingerprint_detects_swaps_shifts_and_paired_sign_changes(dtype):
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    swapped, negated, shifted = weight.clone(), weight.clone(), weight.roll(1)
    swapped[[3, 40]] = weight[[40, 3]]
    negated[[3, 40]] *= -1
    assert len({sum_of(one) for one in (weight, swapped, negated, shifted)}) == 4


def test_fingerprint_after_a_cast_equals_that_of_the_cast_model():
    model = build_preset("nano", vocab_size=30, max_length=32, seed=0)
    exact, rounded = fingerprint(model.weights()), fingerprint(model.weights(), torch.bfloat16)
    assert exact != rounded
    assert fingerprint(model.weights(), torch.float32) == exact
    assert fingerprint(model.to(torch.bfloat16).weights()) == rounded


def test_fingerprint_depends_on_names_and_shapes_but_not_on_order():
    a, b = torch.arange(6.0), torch.ones(2, 3)
    assert fingerprint([("a", a), ("b", b)]) == fingerprint([("b", b), ("a", a)])
    assert fingerprint([("a", a), ("b", b)]) != fingerprint([("b", a), ("a", b)])
    assert fingerprint([("a", a)]) != fingerprint([("a", a.view(2, 3))])
    assert fingerprint([("a", b.t())]) == fingerprint([("a", b.t().contiguous())])
