"""Which running rows begin with the same blocks, so that attention can read these once for many rows. No tensors.

Decoding on CUDA: one step of all rows, from token to token, recorded once and replayed without the host.

A recording has a fixed number of rows; there are a few, and the smallest that holds all running rows is replayed. Rows
that have ended are passed over by the kernels, so the host need not look after every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from assay.engine.native.network import FusedDecoder, Places
from assay.engine.native.runner import Runner
from assay.engine.rows import Rows
from assay.engine.sequence import BLOCK_SIZE, Column, RowState, Sample

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


WINDOW = 3  # steps between two looks; blocks are taken for all of them at once, and stand empty until they are reached
SHARING_PROGRAMS = 512  # rows times key heads below which nothing is shared
SHARED_TOKENS = 256  # from which reading shared blocks once pays for one more kernel


def sizes_up_to(rows: int) -> list[int]:
    """Rows of recordings: powers of two up to 64, then steps of 32 up to 512, and of an eighth or less beyond."""
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < rows]
    size, stride = 64, 32
    while size < rows:
        sizes.append(size)
        size += stride
        if size >= 16 * stride:
            stride *= 2
    return [*sizes, rows]


class GraphRunner(Runner):
    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor) -> None:
        from assay.engine.native.kernels import attention, layers, sampling

        super().__init__(network, rows, kv)
        self.attention, self.layers, self.sampling = attention, layers, sampling
        self.window, self.ahead = WINDOW, 1
        spec = network.spec
        self.least_shared = SHARED_TOKENS // BLOCK_SIZE
        self.shared = attention.Shared.new(rows.size, spec.heads, spec.kv_heads, spec.head_dim, kv.device)
        self.order = torch.arange(rows.size, dtype=torch.int32, device=kv.device)
        self.counters = torch.zeros(rows.size, spec.kv_heads, dtype=torch.int32, device=kv.device)
        self.scratch = sampling.Scratch(rows.size, network.spec.vocab_size, kv.device)
        self.sizes = sizes_up_to(rows.size)
        # By rows, whether blocks are shared, and into how many ranges sequences are cut.
        self.graphs: dict[tuple[int, bool, int], torch.cuda.CUDAGraph] = {}
        self.sharing = False
        self.pool = torch.cuda.graph_pool_handle()

    def arrange(self, running: Sequence[Sample]) -> None:
        """Order rows by length, and see who begins with the same blocks, if that is worth a kernel of its own."""
        size = len(running)
        # The longest first. All grow by one token a step, so that the order holds until somebody comes or goes.
        order = np.arange(self.rows.size, dtype=np.int32)
        order[:size] = np.argsort(-self.rows.begun[:size], kind="stable")
        self.order.copy_(self.rows.upload(order))
        counts = self.rows.prompts[:size] // BLOCK_SIZE
        counts[counts < self.least_shared] = 0
        keys, tokens = find_shared(self.rows.host_tables[:size], counts)
        plan = plan_sharing(keys, tokens, self.shared.rows.shape[1], rows=self.rows.size)
        self.sharing = bool(plan[1].any())
        if self.sharing:
            self.shared.write(plan, self.rows.upload)

    def decode(self, size: int, steps: int, span: int) -> None:
        rows, kv_heads = next(one for one in self.sizes if one >= size), self.network.spec.kv_heads
        # Few rows are better cut into ranges, and products in float32 leave no registers for sharing.
        sharing = self.sharing and rows * kv_heads >= SHARING_PROGRAMS and self.dtype.itemsize == 2
        key = rows, sharing, 1 if sharing else self.attention.default_splits(rows, kv_heads, span)
        if key not in self.graphs:
            self.graphs[key] = self._record(*key)
        for _ in range(steps):
            self.graphs[key].replay()

    def close(self) -> None:
        self.graphs.clear()
        super().close()

    def _record(self, size: int, sharing: bool, splits: int) -> torch.cuda.CUDAGraph:
        self._warm_up(size, sharing, splits)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self._whole_step(size, sharing, splits)
        return graph

    def _warm_up(self, size: int, sharing: bool, splits: int) -> None:
        """Run once before recording, so that all is compiled and loaded; with idle rows this changes nothing."""
        states = self.rows.ints[:, Column.STATE]
        before = states.clone()
        states.fill_(int(RowState.IDLE))
        self._whole_step(size, sharing, splits)
        states.copy_(before)
        self.rows.step -= 1
        torch.cuda.synchronize()

    def _whole_step(self, size: int, sharing: bool, splits: int) -> None:
        rows, device = self.rows, self.device
        positions, slots, ids = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(3))
        lengths = torch.empty(size, dtype=torch.int32, device=device)
        self.layers.start_step(rows.ints, rows.tables, size, BLOCK_SIZE, positions, lengths, slots, ids)

        shared = self.shared if sharing else None

        def attend(kv: Tensor, q: Tensor) -> Tensor:
            return self.attention.decode_attention(
                *(q, kv, rows.tables, lengths),
                splits=splits,
                counters=self.counters,
                order=self.order,
                shared=shared,
            )

        hidden = self.network.forward(ids, Places(positions, slots), self.kv, attend)
        logits = self.network.unembed(hidden)
        self.sampling.draw(
            logits, rows.ints, rows.floats, rows.forbidden, rows.step, rows.log_tokens, rows.log_scores, self.scratch
        )
        rows.step += 1
