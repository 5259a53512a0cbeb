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
from assay.engine.native.operations import Places
from assay.engine.native.prefix_groups import find_shared, plan_sharing
from assay.engine.native.runner import Runner
from assay.engine.rows import Rows
from assay.engine.sequence import BLOCK_SIZE, Column, RowState, Sample

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
        order[:size] = np.argsort(-self.rows.start_offsets[:size], kind="stable")
        self.order.copy_(self.rows.upload(order))
        counts = self.rows.prompt_lengths[:size] // BLOCK_SIZE
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
        self.sampling.sample(
            logits, rows.ints, rows.floats, rows.forbidden, rows.step, rows.log_tokens, rows.log_scores, self.scratch
        )
        rows.step += 1
