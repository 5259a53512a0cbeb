"""Groups of running rows that begin with the same blocks, so that attention reads these once per group. No tensors."""

from __future__ import annotations

import numpy as np

from assay.engine.sequence import BLOCK_SIZE

MIN_SHARERS = 4  # fewer rows are not worth a tile


ALONE = -1  # the key of a row that shares nothing


def max_tiles(rows: int, rows_per_tile: int, min_sharers: int = MIN_SHARERS) -> int:
    """Tiles that so many rows can make, however they are grouped.

    Most come of groups as small as allowed, one tile each, or of groups with one row more than a tile holds.
    """
    return int(rows // min(min_sharers, (rows_per_tile + 1) / 2))


def find_shared(
    tables: np.ndarray, counts: np.ndarray, min_sharers: int = MIN_SHARERS
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and shared tokens of rows, from their `tables` [n, width] and how many of the first blocks may be shared.

    What counts is the very same blocks: equal tokens in others, computed twice, are not shared. Samples of one prompt
    come first; of the rows that are left, those with the same first block share as much as all of them have in common.
    """
    width = int(counts.max(initial=0))
    if width == 0:
        return np.full(len(tables), ALONE), np.zeros(len(tables), dtype=np.int64)
    chains = np.where(np.arange(width) < counts[:, None], tables[:, :width], np.int32(-1))
    leaders, shared = same_chain(chains, counts), counts.astype(np.int64)
    rest = np.flatnonzero(np.bincount(leaders)[leaders] < min_sharers)
    if len(rest):
        _, firsts, groups = np.unique(chains[rest, 0], return_index=True, return_inverse=True)
        leaders[rest] = rest[firsts[groups]]
        shared[rest] = in_common(chains[rest], chains[leaders[rest]], counts[rest], groups)
    return np.where(counts > 0, leaders, ALONE), shared * BLOCK_SIZE


def same_chain(chains: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each row the first with the same last block, if all the others are the same too; or else itself."""
    last = chains[np.arange(len(chains)), counts - 1]
    _, firsts, groups = np.unique(last, return_index=True, return_inverse=True)
    leaders = firsts[groups]
    # The blocks before may differ, where they were computed twice: only the last is then found by those who come later.
    return np.where((chains == chains[leaders]).all(axis=1), leaders, np.arange(len(chains)))


def in_common(chains: np.ndarray, leading: np.ndarray, counts: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """For each row the blocks with which all of its group begin, given the chains of the groups' leaders."""
    differ = chains != leading
    alike = np.where(differ.any(axis=1), differ.argmax(axis=1), counts)
    common = np.full(groups.max() + 1, chains.shape[1])
    np.minimum.at(common, groups, alike)
    return common[groups]


def plan_sharing(
    keys: np.ndarray, tokens: np.ndarray, rows_per_tile: int, min_sharers: int = MIN_SHARERS, rows: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles of rows with the same key (ALONE: in none) and so the same number of shared tokens; `rows`: there can be.

    Returns the rows of the tiles [T, rows_per_tile] (from the left; -1: nobody), the tokens of each tile [T] (0: empty,
    as are all that follow) and the tokens that each row finds in its tile [rows].
    """
    rows = len(keys) if rows is None else rows
    tiles = max_tiles(rows, rows_per_tile, min_sharers)
    members = np.full((tiles, rows_per_tile), -1, dtype=np.int32)
    lengths, skip = np.zeros(tiles, dtype=np.int32), np.zeros(rows, dtype=np.int32)

    sharing = np.flatnonzero((keys != ALONE) & (tokens > 0))
    sharing = sharing[np.argsort(keys[sharing], kind="stable")]
    starts = np.flatnonzero(np.diff(keys[sharing], prepend=ALONE))  # of groups, which now lie side by side
    sizes = np.diff(starts, append=len(sharing))
    enough = sizes >= min_sharers
    sharing, sizes = sharing[np.repeat(enough, sizes)], sizes[enough]

    places = np.arange(len(sharing)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within the group
    group_tiles = -(-sizes // rows_per_tile)
    tile = np.repeat(np.cumsum(group_tiles) - group_tiles, sizes) + places // rows_per_tile
    members[tile, places % rows_per_tile] = sharing
    lengths[tile] = skip[sharing] = tokens[sharing]
    return members, lengths, skip
