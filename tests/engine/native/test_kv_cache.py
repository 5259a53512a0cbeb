"""Blocks (reference counts, prefix index) and the memory of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from engine_parts import small_spec

from assay.engine.native import kv_cache
from assay.engine.native.kv_cache import DEFAULT_FREE, GIB, MEMORY_FRACTION, Blocks, cache_blocks, new_cache
from assay.engine.sequence import BLOCK_SIZE
from assay.models.device import deterministic
from assay.types import UserError

A, B, C, D = ([token] * 4 for token in range(4))  # what blocks of four can hold


def computed(blocks: Blocks, tokens: Sequence[int]) -> list[int]:
    """As for a prompt: what is known is shared, the rest computed and remembered."""
    found = blocks.find_prefix(tokens)
    mine = found + blocks.allocate(blocks.needed(len(tokens)) - len(found))
    blocks.register_prefix(tokens, mine, len(tokens))
    return mine


def test_allocating_too_many_blocks_or_releasing_twice_is_an_error() -> None:
    blocks = Blocks(3, 4)
    taken = blocks.allocate(3)
    with pytest.raises(AssertionError):
        blocks.allocate(1)
    blocks.release(taken)
    with pytest.raises(AssertionError):
        blocks.release(taken)


def test_a_prefix_computed_twice_is_indexed_once_with_its_continuation() -> None:
    blocks = Blocks(9, 4)
    first, second = blocks.allocate(1), blocks.allocate(2)
    blocks.register_prefix(A, first, 4)
    blocks.register_prefix(A + B, second, 8)
    assert blocks.find_prefix(A + B) == [first[0], second[1]]
    blocks.release([first[0], second[1]])
    blocks.release(second)
    assert (blocks.ref_counts[second[0]], second[0] in blocks.free) == (0, True)
    assert blocks.find_prefix(A + B) == [first[0], second[1]]


def test_a_duplicate_block_is_indexed_after_the_first_is_evicted() -> None:
    blocks = Blocks(3, 4)
    first, second = blocks.allocate(1), blocks.allocate(2)
    blocks.register_prefix(A, first, 4)
    blocks.register_prefix(A + B, second, 4)
    blocks.release(first)
    assert blocks.allocate(1) == first
    assert blocks.find_prefix(A) == []
    blocks.register_prefix(A + B, second, 8)
    assert blocks.find_prefix(A + B) == second


def test_a_block_is_not_found_behind_a_recomputed_parent_of_other_tokens() -> None:
    blocks = Blocks(4, 4)
    mine = computed(blocks, A + B)
    blocks.release(mine[:1])  # out of order, so that the beginning goes first
    blocks.release(mine[1:])
    hog = blocks.allocate(3)
    assert mine[0] in hog
    blocks.release(hog)
    again = computed(blocks, D)
    assert blocks.find_prefix(D + B) == again, "what came after A does not come after D"


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    """test_scheduler.py checks reference counts and contents of blocks with random requests."""
    blocks = Blocks(5, 4)
    old, new = computed(blocks, A + B), computed(blocks, C + D)
    blocks.release(old)
    blocks.release(new)
    assert blocks.in_use == 0
    blocks.release(blocks.find_prefix(A + B))  # used again: now the other one is the oldest
    free, *evicted = blocks.allocate(4)
    assert free not in (*old, *new) and evicted == [new[1], new[0], old[1]]
    assert blocks.find_prefix(A + B) == old[:1] and blocks.find_prefix(C) == []


def test_several_references_at_once_and_blocks_without_others_are_counted_as_one_by_one() -> None:
    both = Blocks(6, 4), Blocks(6, 4)
    for blocks, counts in zip(both, ([3], [1, 1, 1]), strict=True):
        prefix, own = computed(blocks, A + B), blocks.allocate(2)
        for count in counts:
            blocks.share(prefix, count)
        if counts == [3]:
            blocks.release_unshared(own)
        else:
            blocks.release(own)
        for count in counts:
            blocks.release(prefix, count)
        assert blocks.in_use == 2
        blocks.release(prefix)
    assert vars(both[0]) == vars(both[1]) and both[0].in_use == 0
    with pytest.raises(AssertionError, match="released twice"):
        both[0].release(prefix, 2)


def test_invalid_and_cleared_blocks_are_not_found_and_can_be_allocated() -> None:
    blocks = Blocks(3, 4)
    shared = computed(blocks, A + B)
    blocks.share(shared)
    blocks.release(shared, unregister=True)
    assert blocks.find_prefix(A + B) == [] and blocks.in_use == 2  # another sequence still uses them
    blocks.release(shared)
    assert blocks.in_use == 0
    used, unused = computed(blocks, A), computed(blocks, C)
    blocks.release(unused)
    blocks.clear_prefix_index()
    assert blocks.find_prefix(A) == blocks.find_prefix(C) == [] and blocks.in_use == 1
    assert len({*used, *blocks.allocate(2)}) == 3


CPU = torch.device("cpu")
SPEC = small_spec(layers=3, kv_heads=2, head_dim=8)
BLOCK = 3 * 2 * 2 * 8 * 4 * BLOCK_SIZE  # bytes in float32


def free(monkeypatch: pytest.MonkeyPatch, amount: int | None) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: amount)


@pytest.mark.parametrize("blocks", [1, 7, 100_000])
def test_cache_blocks_use_the_budget_and_do_not_exceed_it(blocks: int) -> None:
    for dtype, bytes_each in ((torch.float32, BLOCK), (torch.bfloat16, BLOCK // 2)):
        assert cache_blocks(SPEC, 4, 96, CPU, dtype, blocks * bytes_each / GIB) == blocks
        assert cache_blocks(SPEC, 4, 96, CPU, dtype, (blocks * bytes_each + bytes_each - 1) / GIB) == blocks
    if blocks < 100:
        cache, mapped_memory = new_cache(SPEC, blocks, CPU, torch.float32, mapped=True)
        assert cache.nbytes == blocks * BLOCK and not cache.any() and mapped_memory is None  # only on CUDA


def test_a_budget_below_one_block_is_an_error() -> None:
    with pytest.raises(UserError, match=rf"engine.kv_cache_gib = .* GiB .*less than one block .*{BLOCK} bytes"):
        cache_blocks(SPEC, 4, 96, CPU, torch.float32, (BLOCK - 1) / GIB)


def test_a_deterministic_run_needs_a_budget_if_free_memory_would_limit_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free(monkeypatch, 4000 * BLOCK)
    with deterministic(True, "cpu"):
        assert cache_blocks(SPEC, 4, 96, CPU, torch.float32, 0.0) == 4 * 96 // BLOCK_SIZE
        with pytest.raises(UserError, match=r"room for 1000 of the \d+ blocks .* set engine.kv_cache_gib") as refused:
            cache_blocks(SPEC, 1000, 96, CPU, torch.float32, 0.0)
        named = float(str(refused.value).partition("e.g. to ")[2].partition(",")[0])
        assert 900 <= cache_blocks(SPEC, 1000, 96, CPU, torch.float32, named) <= 1000


def test_without_a_budget_the_cache_is_limited_by_use_and_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 100 * GIB)
    assert cache_blocks(SPEC, 4, 96, CPU, torch.float32, 0.0) == 4 * 96 // BLOCK_SIZE
    assert cache_blocks(SPEC, 4, 97, CPU, torch.float32, 0.0) == 4 * (96 // BLOCK_SIZE + 1)
    free(monkeypatch, 40 * BLOCK)
    assert cache_blocks(SPEC, 1000, 96, CPU, torch.float32, 0.0) == int(40 * MEMORY_FRACTION["cpu"])
    assert cache_blocks(SPEC, 1000, 96, CPU, torch.bfloat16, 0.0) == int(80 * MEMORY_FRACTION["cpu"])
    free(monkeypatch, 1)
    assert cache_blocks(SPEC, 1000, 96, CPU, torch.float32, 0.0) == 1
    free(monkeypatch, None)  # a machine that does not say
    assert cache_blocks(SPEC, 10**6, 96, CPU, torch.float32, 0.0) == min(
        96 // BLOCK_SIZE * 10**6, int(DEFAULT_FREE * MEMORY_FRACTION["cpu"]) // BLOCK
    )


def test_a_cache_larger_than_memory_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"cache of .* GiB does not fit on cpu: lower engine\.kv_cache_gib"):
        new_cache(SPEC, 1 << 50, CPU, torch.float32)
