from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.engine.native.kernels.attention import (
    SHARED_TUNING,
    TUNING,
    SharedPrefixes,
    decode_attention,
    default_splits,
    find_groups,
    max_tiles,
    min_range,
    plan_tiles,
    tile_rows,
    tuning,
)
from assay.engine.sequence import BLOCK_SIZE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 100]
MAX_BLOCKS = 128 // BLOCK_SIZE  # of a row
BLOCKS = 5 * MAX_BLOCKS
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities and NaN are meant


def cache_and_tables(lengths: list[int], kv_heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks in no order, the first of the last two rows shared; NaN wherever no sequence has a token."""
    generator = torch.Generator().manual_seed(len(lengths) + size)
    kv = torch.full((2, kv_heads, BLOCKS, BLOCK_SIZE, size), math.nan, dtype=dtype)
    tables = torch.full((len(lengths) + 2, MAX_BLOCKS), 2**30, dtype=torch.int32)  # a place far outside the cache
    free = torch.randperm(BLOCKS, generator=generator).int()
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        tables[row, :count], free = free[:count], free[count:]
    if len(lengths) > 1 and min(lengths[-2:]) >= BLOCK_SIZE:
        tables[len(lengths) - 1, 0] = tables[len(lengths) - 2, 0]
    for row, length in enumerate(lengths):
        for position in range(length):
            block, offset = tables[row, position // BLOCK_SIZE], position % BLOCK_SIZE
            kv[:, :, block, offset] = torch.randn((2, kv_heads, size), generator=generator).to(dtype)
    return kv.to(DEVICE), tables.to(DEVICE)


def reference(
    q: Tensor, kv: Tensor, tables: Tensor, lengths: list[int], window: int = 0, scale: float | None = None
) -> Tensor:
    """In 64 bits, one head of one sequence at a time."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // kv.shape[1]
    for row, length in enumerate(lengths):
        blocks = tables[row, : -(-length // BLOCK_SIZE)].long()
        for head in range(q.shape[1]):
            first = max(length - window, 0) if window else 0
            keys, values = kv[:, head // group, blocks].double().flatten(1, 2)[:, first:length]
            weights = torch.softmax(keys @ q[row, head].double() * (scale or 1 / math.sqrt(q.shape[2])), dim=0)
            out[row, head] = weights @ values
    return out


def queries(rows: int, heads: int, size: int, dtype: torch.dtype, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return (scale * torch.randn((rows, heads, size), generator=generator)).to(DEVICE, dtype)


def assert_near(out: Tensor, expected: Tensor) -> None:
    # In bfloat16 the weights and the result are rounded (by the interpreter: cut off); entries are of order one.
    tolerance = 5e-6 if out.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("group", "kv_heads", "size", "splits", "dtype"),
    [
        (7, 2, 64, 1, torch.bfloat16),
        (7, 2, 64, 3, torch.float32),
        (3, 1, 80, 3, torch.bfloat16),
        (1, 1, 96, 1, torch.float32),
        (3, 1, 128, 3, torch.bfloat16),
        (2, 2, 8, 1, torch.float32),
    ],
)  # 3 splits of 100 tokens in tiles of 32: two tiles, a part, nothing
def test_decode_attention_equals_the_float64_reference(
    group: int, kv_heads: int, size: int, splits: int, dtype: torch.dtype
) -> None:
    kv, tables = cache_and_tables(LENGTHS, kv_heads, size, dtype)
    q = queries(len(LENGTHS), group * kv_heads, size, dtype)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    for window, scale in ((0, None), (13, 0.2)) if size == 64 else ((splits * 40, None),):
        out = decode_attention(q, kv, tables, lengths, splits=splits, block_n=32, window=window, scale=scale)
        assert out.dtype == dtype and out[0].count_nonzero() == 0
        assert_near(out, reference(q, kv, tables, LENGTHS, window, scale))


@pytest.mark.parametrize("splits", [1, 3])
def test_the_result_is_divided_by_a_scale_and_stored_in_8_bits(splits: int) -> None:
    kv, tables = cache_and_tables(LENGTHS, 2, 64, torch.bfloat16)
    q = queries(len(LENGTHS), 14, 64, torch.bfloat16)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    scale, expected = torch.full((1,), 0.02, device=DEVICE), reference(q, kv, tables, LENGTHS)
    assert_near(decode_attention(q, kv, tables, lengths, splits=splits, out_scale=scale) * 0.02, expected)
    if DEVICE == "cuda":  # Triton's interpreter rounds 8-bit numbers wrongly
        out = torch.empty_like(q, dtype=torch.float8_e4m3fn)
        decode_attention(q, kv, tables, lengths, out, splits, out_scale=scale)
        gap = (out.double() * 0.02 - expected).abs()
        assert (gap <= expected.abs() * 2**-3.9 + 0.02 * 2**-9 + 2**-7).all()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_cache_in_8_bits(splits: int) -> None:
    kv, tables = cache_and_tables(LENGTHS, 2, 64, torch.bfloat16)
    kv, q = kv.to(torch.float8_e4m3fn), queries(len(LENGTHS), 6, 64, torch.bfloat16)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    out = decode_attention(q, kv, tables, lengths, splits=splits, block_n=32)
    assert_near(out, reference(q, kv, tables, LENGTHS))


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float32), (128, torch.bfloat16)])
def test_decode_attention_with_tuned_tiles(size: int, dtype: torch.dtype) -> None:
    kv, tables = cache_and_tables([100, 128], 1, size, dtype)
    q = queries(2, 4, size, dtype)
    lengths = torch.tensor([100, 128], dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(q)
    assert decode_attention(q, kv, tables, lengths, out) is out
    assert_near(out, reference(q, kv, tables, [100, 128]))


def test_more_query_heads_than_rows_of_a_tile() -> None:
    kv, tables = cache_and_tables([20], 1, 16, torch.float32)
    q = queries(1, 20, 16, torch.float32)
    out = decode_attention(q, kv, tables, torch.tensor([20], dtype=torch.int32, device=DEVICE), splits=1)
    assert_near(out, reference(q, kv, tables, [20]))


@pytest.mark.parametrize("splits", [1, 3])
def test_large_exponents_do_not_overflow(splits: int) -> None:
    kv, tables = cache_and_tables([100], 1, 16, torch.float32)
    q = queries(1, 2, 16, torch.float32, scale=400.0)
    lengths = torch.tensor([100], dtype=torch.int32, device=DEVICE)
    out = decode_attention(q, kv, tables, lengths, splits=splits, block_n=16)
    torch.testing.assert_close(out.double(), reference(q, kv, tables, [100]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 3])
def test_nan_within_the_sequence_gives_nan(splits: int) -> None:
    kv, tables = cache_and_tables([48, 48], 1, 16, torch.float32)
    last = tables[0, 32 // BLOCK_SIZE : 48 // BLOCK_SIZE]  # a whole range of the first row; all its exponents are NaN
    kv[0, 0, last.long()] = math.nan
    lengths = torch.tensor([48, 40], dtype=torch.int32, device=DEVICE)
    q = queries(2, 2, 16, torch.float32)
    out = decode_attention(q, kv, tables, lengths, splits=splits, block_n=16)
    assert out[0].isnan().all()
    assert not out[1].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_heads", "tokens"), [(2, 2**23), (1, 2**24)])
def test_a_cache_with_more_than_two_to_the_31_numbers(kv_heads: int, tokens: int) -> None:
    size, blocks, length = 128, tokens // BLOCK_SIZE + 4, BLOCK_SIZE + 4
    kv = torch.empty((2, kv_heads, blocks, BLOCK_SIZE, size), dtype=torch.bfloat16, device=DEVICE)
    tables = torch.tensor([[blocks - 1, 3]], dtype=torch.int32, device=DEVICE)
    small = queries(4 * kv_heads, BLOCK_SIZE, size, torch.bfloat16).view(2, kv_heads, 2, BLOCK_SIZE, size)
    kv[:, :, tables[0].long()] = small
    q = queries(1, 4, size, torch.bfloat16)
    out = decode_attention(q, kv, tables, torch.tensor([length], dtype=torch.int32, device=DEVICE), splits=1)
    assert_near(out, reference(q, small, torch.tensor([[0, 1]], device=DEVICE), [length]))


@pytest.mark.parametrize("splits", [1, 4])
def test_row_order_and_reused_counters(splits: int) -> None:
    kv, tables = cache_and_tables(LENGTHS, 2, 16, torch.float32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros((len(LENGTHS), 2), dtype=torch.int32, device=DEVICE)
    order = lengths.argsort(descending=True).int()
    for scale in (2.0, 1.0):
        q = queries(len(LENGTHS), 6, 16, torch.float32, scale)
        out = decode_attention(q, kv, tables, lengths, splits=splits, counters=counters, order=order, block_n=16)
        assert_near(out, reference(q, kv, tables, LENGTHS))
        assert not counters.any()


def test_row_order_selects_the_rows_to_compute() -> None:
    kv, tables = cache_and_tables(LENGTHS, 2, 16, torch.float32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    q = queries(len(LENGTHS), 6, 16, torch.float32)
    out, order = torch.full_like(q, 7.0), torch.full_like(lengths, 5)
    decode_attention(q, kv, tables, lengths, out, splits=1, order=order, block_n=16)
    assert (out[:5] == 7.0).all()
    assert_near(out[5:], reference(q, kv, tables, LENGTHS)[5:])


@pytest.mark.gpu
def test_many_programs_merge_ranges_concurrently() -> None:
    """Over and over, with all multiprocessors busy: a range that is read too early would show."""
    lengths = [100 + 7 * i for i in range(60)]
    generator = torch.Generator().manual_seed(3)
    blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
    kv = torch.randn((2, 2, blocks, BLOCK_SIZE, 64), generator=generator).to(DEVICE, torch.bfloat16)
    tables = torch.zeros((60, 80), dtype=torch.int32)
    free = torch.randperm(blocks, generator=generator).int()
    for row, length in enumerate(lengths):
        count = -(-length // BLOCK_SIZE)
        tables[row, :count], free = free[:count], free[count:]
    tables = tables.to(DEVICE)
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    counters = torch.zeros((60, 2), dtype=torch.int32, device=DEVICE)
    q = queries(60, 14, 64, torch.bfloat16)
    first = decode_attention(q, kv, tables, device_lengths, splits=16, counters=counters)
    assert_near(first, reference(q, kv, tables, lengths))
    for _ in range(200):
        assert torch.equal(decode_attention(q, kv, tables, device_lengths, splits=16, counters=counters), first)


def test_default_splits() -> None:
    assert [default_splits(n, 2, 400) for n in (1, 16, 64, 128, 256, 512, 1024)] == [16, 16, 8, 4, 2, 1, 1]
    assert [default_splits(1024, 2, span) for span in (16, 2047, 2048, 4095, 4096, 32_768)] == [1, 1, 2, 2, 4, 16]
    for n in range(1, 1025, 7):
        for kv_heads in (1, 2, 8):
            splits = default_splits(n, kv_heads, 5000)
            assert splits & (splits - 1) == 0 and 1 <= splits <= 16
            assert splits <= 4 or n * kv_heads * splits <= 1024
    assert min_range(1, 2) == 64 and min_range(1024, 2) == 1024


def test_every_head_size_has_a_tuning() -> None:
    assert SHARED_TUNING.keys() == TUNING.keys()
    for size in (8, 64, 80, 96, 128, 192, 256):
        block_n, warps, stages = tuning(size)
        assert block_n % BLOCK_SIZE == 0 and warps & (warps - 1) == 0 and stages >= 1
        for group in (1, 2, 6, 7, 20, 200):
            assert 1 <= tile_rows(group, size) <= 16


class Batch:
    """Rows in no order. Of each group (rows, blocks, tails): the first blocks are shared, so many tokens follow.

    A tail of 0 is a row that has ended; a group of no blocks shares nothing. NaN wherever no sequence has a token.
    """

    def __init__(self, groups: list[tuple[int, list[int]]], shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        group, kv_heads, size = shape
        rng = random.Random(len(groups) + size)
        generator = torch.Generator().manual_seed(size)
        rows = [(number, tail) for number, (_, tails) in enumerate(groups) for tail in tails]
        rng.shuffle(rows)
        counts = [-(-(groups[number][0] * BLOCK_SIZE + tail) // BLOCK_SIZE) for number, tail in rows]
        free = list(range(sum(counts) + sum(blocks for blocks, _ in groups)))
        rng.shuffle(free)
        self.kv = torch.full((2, kv_heads, len(free), BLOCK_SIZE, size), math.nan)
        common = [[free.pop() for _ in range(blocks)] for blocks, _ in groups]
        tables = np.full((len(rows) + 1, max(counts)), 2**30, dtype=np.int32)
        for row, (number, tail) in enumerate(rows):
            own = [free.pop() for _ in range(counts[row] - len(common[number]))]
            tables[row, : counts[row]] = common[number] + own
            for index, block in enumerate(own):
                held = min(tail - index * BLOCK_SIZE, BLOCK_SIZE)
                self.kv[:, :, block, :held] = torch.randn((2, kv_heads, held, size), generator=generator)
        for block in itertools.chain(*common):
            self.kv[:, :, block] = torch.randn((2, kv_heads, BLOCK_SIZE, size), generator=generator)
        self.kv = self.kv.to(DEVICE, dtype)
        self.counts = np.array([groups[number][0] for number, _ in rows])
        self.lengths = [groups[number][0] * BLOCK_SIZE + tail if tail else 0 for number, tail in rows]
        self.host_tables = tables[:-1]
        self.tables = torch.from_numpy(tables).to(DEVICE)
        self.q = queries(len(rows), group * kv_heads, size, dtype)
        self.shared = self.plan(len(rows) + 5)

    def plan(self, most: int) -> SharedPrefixes:
        heads, size = self.q.shape[1:]
        shared = SharedPrefixes.new(most, heads, self.kv.shape[1], size, DEVICE)
        for scratch in (shared.maxima, shared.sums, shared.partials):
            scratch.fill_(math.nan)
        keys, tokens = find_groups(self.host_tables, self.counts)
        plan = plan_tiles(keys, tokens, shared.rows.shape[1], rows=most)
        shared.write(plan, lambda values: torch.from_numpy(values).to(DEVICE))
        return shared

    def attend(self, shared: SharedPrefixes | None, block_n: int | None = None, splits: int = 1) -> Tensor:
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        return decode_attention(self.q, self.kv, self.tables, lengths, splits=splits, shared=shared, block_n=block_n)

    def reference(self) -> Tensor:
        return reference(self.q, self.kv, self.tables, self.lengths)


MANY = 80 // BLOCK_SIZE  # blocks that do not fit one tile of keys
MIXED = [
    (3, [1, BLOCK_SIZE, BLOCK_SIZE + 1, 40, 0, 5]),
    (0, [1, BLOCK_SIZE, 50, 0]),
    (1, [2, 30, 7, BLOCK_SIZE]),
    (MANY, [20] * 9 + [0]),
    (2, [9, 9, 9]),
]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((7, 2, 64), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((6, 1, 128), torch.float32, marks=pytest.mark.slow),
        ((1, 1, 96), torch.float32),
        ((2, 1, 8), torch.bfloat16),
    ],
)
def test_shared_prefixes_equal_the_float64_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    batch = Batch(MIXED, shape, dtype)
    assert sorted(set(batch.shared.skip.tolist())) == [
        blocks * BLOCK_SIZE for blocks in (0, 1, 3, MANY)
    ]  # too few share two blocks
    out = batch.attend(batch.shared)
    ended = [row for row, length in enumerate(batch.lengths) if length == 0]
    assert len(ended) == 3 and out[ended].count_nonzero() == 0
    assert_near(out, batch.reference())
    assert_near(out, batch.attend(None).double())


def test_rows_with_shared_prefixes_are_split() -> None:
    batch = Batch([(3, [90, 1, 70, 0, 130, 33]), (0, [1, 100, 0])], (2, 1, 16), torch.float32)
    for splits in (2, 4):  # at least 64 tokens each
        assert_near(batch.attend(batch.shared, 16, splits), batch.reference())


def test_a_prefix_group_with_several_tiles() -> None:
    batch = Batch([(4, [1, 2, 3, 20, 35] * 8), (2, [1] * 5)], (2, 1, 16), torch.float32)
    assert (batch.shared.tokens > 0).sum() == 3 + 1
    assert_near(batch.attend(batch.shared, block_n=16), batch.reference())


@pytest.mark.parametrize("ended", [0, 7])
def test_a_tile_with_ended_rows(ended: int) -> None:
    """The first among them too, whose table the whole tile goes by, and all of them."""
    batch = Batch([(3, [5] * 8)], (7, 1, 16), torch.float32)
    batch.lengths = [0] * (ended + 1) + batch.lengths[ended + 1 :]
    out = batch.attend(batch.shared)
    assert out[: ended + 1].count_nonzero() == 0
    assert_near(out, batch.reference())


def test_rows_with_only_a_shared_prefix() -> None:
    batch = Batch([(3, [5] * 5)], (7, 1, 16), torch.float32)
    batch.lengths[1:3] = [3 * BLOCK_SIZE] * 2
    assert_near(batch.attend(batch.shared), batch.reference())


def test_fewer_rows_than_planned() -> None:
    batch = Batch([(3, [5] * 8)], (7, 1, 16), torch.float32)
    batch.q, batch.lengths = batch.q[:5].contiguous(), batch.lengths[:5]
    assert_near(batch.attend(batch.shared), batch.reference())
    assert batch.shared.sums[5:].isnan().all()  # nobody's


def test_a_plan_without_groups() -> None:
    batch = Batch([(0, [5, 0, 33])], (3, 1, 16), torch.float32)
    shared = SharedPrefixes.new(8, 3, 1, 16, DEVICE)
    shared.sums.fill_(math.nan)
    assert_near(batch.attend(shared), batch.reference())
    assert shared.sums.isnan().all()  # nothing was written


def test_only_the_first_kernel_reads_shared_blocks() -> None:
    """What a tile is told to take is what counts: half of the shared blocks, and rows of their own for the rest."""
    batch = Batch([(4, [5] * 4)], (2, 1, 16), torch.float32)
    batch.shared.tokens[0] = batch.shared.skip[:4] = 2 * BLOCK_SIZE
    assert_near(batch.attend(batch.shared), batch.reference())
    batch.shared.skip[:4] = 3 * BLOCK_SIZE  # leaves a block out
    batch.kv[:, :, int(batch.tables[0, 2])] = math.nan
    assert not batch.attend(batch.shared).isnan().any()


def test_nan_in_shared_blocks_gives_nan() -> None:
    batch = Batch([(2, [5] * 4), (2, [5] * 4)], (2, 1, 16), torch.float32)
    batch.kv[0, 0, int(batch.tables[0, 0])] = math.nan
    hit = (batch.tables[:8, 0] == batch.tables[0, 0]).tolist()
    assert hit.count(True) == 4
    assert batch.attend(batch.shared).isnan().all((1, 2)).tolist() == hit
    assert batch.attend(batch.shared).isnan().any((1, 2)).tolist() == hit


def test_large_exponents_in_shared_blocks() -> None:
    batch = Batch([(3, [5] * 4)], (2, 1, 16), torch.float32)
    batch.q *= 200.0
    torch.testing.assert_close(batch.attend(batch.shared).double(), batch.reference(), rtol=1e-4, atol=1e-4)


def test_buffers_fit_every_plan() -> None:
    shared = SharedPrefixes.new(100, 14, 2, 64, DEVICE)
    assert shared.rows.shape == (max_tiles(100, tile_rows(7, 64)), tile_rows(7, 64))
    assert shared.partials.shape == (100, 14, 64) and shared.partials.dtype == torch.float32
    assert shared.tokens.count_nonzero() == 0 and shared.skip.count_nonzero() == 0
