"""Running the network on a device: prompt chunks into the KV cache, then one token per step for all rows.

On CUDA, one step of all rows, from token to token, is captured as a CUDA graph and replayed without the host. A graph
has a fixed number of rows. Graphs are captured for a few sizes, and the smallest that holds all running rows is
replayed. The kernels skip rows that have ended, so the host need not read results after every step.

Attention over the paged KV cache in torch is here, too: for prompt chunks, and for the newest token of every row.
Blocks are first gathered into one tensor, which on a CPU costs a fraction of the attention itself. Slots behind the end
of a sequence are gathered too and get weight 0; they may contain anything, even NaN. Prompt chunks on CUDA in 16 bits
use torch's variable-length kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.backends.mkl as mkl
import torch.nn.functional as F
from torch import Tensor

from assay.engine.base import TopLogprobs
from assay.engine.native.kv_cache import new_cache
from assay.engine.native.network import FusedDecoder, TokenPositions
from assay.engine.native.scheduler import Chunk
from assay.engine.sampler import Rows, target_logprobs, top_logprobs
from assay.engine.sequence import BLOCK_SIZE, Column, RowState, Sample
from assay.models.attention import has_varlen, varlen_attention

WINDOW = 3  # steps between two reads of results; blocks are allocated for all of them at once
SHARING_PROGRAMS = 512  # rows times key-value heads below which prefixes are not shared
SHARED_TOKENS = 256  # minimum shared prefix for which an additional kernel pays off
SCORE_LOGITS = 1 << 25  # maximum number of logits at once in `score`


# (queries [A, B, N, d], keys [A, C, S, d], values [A, C, S, d]) -> [A, B, N, d], where B is C or a multiple of it
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gather:
    """Gathers the same blocks of every layer, concatenated, into memory that is reused by the next layer."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self.index: Tensor | None = None
        self.out: Tensor | None = None

    def __call__(self, kv: Tensor) -> Tensor:
        """kv [2, K, blocks, block size, d] -> [2 x K x blocks chosen, block size x d]"""
        lines = kv.view(-1, kv.shape[3] * kv.shape[4])  # one line per block and head: faster than along an axis
        if self.index is None:
            heads = torch.arange(kv.shape[0] * kv.shape[1], device=kv.device)[:, None]
            self.index = (heads * kv.shape[2] + self.blocks).view(-1)
            self.out = lines.new_empty(len(self.index), lines.shape[1])
        assert self.out is not None
        return torch.index_select(lines, 0, self.index, out=self.out)


class RowAttention:
    """One query per row."""

    def __init__(self, tables: Tensor, lengths: Tensor, span: int, block_size: int, dtype: torch.dtype) -> None:
        """`tables` [B, *]: blocks of the rows; `lengths` [B]: number of keys that each row sees, at most `span`."""
        self.rows, blocks = tables.shape[0], -(-span // block_size)
        self.span, self.dtype = blocks * block_size, dtype
        self.gather = Gather(tables[:, :blocks].reshape(-1))
        self.last = lengths[:, None] - 1
        # In float32 with MKL, two batched products are faster than the fused kernel. In bfloat16 the fused kernel is
        # needed for its float32 accumulation. Libraries without batched products need one call per row and head.
        self.plain = dtype != torch.bfloat16 and tables.device.type == "cpu" and mkl.is_available()
        self.biases: dict[int, Tensor] = {}  # by window, the same for all layers with this window
        self.wide_biases: dict[int, Tensor] = {}

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        """`window`: number of last tokens that each query sees; 0: all. `scale`: see `PackedCausal`."""
        window = 0 if window >= self.span else window
        kv_heads, head_dim = kv.shape[1], kv.shape[-1]
        keys, values = self.gather(kv).view(2, kv_heads, self.rows, self.span, head_dim)
        # Query heads that share a key-value head take the place of the query sequence, so that no key is repeated.
        queries = q.view(self.rows, kv_heads, -1, head_dim).transpose(0, 1)
        attend = partial(self._attend, window, scale)
        out = attend_without_unseen(attend, queries, keys, values, self.last)
        return out.transpose(0, 1).reshape(q.shape)

    def _attend(self, window: int, scale: float | None, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if self.plain:
            flat = (x.flatten(0, 1) for x in (queries, keys, values))
            return self._products(window, scale or 1 / math.sqrt(queries.shape[-1]), *flat).view(queries.shape)
        # Rows first: with heads first, the mask makes it slow.
        q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))
        bias = self._bias(window)[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(0, 1)

    def _bias(self, window: int) -> Tensor:
        if window not in self.biases:
            self.biases[window] = unseen_bias(self.last, self.span, window, self.dtype)
        return self.biases[window]

    def _products(self, window: int, scale: float, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if window not in self.wide_biases:
            copies, shared = queries.shape[0] // self.rows, queries.shape[1]
            wide = self._bias(window)[None, :, None].expand(copies, -1, shared, -1)
            self.wide_biases[window] = wide.reshape(-1, shared, self.span)
        scores = torch.baddbmm(self.wide_biases[window], queries, keys.transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), values)


class ChunkAttention:
    """Concatenated queries of several prompt chunks, each over all earlier tokens of its own sequence."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        starts, stops = (np.array([getattr(chunk, side) for chunk in chunks]) for side in ("start", "stop"))
        sizes, blocks = stops - starts, -(-stops // block_size)
        self.count, self.longest, self.span = len(chunks), int(sizes.max()), int(blocks.max()) * block_size
        tables = np.zeros((self.count, int(blocks.max())), dtype=np.int64)
        for row, chunk in enumerate(chunks):
            tables[row, : blocks[row]] = chunk.blocks[: blocks[row]]
        self.gather = Gather(torch.from_numpy(tables.reshape(-1)).to(device))
        is_query = np.arange(self.longest) < sizes[:, None]
        self.even = bool(is_query.all())
        self.query_index = torch.from_numpy(np.flatnonzero(is_query)).to(device)  # of queries in the padded batch
        last = starts[:, None] + np.arange(self.longest)
        self.last = torch.from_numpy(last).to(device)[:, None]
        self.dtype = dtype
        self.biases: dict[int, Tensor] = {}  # by window
        self.causal = not starts.any()

    def _bias(self, window: int) -> Tensor | None:
        if self.causal and not window:
            return None
        if window not in self.biases:
            bias = unseen_bias(self.last[..., None].cpu(), self.span, window, self.dtype)
            self.biases[window] = bias.to(self.last.device)
        return self.biases[window]

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        """`window`, `scale`: see `RowAttention`."""
        window = 0 if window >= self.span else window
        kv_heads, head_dim = kv.shape[1], kv.shape[-1]
        keys, values = self.gather(kv).view(2, kv_heads, self.count, self.span, head_dim)
        padded = q
        if not self.even:
            padded = q.new_zeros(self.count * self.longest, *q.shape[1:]).index_copy_(0, self.query_index, q)
        queries = padded.view(self.count, self.longest, *q.shape[1:]).transpose(1, 2)
        attend = partial(self._attend, window, scale)
        out = attend_without_unseen(attend, queries, keys.transpose(0, 1), values.transpose(0, 1), self.last)
        out = out.transpose(1, 2).flatten(0, 1)
        return out if self.even else out.index_select(0, self.query_index)

    def _attend(self, window: int, scale: float | None, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        bias = self._bias(window)
        return F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=bias,
            is_causal=bias is None,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )


def unseen_bias(last: Tensor, span: int, window: int, dtype: torch.dtype) -> Tensor:
    """[..., span]: -inf for keys that a query does not see. `last` [..., 1]: index of the last key that it sees."""
    places = torch.arange(span, device=last.device)
    unseen = places > last
    if window:
        unseen |= places <= last - window
    return torch.zeros(unseen.shape, device=last.device, dtype=dtype).masked_fill_(unseen, -math.inf)


def attend_without_unseen(attend: Attend, queries: Tensor, keys: Tensor, values: Tensor, last: Tensor) -> Tensor:
    """Attention in which only queries that see a NaN key or value get NaN.

    `last`: index of the last key that a query sees. NaN times a weight of 0 is NaN, so one broken sequence would
    otherwise break sequences that share its blocks or use them after it.
    """
    out = attend(queries, keys, values)
    if not bool(out.sum().isnan()):
        return out
    sound = (keys.isfinite() & values.isfinite()).all(-1, keepdim=True)
    out = attend(queries, keys.where(sound, 0.0), values.where(sound, 0.0))
    places = torch.arange(keys.shape[2], device=keys.device)
    broken = torch.where(sound[..., 0], keys.shape[2], places).amin(-1)  # index of the first broken key
    broken = broken.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)[..., None]
    return out.masked_fill((broken <= last)[..., None], math.nan)


class VarlenAttention:
    """Concatenated queries of several chunks, each over all earlier tokens of its own sequence."""

    def __init__(self, chunks: Sequence[Chunk], block_size: int, upload: Callable[[np.ndarray], Tensor]) -> None:
        queries = [0, *np.cumsum([chunk.stop - chunk.start for chunk in chunks])]
        keys = [0, *np.cumsum([chunk.stop for chunk in chunks])]
        self.most = max(chunk.stop - chunk.start for chunk in chunks), max(chunk.stop for chunk in chunks)
        slots = np.concatenate([slots_of(chunk, 0, chunk.stop, block_size) for chunk in chunks])
        host = [np.array(queries, dtype=np.int32), np.array(keys, dtype=np.int32), slots]
        self.queries, self.keys, self.slots = (upload(values) for values in host)

    def __call__(self, kv: Tensor, q: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        keys, values = kv.view(2, kv.shape[1], -1, kv.shape[-1]).index_select(2, self.slots).transpose(1, 2)
        return varlen_attention(q, keys, values, self.queries, self.keys, self.most, window, scale)


def slots_of(chunk: Chunk, start: int, stop: int, block_size: int) -> np.ndarray:
    """Slots of tokens start .. stop of a sequence in the cache."""
    positions = np.arange(start, stop)
    blocks = np.array(chunk.blocks, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


class Runner:
    """The network in torch, for any device.

    `window`: number of steps before the host reads results, because reading makes a GPU wait.
    """

    def __init__(self, network: FusedDecoder, rows: Rows, kv: Tensor) -> None:
        self.network, self.rows, self.kv = network, rows, kv
        self.device, self.dtype = kv.device, kv.dtype
        self.window = 1 if self.device.type == "cpu" else 8
        self.ahead = 0  # windows in flight while the host processes earlier results

    def compute(self, chunks: Sequence[Chunk]) -> None:
        """Compute keys and values of prompt tokens."""
        self.network.fill(*self._inputs(chunks), self.kv, self._attention(chunks))

    def _inputs(self, chunks: Sequence[Chunk]) -> tuple[Tensor, TokenPositions]:
        """Token ids of the chunks, concatenated, with their positions and slots."""
        ids = np.concatenate([np.asarray(chunk.tokens[chunk.start : chunk.stop], dtype=np.int64) for chunk in chunks])
        positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        slots = np.concatenate([slots_of(chunk, chunk.start, chunk.stop, BLOCK_SIZE) for chunk in chunks])
        upload = self.rows.upload
        places = self.network.ops.token_positions(upload(positions), upload(slots))
        return upload(ids), places

    def _attention(self, chunks: Sequence[Chunk]) -> VarlenAttention | ChunkAttention:
        if has_varlen(self.device, self.dtype):
            return VarlenAttention(chunks, BLOCK_SIZE, self.rows.upload)
        return ChunkAttention(chunks, BLOCK_SIZE, self.device, self.dtype)

    def score(self, sequences: Sequence[Sequence[int]], temperature: float, budget: int) -> list[list[float]]:
        """Log-probabilities of every token but the first; at most `budget` tokens, or one sequence, per pass."""
        scores: list[list[float]] = []
        batch: list[Sequence[int]] = []
        for sequence in sequences:
            if batch and sum(map(len, batch)) + len(sequence) > budget:
                scores += self._score(batch, temperature)
                batch = []
            batch.append(sequence)
        return scores + self._score(batch, temperature) if batch else scores

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        hidden = self._hidden(sequences)
        lengths = [len(sequence) for sequence in sequences]
        predicts = np.ones(sum(lengths), dtype=bool)
        predicts[np.cumsum(lengths) - 1] = False
        hidden = hidden[self.rows.upload(predicts)]
        targets = self.rows.upload(np.concatenate([np.asarray(sequence[1:], dtype=np.int64) for sequence in sequences]))
        size = max(SCORE_LOGITS // self.network.spec.vocab_size, 1)
        parts = [
            target_logprobs(
                self.network.unembed(hidden[start : start + size]), targets[start : start + size], temperature
            )
            for start in range(0, len(targets), size)
        ]
        logprobs = torch.cat(parts) if parts else hidden.new_empty(0)
        return [part.tolist() for part in logprobs.cpu().split([length - 1 for length in lengths])]

    def top_logprobs(self, sequence: Sequence[int], start: int, count: int, temperature: float) -> TopLogprobs:
        """The most likely tokens at each position from `start` on."""
        hidden = self._hidden([sequence])[start - 1 : -1]
        size = max(SCORE_LOGITS // self.network.spec.vocab_size, 1)
        parts = [top_logprobs(self.network.unembed(part), count, temperature) for part in hidden.split(size)]
        return [row for part in parts for row in part]

    def _hidden(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Hidden states of all tokens. Uses a separate KV cache, so that running sequences are not affected."""
        counts = [-(-len(sequence) // BLOCK_SIZE) for sequence in sequences]
        ends = np.cumsum(counts).tolist()
        pairs = zip(sequences, counts, ends, strict=True)
        chunks = [Chunk(sequence, 0, len(sequence), range(end - count, end)) for sequence, count, end in pairs]
        kv, _ = new_cache(self.network.spec, ends[-1] + 1, self.device, self.dtype)
        return self.network.forward(*self._inputs(chunks), kv, self._attention(chunks))

    def close(self) -> None:
        """Release the cache."""
        self.kv = self.kv.new_empty(0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, given as pairs (from, to)."""
        sources, destinations = (self.rows.upload(np.array(side)) for side in zip(*pairs, strict=True))
        self.kv.index_copy_(3, destinations, self.kv.index_select(3, sources))

    def arrange(self, running: Sequence[Sample]) -> None:
        """Called before the next step when rows were added, removed or moved."""
        self.rows.update_modes(running)

    def decode(self, size: int, steps: int, span: int) -> None:
        """Decoding steps of the first `size` rows; no sequence gets longer than `span`."""
        for _ in range(steps):
            self._step(size, span)

    def _step(self, size: int, span: int) -> None:
        rows = self.rows
        positions, running = rows.column(Column.POSITION, size), rows.column(Column.STATE, size) == RowState.RUNNING
        tables = rows.tables[:size]
        slots = tables.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
        slots = torch.where(running & (positions >= rows.column(Column.STORED, size)), slots, -1)
        attend = RowAttention(tables, positions + 1, span, BLOCK_SIZE, self.dtype)
        places = self.network.ops.token_positions(positions, slots)
        hidden = self.network.forward(rows.column(Column.TOKEN, size), places, self.kv, attend)
        rows.draw(self.network.unembed(hidden))


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
        # By number of rows, whether prefixes are shared, number of ranges per sequence, and whether any sequence may be
        # longer than a sliding window.
        self.graphs: dict[tuple[int, bool, int, bool], torch.cuda.CUDAGraph] = {}
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
        keys, tokens = self.attention.find_groups(self.rows.host_tables[:size], counts)
        plan = self.attention.plan_tiles(keys, tokens, self.shared.rows.shape[1], rows=self.rows.size)
        self.sharing = bool(plan[1].any())
        if self.sharing:
            self.shared.write(plan, self.rows.upload)

    def decode(self, size: int, steps: int, span: int) -> None:
        rows, kv_heads = next(graph_size for graph_size in self.sizes if graph_size >= size), self.network.spec.kv_heads
        # For few rows, splitting sequences is faster; float32 products leave no registers for shared prefixes.
        sharing = self.sharing and rows * kv_heads >= SHARING_PROGRAMS and self.dtype.itemsize == 2
        splits = 1 if sharing else self.attention.default_splits(rows, kv_heads, span)
        key = rows, sharing, splits, any(0 < window < span for window in self.network.spec.windows)
        if key not in self.graphs:
            self.graphs[key] = self._record(*key)
        for _ in range(steps):
            self.graphs[key].replay()

    def close(self) -> None:
        self.graphs.clear()
        super().close()

    def _record(self, size: int, sharing: bool, splits: int, windowed: bool) -> torch.cuda.CUDAGraph:
        self._warm_up(size, sharing, splits, windowed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self._whole_step(size, sharing, splits, windowed)
        return graph

    def _warm_up(self, size: int, sharing: bool, splits: int, windowed: bool) -> None:
        """Run once before capture, so that all kernels are compiled and loaded; with idle rows this has no effect."""
        states = self.rows.ints[:, Column.STATE]
        before = states.clone()
        states.fill_(int(RowState.IDLE))
        self._whole_step(size, sharing, splits, windowed)
        states.copy_(before)
        self.rows.step -= 1
        torch.cuda.synchronize()

    def _whole_step(self, size: int, sharing: bool, splits: int, windowed: bool = True) -> None:
        rows, device = self.rows, self.device
        positions, slots, ids = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(3))
        lengths = torch.empty(size, dtype=torch.int32, device=device)
        self.layers.start_step(rows.ints, rows.tables, size, BLOCK_SIZE, positions, lengths, slots, ids)

        def attend(kv: Tensor, q: Tensor, window: int, scale: float | None) -> Tensor:
            window = window if windowed else 0
            return self.attention.decode_attention(
                *(q, kv, rows.tables, lengths),
                splits=splits,
                counters=self.counters,
                order=self.order,
                shared=self.shared if sharing and not window else None,
                window=window,
                scale=scale,
            )

        hidden = self.network.forward(ids, TokenPositions(positions, slots), self.kv, attend)
        logits = self.network.unembed(hidden)
        self.sampling.sample(
            logits, rows.ints, rows.floats, rows.forbidden, rows.step, rows.log_tokens, rows.log_scores, self.scratch
        )
        rows.step += 1
