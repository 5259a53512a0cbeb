"""Groups of running rows that begin with the same blocks, so that attention reads these once per group. No tensors."""

from __future__ import annotations

import numpy as np

from assay.engine.sequence import BLOCK_SIZE

MIN_GROUP = 4  # rows; smaller groups are not worth a tile
NO_GROUP = -1  # the key of a row without a group


def max_tiles(rows: int, rows_per_tile: int, min_group: int = MIN_GROUP) -> int:
    """Maximum number of tiles for this number of rows, however they are grouped.

    The worst cases are groups of the minimum size, with one tile each, and groups with one row more than a tile has.
    """
    return int(rows // min(min_group, (rows_per_tile + 1) / 2))


def find_groups(tables: np.ndarray, counts: np.ndarray, min_group: int = MIN_GROUP) -> tuple[np.ndarray, np.ndarray]:
    """Group keys and shared tokens of rows, from their block `tables` [n, width] and the `counts` of shareable blocks.

    Rows share identical blocks only, not equal tokens that were computed twice. Samples of one prompt form groups
    first. Of the other rows, those with the same first block share the blocks that all of them have in common.
    """
    width = int(counts.max(initial=0))
    if width == 0:
        return np.full(len(tables), NO_GROUP), np.zeros(len(tables), dtype=np.int64)
    chains = np.where(np.arange(width) < counts[:, None], tables[:, :width], np.int32(-1))
    leaders, shared = same_chain(chains, counts), counts.astype(np.int64)
    rest = np.flatnonzero(np.bincount(leaders)[leaders] < min_group)
    if len(rest):
        _, firsts, groups = np.unique(chains[rest, 0], return_index=True, return_inverse=True)
        leaders[rest] = rest[firsts[groups]]
        shared[rest] = common_blocks(chains[rest], chains[leaders[rest]], counts[rest], groups)
    return np.where(counts > 0, leaders, NO_GROUP), shared * BLOCK_SIZE


def same_chain(chains: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each row, the first row with the same last block if all other blocks are equal too; otherwise itself."""
    last = chains[np.arange(len(chains)), counts - 1]
    _, firsts, groups = np.unique(last, return_index=True, return_inverse=True)
    leaders = firsts[groups]
    # Earlier blocks may differ if they were computed twice: then only the last one is in the prefix index.
    return np.where((chains == chains[leaders]).all(axis=1), leaders, np.arange(len(chains)))


def common_blocks(chains: np.ndarray, leading: np.ndarray, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each row, the number of first blocks that are common to its group, given the chains of the group leaders."""
    differ = chains != leading
    alike = np.where(differ.any(axis=1), differ.argmax(axis=1), counts)
    common = np.full(groups.max() + 1, chains.shape[1])
    np.minimum.at(common, groups, alike)
    return common[groups]


def plan_tiles(
    keys: np.ndarray, tokens: np.ndarray, rows_per_tile: int, min_group: int = MIN_GROUP, rows: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles of rows with the same key (NO_GROUP: none) and number of shared tokens. `rows`: maximum number of rows.

    Returns the rows of the tiles [T, rows_per_tile] (-1: unused), the shared tokens of each tile [T] (0: unused, as all
    tiles after it) and the shared tokens of each row [rows].
    """
    rows = len(keys) if rows is None else rows
    tiles = max_tiles(rows, rows_per_tile, min_group)
    members = np.full((tiles, rows_per_tile), -1, dtype=np.int32)
    lengths, skip = np.zeros(tiles, dtype=np.int32), np.zeros(rows, dtype=np.int32)

    sharing = np.flatnonzero((keys != NO_GROUP) & (tokens > 0))
    sharing = sharing[np.argsort(keys[sharing], kind="stable")]
    starts = np.flatnonzero(np.diff(keys[sharing], prepend=NO_GROUP))  # of the groups, which are now contiguous
    sizes = np.diff(starts, append=len(sharing))
    enough = sizes >= min_group
    sharing, sizes = sharing[np.repeat(enough, sizes)], sizes[enough]

    places = np.arange(len(sharing)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within the group
    group_tiles = -(-sizes // rows_per_tile)
    tile = np.repeat(np.cumsum(group_tiles) - group_tiles, sizes) + places // rows_per_tile
    members[tile, places % rows_per_tile] = sharing
    lengths[tile] = skip[sharing] = tokens[sharing]
    return members, lengths, skip
