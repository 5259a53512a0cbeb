"""Attention over blocks of the cache against float64 row by row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from engine_parts import needed_library
from torch import Tensor

from assay.engine.native import attention
from assay.engine.native.compiled import CompiledAttention
from assay.engine.native.scheduler import Chunk

CPU = torch.device("cpu")
SIZE = 4  # tokens in a block
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.03}
ROWS = [*(("fused", dtype) for dtype in TOLERANCE), ("products", torch.float32), ("compiled", torch.float32)]


def random_cache(blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, kv_heads, blocks, SIZE, head_dim, generator=generator).to(dtype)


def exact(
    kv: Tensor, query: Tensor, blocks: Sequence[int], length: int, window: int = 0, scale: float | None = None
) -> Tensor:
    """What one query [H, d] sees of the first `length` tokens in these blocks: [H, d] in float64."""
    first = max(length - window, 0) if window else 0
    slots = [blocks[place // SIZE] * SIZE + place % SIZE for place in range(first, length)]
    keys, values = kv.flatten(2, 3)[:, :, slots].double()
    shared = query.shape[0] // keys.shape[0]
    out = []
    for head, q in enumerate(query.double()):
        weights = (keys[head // shared] @ q * (scale or 1 / math.sqrt(len(q)))).softmax(-1)
        out.append(weights @ values[head // shared])
    return torch.stack(out)


def some_tables(lengths: Sequence[int], blocks: int, seed: int) -> list[list[int]]:
    """Blocks for sequences of these lengths, all different, in no order."""
    order = random.Random(seed).sample(range(blocks), blocks)
    return [[order.pop() for _ in range(-(-length // SIZE))] for length in lengths]


def table_tensor(tables: Sequence[Sequence[int]], width: int, filler: int) -> Tensor:
    return torch.tensor([[*table, *[filler] * (width - len(table))] for table in tables], dtype=torch.int32)


def row_attention(
    kind: str, dtype: torch.dtype, tables: Tensor, lengths: Sequence[int]
) -> attention.RowAttention | CompiledAttention:
    if kind == "compiled":
        return CompiledAttention(needed_library(), tables, torch.tensor(lengths) - 1, 16)
    attend = attention.RowAttention(tables, torch.tensor(lengths), 16, SIZE, dtype)
    attend.plain = kind == "products"  # which of the two is the faster depends on the machine
    return attend


# Windows and scales of layers, some of them twice.
LAYERS = [(0, None), (0, 0.3), *((window, 0.3) for window in (1, 3, 8, 100, 3))]


@pytest.mark.parametrize(("kind", "dtype"), ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 8), (3, 1, 12), (2, 1, 32), (2, 1, 80)])
def test_row_attention_equals_the_float64_reference(
    heads: int, kv_heads: int, head_dim: int, kind: str, dtype: torch.dtype
) -> None:
    lengths = [1, 9, 4, 13, 16, 2]
    kv = random_cache(30, kv_heads, head_dim, dtype)
    tables = some_tables(lengths, 30, seed=1)
    queries = torch.randn(6, heads, head_dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    attend = row_attention(kind, dtype, table_tensor(tables, 7, filler=29), lengths)
    for window, scale in LAYERS:
        out = attend(kv, queries, window, scale)
        assert out.shape == queries.shape and out.dtype == dtype
        for row, length in enumerate(lengths):
            expected = exact(kv, queries[row], tables[row], length, window, scale)
            assert (out[row].double() - expected).abs().max() < TOLERANCE[dtype]


def chunks_of(parts: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> list[Chunk]:
    return [Chunk([0] * (stop + 3), start, stop, table) for (start, stop), table in zip(parts, tables, strict=True)]


PARTS = {
    "whole prompts of one length": [(0, 7), (0, 7)],
    "whole prompts": [(0, 7), (0, 1), (0, 12), (0, 4)],
    "one": [(0, 6)],
    "later parts": [(3, 7), (8, 12), (5, 6)],
    "all kinds": [(0, 5), (9, 17), (4, 8), (0, 1), (15, 16)],
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [(4, 4, 8, torch.float64), (4, 2, 8, torch.float32), (3, 1, 12, torch.bfloat16)],
)
@pytest.mark.parametrize("kind", PARTS)
def test_chunk_attention_equals_the_float64_reference(
    kind: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    parts = PARTS[kind]
    kv = random_cache(30, kv_heads, head_dim, dtype)
    tables = some_tables([stop + 3 for _, stop in parts], 30, seed=4)  # some have blocks for what is still to come
    sees = [(table, i + 1) for (start, stop), table in zip(parts, tables, strict=True) for i in range(start, stop)]
    queries = torch.randn(len(sees), heads, head_dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    attend = attention.ChunkAttention(chunks_of(parts, tables), SIZE, CPU, dtype)
    for window, scale in LAYERS:
        out = attend(kv, queries, window, scale)
        assert out.shape == queries.shape and out.dtype == dtype
        for query, row, (table, length) in zip(queries, out, sees, strict=True):
            assert (row.double() - exact(kv, query, table, length, window, scale)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("garbage", [math.nan, -math.inf])
@pytest.mark.parametrize(("kind", "dtype"), ROWS)
def test_row_attention_ignores_garbage_behind_the_sequence(kind: str, dtype: torch.dtype, garbage: float) -> None:
    lengths = [1, 9, 4, 13, 2]
    kv = random_cache(30, 2, 8, dtype)
    tables = some_tables(lengths, 30, seed=1)
    seen = {slot for table, length in zip(tables, lengths, strict=True) for slot in slots_of_table(table, length)}
    for slot in set(range(30 * SIZE)) - seen:
        kv[:, :, slot // SIZE, slot % SIZE] = garbage
    broken = slots_of_table(tables[3], 13)[6]
    kv[1, :, broken // SIZE, broken % SIZE] = garbage  # a value that the fourth row does see
    queries = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(2)).to(dtype)
    nobodys = next(block for block in range(30) if not any(block in table for table in tables))
    attend = row_attention(kind, dtype, table_tensor(tables, 4, filler=nobodys), lengths)
    out = attend(kv, queries)
    for row, length in enumerate(lengths):
        if row == 3:
            assert not out[row].isfinite().any()
        else:
            expected = exact(kv, queries[row], tables[row], length)
            assert (out[row].double() - expected).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_chunk_attention_ignores_garbage_behind_the_sequence(dtype: torch.dtype, kind: str) -> None:
    """A token that is no number breaks those after it in its own sequence, not those before it, which others share."""
    parts = PARTS[kind]
    kv = random_cache(40, 2, 8, dtype)
    tables = some_tables([stop + 3 for _, stop in parts], 40, seed=4)
    seen = {slot for table, (_, stop) in zip(tables, parts, strict=True) for slot in slots_of_table(table, stop)}
    for slot in set(range(40 * SIZE)) - seen:
        kv[:, :, slot // SIZE, slot % SIZE] = math.nan
    start, stop = parts[0]
    first_bad = start + (stop - start) // 2
    bad = slots_of_table(tables[0], stop)[first_bad]
    kv[:, 1, bad // SIZE, bad % SIZE] = math.nan  # one head alone
    count = sum(stop - start for start, stop in parts)
    queries = torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    out = attention.ChunkAttention(chunks_of(parts, tables), SIZE, CPU, dtype)(kv, queries)
    rows = iter(zip(queries, out, strict=True))
    for part, ((start, stop), table) in enumerate(zip(parts, tables, strict=True)):
        for place in range(start, stop):
            query, row = next(rows)
            heads = slice(0, 2) if part == 0 and place >= first_bad else slice(0, 4)
            expected = exact(kv, query, table, place + 1)
            assert (row.double() - expected)[heads].abs().max() < TOLERANCE[dtype]
            if part == 0 and place >= first_bad:
                assert row[2:].isnan().all()


def slots_of_table(table: Sequence[int], length: int) -> list[int]:
    return [table[place // SIZE] * SIZE + place % SIZE for place in range(length)]


def test_slots_of_a_chunk() -> None:
    chunk = Chunk([0] * 11, 0, 11, [7, 2, 5])
    assert attention.slots_of(chunk, 0, 11, SIZE).tolist() == slots_of_table([7, 2, 5], 11)
    assert attention.slots_of(chunk, 3, 9, SIZE).tolist() == slots_of_table([7, 2, 5], 11)[3:9]
    assert attention.slots_of(chunk, 3, 9, SIZE).dtype == np.int64
