from __future__ import annotations

import pytest
import torch
from engine_parts import small_spec

from assay.engine.native import kv_cache
from assay.engine.native.kv_cache import DEFAULT_FREE, GIB, MEMORY_FRACTION, cache_blocks, new_cache
from assay.engine.sequence import BLOCK_SIZE
from assay.types import UserError

CPU = torch.device("cpu")
SPEC = small_spec(layers=3, kv_heads=2, head_dim=8)
BLOCK = 3 * 2 * 2 * 8 * 4 * BLOCK_SIZE  # bytes in float32


def free(monkeypatch: pytest.MonkeyPatch, amount: int | None) -> None:
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: amount)


@pytest.mark.parametrize("blocks", [1, 2, 7, 100_000])
def test_cache_blocks_use_the_budget_and_do_not_exceed_it(blocks: int) -> None:
    for dtype, bytes_each in ((torch.float32, BLOCK), (torch.bfloat16, BLOCK // 2)):
        assert cache_blocks(SPEC, 4, 96, CPU, dtype, blocks * bytes_each / GIB) == blocks
        assert cache_blocks(SPEC, 4, 96, CPU, dtype, (blocks * bytes_each + bytes_each - 1) / GIB) == blocks
    if blocks < 100:
        assert new_cache(SPEC, blocks, CPU, torch.float32)[0].nbytes == blocks * BLOCK


def test_a_budget_below_one_block_is_an_error() -> None:
    with pytest.raises(UserError, match=rf"engine.memory = .* GiB .*less than one block .*{BLOCK} bytes"):
        cache_blocks(SPEC, 4, 96, CPU, torch.float32, (BLOCK - 1) / GIB)


def test_without_a_budget_the_cache_is_limited_by_use_and_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_new_cache_is_zeros_of_the_given_dtype(dtype: torch.dtype) -> None:
    cache, mapped_memory = new_cache(SPEC, 5, CPU, dtype, lend=True)
    assert mapped_memory is None  # only on CUDA
    assert cache.shape == (3, 2, 2, 5, BLOCK_SIZE, 8) and cache.dtype == dtype and cache.is_contiguous()
    assert not cache.any()
    cache[1, 0, 1, 4] = 2.5
    assert float(cache.float().sum()) == 2.5 * BLOCK_SIZE * 8


def test_a_cache_larger_than_memory_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"cache of .* GiB does not fit on cpu: lower engine\.memory"):
        new_cache(SPEC, 1 << 50, CPU, torch.float32)
