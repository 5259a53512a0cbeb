"""Causal attention over packed sequences, for training and scoring; prompts that sequences share are computed once.

On CUDA at 16 bits it is flash attention on the packed tokens; on Hopper and Blackwell, cuDNN's kernels compute long
sequences (1.75 times as fast on an H200 from 16,384 tokens on). Elsewhere sequences become a right-padded batch for
torch's fused kernel; everything outside attention stays free of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.device import upload

LONG = 4096  # tokens from which a sequence is computed by cuDNN, where it is faster
PADDED_SUM = 1e4


class PackedCausal:
    """Each token attends to itself and the earlier tokens of its own sequence; with a `window`, to the last of them.

    `shared[i]`: number of leading tokens that sequence i has in common with its leader, the nearest earlier sequence
    whose entry is 0. They are computed once. All sequences with the same leader have the same entry.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str, shared: Sequence[int] | None = None) -> None:
        shared = shared or [0] * len(lengths)
        segments = Segments.of(lengths, shared)
        self.device = torch.device(device)
        self.padded = Padded(segments.lengths, self.device)
        self.longest = max(lengths)  # a larger window has no effect
        self.segments = segments.lengths
        starts = [0, *accumulate(segments.lengths)]
        positions = positions_within(segments.lengths) + np.repeat(segments.offsets, segments.lengths)
        self.positions = upload(torch.from_numpy(positions), self.device)  # of the computed tokens
        self.starts = upload(torch.tensor(starts, dtype=torch.int32), self.device)
        self.computed: Tensor | None = None  # indices, among all tokens, of the computed ones; None: all are computed
        self.restore: Tensor | None = None  # for each of all tokens, its index among the computed ones
        self.prefixes: Prefixes | None = None
        if any(shared):
            computed, restore = segments.computed()
            self.computed, self.restore = upload(computed, self.device), upload(restore, self.device)
            if any(prefix >= 0 for prefix in segments.prefixes):  # false if all sequences equal their leaders
                self.prefixes = Prefixes(segments, starts, self.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        """`scale`: factor of the scores; None: 1 / sqrt(d)."""
        window = 0 if window >= self.longest else window
        if not has_varlen(q.device, q.dtype):
            rows = self.padded if self.prefixes is None else self.prefixes
            return rows.attend(q, k, v, window, scale)
        starts, longest, prefixes = self.starts, self.padded.longest, self.prefixes
        if not window or prefixes is None:
            long = None if window or longest < LONG or not has_fast_cudnn(q.device, q.shape[-1]) else self.long_segments
            return _FlashAttention.apply(q, k, v, starts, starts, (longest, longest), prefixes, window, scale, long)
        # The window of a suffix ends somewhere in its prefix: each suffix gets its own copy of the prefix.
        tokens, key_starts, most = prefixes.repeated
        keys, values = k.index_select(0, tokens), v.index_select(0, tokens)
        return _FlashAttention.apply(q, keys, values, starts, key_starts, (longest, most), None, window, scale, None)

    @cached_property
    def long_segments(self) -> LongSegments:
        return LongSegments.of(self.segments, self.device)


@dataclass(frozen=True)
class LongSegments:
    """Segments that cuDNN computes one by one, and the tokens of all others."""

    spans: list[slice]
    others: Tensor
    other_starts: Tensor
    longest_other: int  # 0: there are none

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> LongSegments:
        starts = [0, *accumulate(lengths)]
        short = [i for i, length in enumerate(lengths) if length < LONG]
        others = torch.cat([torch.arange(0), *(torch.arange(starts[i], starts[i + 1]) for i in short)])
        bounds = torch.tensor([0, *accumulate(lengths[i] for i in short)], dtype=torch.int32)
        spans = [slice(start, end) for start, end in pairwise(starts) if end - start >= LONG]
        longest = max((lengths[i] for i in short), default=0)
        return cls(spans, upload(others, device), upload(bounds, device), longest)


@dataclass(frozen=True)
class Segments:
    """Runs of computed tokens: whole sequences, shared prefixes, and the suffixes that follow a prefix."""

    lengths: list[int]
    offsets: list[int]  # position, within its sequence, of the first token of each segment
    prefixes: list[int]  # for each suffix the index of its prefix among the segments; -1 for all others
    sequences: list[tuple[int, int, int]]  # length, shared tokens, and computed index of the first of these

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int]) -> Segments:
        segments = cls([], [], [], [])
        start = prefix = prefix_start = 0
        for index, (length, common) in enumerate(zip(lengths, shared, strict=True)):
            if not common:
                common = next(iter(shared[index + 1 : index + 2]), 0)  # a leader is split into prefix and suffix too
                prefix, prefix_start = len(segments.lengths), start
                segments._add(common or length, 0, -1)
                start += common or length
                segments.sequences.append((length, 0, 0))
            else:
                assert common == segments.lengths[prefix], "sequences with one leader must share equally many tokens"
                segments.sequences.append((length, common, prefix_start))
            if common and length > common:
                segments._add(length - common, common, prefix)
                start += length - common
        return segments

    def _add(self, length: int, offset: int, prefix: int) -> None:
        self.lengths.append(length)
        self.offsets.append(offset)
        self.prefixes.append(prefix)

    def computed(self) -> tuple[Tensor, Tensor]:
        """Indices of the computed tokens among all, and for each of all tokens its index among the computed ones."""
        kept, restore, begun, done = [], [], 0, 0
        for length, common, prefix_start in self.sequences:
            kept.append(np.arange(begun + common, begun + length))
            restore += [np.arange(prefix_start, prefix_start + common), np.arange(done, done + length - common)]
            begun, done = begun + length, done + length - common
        return torch.from_numpy(np.concatenate(kept)), torch.from_numpy(np.concatenate(restore))


class Padded:
    """Segments as rows of a right-padded batch: causal attention never reads the padding."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = lengths, device
        self.batch, self.longest = len(lengths), max(lengths)
        self.even = min(lengths) == self.longest
        self.masks: dict[int, Tensor] = {}  # by window

    @cached_property
    def slots(self) -> Tensor:
        """Index of each token in the flattened padded batch."""
        rows = np.repeat(np.arange(self.batch), self.lengths)
        return upload(torch.from_numpy(rows * self.longest + positions_within(self.lengths)), self.device)

    def pad(self, x: Tensor) -> Tensor:
        """[N, H, d] -> [B, H, T, d]"""
        if not self.even:
            x = x.new_zeros(self.batch * self.longest, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.unflatten(0, (self.batch, self.longest)).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, H, T, d] -> [N, H, d]"""
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.even else x.index_select(0, self.slots)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        mask = None
        if 0 < window < self.longest:
            if window not in self.masks:
                self.masks[window] = upload(seen_within(torch.arange(self.longest), window), self.device)
            mask = self.masks[window]
        out = F.scaled_dot_product_attention(
            *(self.pad(q), self.pad(k), self.pad(v)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return self.unpad(out)


class Prefixes:
    """Shared prefixes and the suffixes that follow them. Token indices count computed tokens."""

    def __init__(self, segments: Segments, starts: list[int], device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.spans = [torch.arange(a, b) for a, b in pairwise(starts)]
        self.followers = [i for i, prefix in enumerate(segments.prefixes) if prefix >= 0]
        prefixes = sorted({segments.prefixes[i] for i in self.followers})
        queries = [
            sum(segments.lengths[i] for i in self.followers if segments.prefixes[i] == prefix) for prefix in prefixes
        ]
        keys = [segments.lengths[prefix] for prefix in prefixes]
        self.query_tokens = self._tokens(self.followers)  # of suffixes, ordered by prefix
        self.key_tokens = self._tokens(prefixes)
        # Bounds of each prefix's suffixes within `query_tokens`, and of each prefix within `key_tokens`.
        self.query_starts, self.key_starts = self._bounds(queries), self._bounds(keys)
        self.longest = max(queries), max(keys)
        self.masks: dict[int, Tensor] = {}  # by window

    def _tokens(self, segments: list[int]) -> Tensor:
        return upload(torch.cat([self.spans[i] for i in segments]), self.device)

    def _bounds(self, sizes: list[int]) -> Tensor:
        return upload(torch.tensor([0, *sizes]).cumsum(0).int(), self.device)

    @cached_property
    def repeated(self) -> tuple[Tensor, Tensor, int]:
        """The tokens that each segment sees, its prefix included: indices, bounds of the segments, largest number."""
        pairs = list(zip(self.spans, self.segments.prefixes, strict=True))
        tokens = [span if prefix < 0 else torch.cat((self.spans[prefix], span)) for span, prefix in pairs]
        sizes = [len(seen) for seen in tokens]
        return upload(torch.cat(tokens), self.device), self._bounds(sizes), max(sizes)

    @cached_property
    def rows(self) -> tuple[Tensor, Padded, Padded, Tensor]:
        """For `attend`: tokens of the segments without a prefix, these as rows, suffixes as rows, and their keys."""
        lengths = self.segments.lengths
        roots = [i for i, prefix in enumerate(self.segments.prefixes) if prefix < 0]
        root_rows = Padded([lengths[i] for i in roots], self.device)
        suffix_rows = Padded([lengths[i] for i in self.followers], self.device)
        keys, self.masks[0] = self.keys_and_mask()
        return self._tokens(roots), root_rows, suffix_rows, keys

    def keys_and_mask(self, window: int = 0) -> tuple[Tensor, Tensor]:
        """Key tokens [rows, prefix + suffix] of each suffix, padded, and the mask of the keys that each query sees."""
        pairs = [(self.spans[self.segments.prefixes[i]], self.spans[i]) for i in self.followers]
        width, height = (max(map(len, spans)) for spans in zip(*pairs, strict=True))
        tokens = torch.zeros(len(pairs), width + height, dtype=torch.int64)
        mask = torch.zeros(len(pairs), 1, height, width + height, dtype=torch.bool)
        causal = torch.ones(height, height, dtype=torch.bool).tril()
        for row, (prefix, suffix) in enumerate(pairs):
            tokens[row, : len(prefix)], tokens[row, width : width + len(suffix)] = prefix, suffix
            mask[row, 0, :, : len(prefix)] = True
            mask[row, 0, :, width:] = causal
            if window:
                positions = torch.cat((torch.arange(width), len(prefix) + torch.arange(height)))
                mask[row, 0] &= positions[width:, None] - positions < window
        return upload(tokens, self.device), upload(mask, self.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        """In torch, for any device and dtype."""
        roots, root_rows, suffix_rows, tokens = self.rows
        if window not in self.masks:
            self.masks[window] = self.keys_and_mask(window)[1]
        mask = self.masks[window]
        own_q, own_k, own_v = (x.index_select(0, roots) for x in (q, k, v))
        first = root_rows.attend(own_q, own_k, own_v, window, scale)
        keys, values = (x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape).transpose(1, 2) for x in (k, v))
        queries = suffix_rows.pad(q.index_select(0, self.query_tokens))
        gqa = q.shape[1] != k.shape[1]
        rest = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=gqa)
        out = torch.empty_like(q).index_copy(0, roots, first)
        return out.index_copy(0, self.query_tokens, suffix_rows.unpad(rest))


def positions_within(lengths: Sequence[int]) -> np.ndarray:
    """0, 1, ... within each segment. In numpy: torch would wake its thread pool for this."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def seen_within(positions: Tensor, window: int) -> Tensor:
    """Which tokens each token of a sequence sees: [T, T]."""
    distances = positions[:, None] - positions
    return (distances >= 0) & (distances < window)


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether flash attention over sequences of different lengths is available."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _has_flash(device)


@cache
def _has_flash(device: torch.device) -> bool:
    """Some builds of torch lack it, and GPUs before compute capability 8.0 do not support it."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def has_fast_cudnn(device: torch.device, head_dim: int) -> bool:
    """Whether cuDNN's attention is available and known to be faster than flash attention."""
    fast = torch.cuda.get_device_capability(device)[0] in (9, 10) and head_dim <= 128 and head_dim % 8 == 0
    return fast and torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()


def varlen_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Causal attention, aligned at the ends of the sequences. No gradients.

    q [N, H, d], keys and values [M, K, d]; `query_starts`, `key_starts`: bounds of the sequences (int32); `longest`:
    largest number of queries and of keys of a sequence.
    """
    return flash(q, keys, values, query_starts, key_starts, longest, causal=True, **options(window, scale))[0]


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    *,
    causal: bool,
    **more: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result [N, H, d], log-partition sums [H, N], and the random state, which the backward pass takes."""
    forward = torch.ops.aten._flash_attention_forward
    return forward(q, k, v, query_starts, key_starts, *longest, 0.0, causal, False, **more)[:4]


def options(window: int, scale: float | None) -> dict[str, Any]:
    """Arguments of torch's flash operators. They take the number of earlier tokens, without the token itself."""
    return {"scale": scale} | ({"window_size_left": window - 1, "window_size_right": 0} if window else {})


class _FlashAttention(torch.autograd.Function):
    """Calls torch's flash operators directly: its public wrapper takes more host time than this whole class.

    Suffixes attend to their prefixes in a second pass, and both results are combined by their log-partition sums. The
    gradient of each pass is computed from the combined result and the combined sum, which give every key its weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor,
        key_starts: Tensor,
        longest: tuple[int, int],
        prefixes: Prefixes | None,
        window: int,
        scale: float | None,
        long: LongSegments | None,
    ) -> Tensor:
        ctx.options, ctx.long = options(window, scale), long
        if long is None:
            out, sums, seed, unused = flash(q, k, v, starts, key_starts, longest, causal=True, **ctx.options)
        else:
            out, sums, seed, unused = long_forward(q, k, v, long, scale)
        if prefixes is not None:
            queries, tokens = prefixes.query_tokens, prefixes.key_tokens
            bounds = prefixes.query_starts, prefixes.key_starts, prefixes.longest
            part = q.index_select(0, queries), k.index_select(0, tokens), v.index_select(0, tokens)
            prefix_out, prefix_sums, _, _ = flash(*part, *bounds, causal=False, scale=scale)
            own_sums = sums.index_select(1, queries)
            combined = torch.logaddexp(own_sums, prefix_sums)
            own_weight, prefix_weight = ((x - combined).exp().t()[:, :, None] for x in (own_sums, prefix_sums))
            mixed = out.index_select(0, queries) * own_weight + prefix_out * prefix_weight
            out.index_copy_(0, queries, mixed.to(out.dtype))
            sums.index_copy_(1, queries, combined)
        ctx.save_for_backward(q, k, v, out, sums, starts, key_starts, seed, unused)
        ctx.longest, ctx.prefixes = longest, prefixes
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, starts, key_starts, seed, unused = ctx.saved_tensors
        grad, prefixes = grad.contiguous(), ctx.prefixes
        if ctx.long is None:
            backward = partial(torch.ops.aten._flash_attention_backward, grad)
            bounds = starts, key_starts, *ctx.longest
            grads = backward(q, k, v, out, sums.contiguous(), *bounds, 0.0, True, seed, unused, **ctx.options)
        else:
            grads = long_backward(grad, q, k, v, out, sums, seed, unused, ctx.long, ctx.options["scale"])
        if prefixes is not None:
            queries, tokens = prefixes.query_tokens, prefixes.key_tokens
            backward = partial(torch.ops.aten._flash_attention_backward, grad.index_select(0, queries))
            bounds = prefixes.query_starts, prefixes.key_starts, *prefixes.longest
            part = q.index_select(0, queries), k.index_select(0, tokens), v.index_select(0, tokens)
            results = out.index_select(0, queries), sums.index_select(1, queries).contiguous()
            more = backward(*part, *results, *bounds, 0.0, False, seed, unused, scale=ctx.options["scale"])
            for total, added, at in zip(grads, more, (queries, tokens, tokens), strict=True):
                total.index_add_(0, at, added)
        return *grads, None, None, None, None, None, None, None


def long_forward(
    q: Tensor, k: Tensor, v: Tensor, long: LongSegments, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal attention as `flash`, with cuDNN for long segments."""
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    seed = unused = q.new_empty(0)
    if long.longest_other:
        short_q, short_k, short_v = (x.index_select(0, long.others) for x in (q, k, v))
        starts, most = long.other_starts, (long.longest_other, long.longest_other)
        short_out, short_sums, seed, unused = flash(
            short_q, short_k, short_v, starts, starts, most, causal=True, scale=scale
        )
        out.index_copy_(0, long.others, short_out)
        sums.index_copy_(1, long.others, short_sums)
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    for span in long.spans:
        rows = [rounded_up(x[span]) for x in (q, k, v)]
        result, result_sums, *_ = forward(*rows, None, True, 0.0, True, scale=scale)
        length = span.stop - span.start
        out[span] = result[0, :, :length].transpose(0, 1)
        sums[:, span] = result_sums.view(q.shape[1], -1)[:, :length]
    return out, sums, seed, unused


def long_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    seed: Tensor,
    unused: Tensor,
    long: LongSegments,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if long.longest_other:
        parts = [x.index_select(0, long.others) for x in (grad, q, k, v, out)]
        bounds = long.other_starts, long.other_starts, long.longest_other, long.longest_other
        own_sums = sums.index_select(1, long.others).contiguous()
        backward = torch.ops.aten._flash_attention_backward
        short = backward(*parts, own_sums, *bounds, 0.0, True, seed, unused, scale=scale)
        for total, gradient in zip(grads, short, strict=True):
            total.index_copy_(0, long.others, gradient)
    none = q.new_zeros((), dtype=torch.int64)  # a random state that nothing reads
    for span in long.spans:
        rows = [rounded_up(x[span]) for x in (grad, q, k, v, out)]
        length, padded = span.stop - span.start, rows[0].shape[2]
        # Padding has no gradient. Its sum must be large: else probabilities there could overflow.
        own_sums = F.pad(sums[:, span], (0, padded - length), value=PADDED_SUM)[None, :, :, None].contiguous()
        results = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *rows, own_sums, none, none, None, None, None, padded, padded, 0.0, True, scale=scale
        )
        for total, gradient in zip(grads, results, strict=True):
            total[span] = gradient[0, :, :length].transpose(0, 1)
    return grads


def rounded_up(x: Tensor) -> Tensor:
    """[N, H, d] -> [1, H, M, d], with zeros at the end. cuDNN builds a kernel for each M: there are 16 per octave."""
    step = 1 << max(len(x).bit_length() - 5, 6)
    missing = -len(x) % step
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).transpose(0, 1)[None]
