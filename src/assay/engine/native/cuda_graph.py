"""Decoding on CUDA: one step of all rows, from token to token, captured as a CUDA graph and replayed without the host.

A graph has a fixed number of rows. Graphs are captured for a few sizes, and the smallest that holds all running rows is
replayed. The kernels skip rows that have ended, so the host need not read results after every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from assay.engine.native.network import FusedDecoder
from assay.engine.native.operations import TokenPositions
from assay.engine.native.prefix_groups import find_groups, plan_tiles
from assay.engine.native.runner import Runner
from assay.engine.rows import Rows
from assay.engine.sequence import BLOCK_SIZE, Column, RowState, Sample

WINDOW = 3  # steps between two reads of results; blocks are allocated for all of them at once
SHARING_PROGRAMS = 512  # rows times key-value heads below which prefixes are not shared
SHARED_TOKENS = 256  # minimum shared prefix for which an additional kernel pays off


def sizes_up_to(rows: int) -> list[int]:
    """Numbers of rows of the graphs: powers of two up to 64, then steps of 32 up to 512, then of an eighth or less."""
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
        self.min_shared_blocks = SHARED_TOKENS // BLOCK_SIZE
        self.shared = attention.SharedPrefixes.new(rows.size, spec.heads, spec.kv_heads, spec.head_dim, kv.device)
        self.order = torch.arange(rows.size, dtype=torch.int32, device=kv.device)
        self.counters = torch.zeros(rows.size, spec.kv_heads, dtype=torch.int32, device=kv.device)
        self.scratch = sampling.Scratch(rows.size, network.spec.vocab_size, kv.device)
        self.sizes = sizes_up_to(rows.size)
        # By number of rows, whether prefixes are shared, and number of ranges per sequence.
        self.graphs: dict[tuple[int, bool, int], torch.cuda.CUDAGraph] = {}
        self.sharing = False
        self.pool = torch.cuda.graph_pool_handle()

    def arrange(self, running: Sequence[Sample]) -> None:
        """Sort rows by length and find prefix groups, if there are enough to pay for an additional kernel."""
        size = len(running)
        # Longest first. All rows grow by one token per step, so the order is valid until rows are added or removed.
        order = np.arange(self.rows.size, dtype=np.int32)
        order[:size] = np.argsort(-self.rows.start_offsets[:size], kind="stable")
        self.order.copy_(self.rows.upload(order))
        counts = self.rows.prompt_lengths[:size] // BLOCK_SIZE
        counts[counts < self.min_shared_blocks] = 0
        keys, tokens = find_groups(self.rows.host_tables[:size], counts)
        plan = plan_tiles(keys, tokens, self.shared.rows.shape[1], rows=self.rows.size)
        self.sharing = bool(plan[1].any())
        if self.sharing:
            self.shared.write(plan, self.rows.upload)

    def decode(self, size: int, steps: int, span: int) -> None:
        rows, kv_heads = next(one for one in self.sizes if one >= size), self.network.spec.kv_heads
        # For few rows, splitting sequences is faster; float32 products leave no registers for shared prefixes.
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
        """Run once before capture, so that all kernels are compiled and loaded; with idle rows this has no effect."""
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

        hidden = self.network.forward(ids, TokenPositions(positions, slots), self.kv, attend)
        logits = self.network.unembed(hidden)
        self.sampling.sample(
            logits, rows.ints, rows.floats, rows.forbidden, rows.step, rows.log_tokens, rows.log_scores, self.scratch
        )
        rows.step += 1
