"""Groups of rows that share blocks, and their tiles."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engine.native.kernels.attention import NO_GROUP, find_groups, max_tiles, plan_tiles
from assay.engine.sequence import BLOCK_SIZE

KEYS = st.lists(st.integers(NO_GROUP, 6), max_size=60)


@given(KEYS, st.integers(1, 9), st.integers(1, 6), st.integers(0, 9))
def test_plan_groups_rows_of_equal_keys_into_tiles(listed: list[int], height: int, least: int, spare: int) -> None:
    keys = np.array(listed, dtype=np.int64)
    tokens = np.maximum(keys + 1, 0) * BLOCK_SIZE  # by key, so that those of a tile can be told
    members, lengths, skip = plan_tiles(keys, tokens, height, least, len(listed) + spare)
    assert members.shape == (max_tiles(len(listed) + spare, height, least), height)
    assert members.dtype == lengths.dtype == skip.dtype == np.int32 and len(skip) == len(listed) + spare
    sizes = Counter(listed)
    placed = Counter(members[members >= 0].tolist())
    assert placed == {row: 1 for row, key in enumerate(listed) if key != NO_GROUP and sizes[key] >= least}
    expected = [(key + 1) * BLOCK_SIZE if row in placed else 0 for row, key in enumerate(listed)]
    assert skip.tolist() == expected + [0] * spare
    used = 0
    for tile, length in zip(members.tolist(), lengths.tolist(), strict=True):
        rows = [row for row in tile if row >= 0]
        assert tile == rows + [-1] * (height - len(rows))
        assert {int(skip[row]) for row in rows} == ({length} if length else set())
        used += bool(rows)
    assert used == sum(-(-n // height) for key, n in sizes.items() if key != NO_GROUP and n >= least)
    assert lengths[:used].all()  # what is empty comes last


def most_tiles(rows: int, height: int, least: int) -> int:
    """By trying every size of the last group."""
    best = [0] * (rows + 1)
    for n in range(1, rows + 1):
        best[n] = max([best[n - 1], *(best[n - size] - (-size // height) for size in range(least, n + 1))])
    return best[rows]


@pytest.mark.parametrize("height", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("least", [1, 2, 4, 8])
def test_max_tiles_is_enough_for_any_grouping(height: int, least: int) -> None:
    for rows in (0, 1, 7, 33, 64):
        assert most_tiles(rows, height, least) <= max_tiles(rows, height, least)
    if 2 * least <= height:
        assert max_tiles(64, height, least) == most_tiles(64, height, least)  # and no more than that


def shared_rows(tables: list[list[int]], counts: list[int], least: int = 4) -> list[tuple[list[int], int]]:
    """Groups of rows and the tokens they share."""
    width = max(len(table) for table in tables)
    array = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int32)
    keys, tokens = find_groups(array, np.array(counts), least)
    assert keys.shape == tokens.shape == (len(tables),)
    groups = [np.flatnonzero(keys == key) for key in sorted(set(keys.tolist()) - {NO_GROUP})]
    assert all(len(set(tokens[group].tolist())) == 1 for group in groups)
    return [(group.tolist(), int(tokens[group[0]])) for group in groups if len(group) >= least]


def test_samples_of_one_prompt_form_a_group() -> None:
    tables = [[7, 8, 9, 30 + row] if row % 2 else [4, 5, 60 + row] for row in range(8)]
    assert shared_rows(tables, [2, 3] * 4) == [([0, 2, 4, 6], 2 * BLOCK_SIZE), ([1, 3, 5, 7], 3 * BLOCK_SIZE)]


def test_rows_with_the_same_last_block_but_different_parents_share_less() -> None:
    """Whoever finds the second block again may have another first one: see test_kv_cache.py."""
    assert shared_rows([[1, 2], [1, 2], [1, 2], [1, 2], [5, 2]], [2] * 5) == [([0, 1, 2, 3], 2 * BLOCK_SIZE)]


def test_prompts_with_a_common_prefix_form_a_group() -> None:
    tables = [[1, 2, 3, 10 + row, 20 + row] for row in range(4)]
    assert shared_rows(tables, [5] * 4) == [([0, 1, 2, 3], 3 * BLOCK_SIZE)]
    assert shared_rows(tables, [5, 5, 5, 2]) == [([0, 1, 2, 3], 2 * BLOCK_SIZE)]
    # Not at the cost of samples that share a whole prompt, and not with prompts too short to share anything.
    several = [[1, 2, 9]] * 4 + tables + [[1]]
    assert shared_rows(several, [3] * 4 + [4] * 4 + [0]) == [
        ([0, 1, 2, 3], 3 * BLOCK_SIZE),
        ([4, 5, 6, 7], 3 * BLOCK_SIZE),
    ]


def test_rows_without_common_blocks_form_no_group() -> None:
    assert shared_rows([[1], [2], [3]], [0, 0, 0], 1) == []
    keys, tokens = find_groups(np.zeros((0, 4), dtype=np.int32), np.zeros(0, dtype=np.int64))
    assert len(keys) == len(tokens) == 0
    members, lengths, skip = plan_tiles(keys, tokens, 8, rows=16)
    assert (members == -1).all() and not lengths.any() and not skip.any()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)), max_size=30))
def test_rows_of_a_group_have_the_same_shared_blocks(rows: list[tuple[int, int, int, int]]) -> None:
    tables = np.array([row[:3] for row in rows], dtype=np.int32).reshape(-1, 3)
    counts = np.array([row[3] for row in rows], dtype=np.int64)
    keys, tokens = find_groups(tables, counts, 2)
    for key in set(keys.tolist()) - {NO_GROUP}:
        group = np.flatnonzero(keys == key)
        (length,) = set(tokens[group].tolist())
        assert 0 < length <= counts[group].min() * BLOCK_SIZE and length % BLOCK_SIZE == 0
        assert len({tuple(table) for table in tables[group, : length // BLOCK_SIZE].tolist()}) == 1
    # No two alike are missed: as many as have a chain alone begin with a block that nobody else begins with.
    usable = [row for row in range(len(rows)) if counts[row]]
    firsts = Counter(int(tables[row, 0]) for row in usable)
    whole = Counter((tuple(tables[row, : counts[row]].tolist()), int(counts[row])) for row in usable)
    for row in usable:
        chain = (tuple(tables[row, : counts[row]].tolist()), int(counts[row]))
        if whole[chain] == firsts[int(tables[row, 0])] > 1:
            assert tokens[row] == counts[row] * BLOCK_SIZE and (keys == keys[row]).sum() == whole[chain]
