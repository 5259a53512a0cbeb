"""Causal attention over packed sequences, for training and scoring; prompts that sequences share are computed once.

On CUDA at 16 bits it is computed on the packed tokens by Triton kernels (`attention_kernels`); on Hopper and Blackwell,
cuDNN's kernels compute what the tokens of long segments see of each other (1.75 times as fast as flash attention on an
H200 from 16,384 tokens on). Elsewhere sequences become a right-padded batch for torch's fused kernel. Everything
outside attention stays free of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.device import upload, uses_triton

if TYPE_CHECKING:
    from assay.models.attention_kernels import AttentionPlan

LONG = 4096  # tokens from which a segment is computed by cuDNN, where it is faster
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
        self.segments = segments
        positions = positions_within(segments.lengths) + np.repeat(segments.offsets, segments.lengths)
        self.positions = upload(torch.from_numpy(positions), self.device)  # of the computed tokens
        self.computed: Tensor | None = None  # indices, among all tokens, of the computed ones; None: all are computed
        self.restore: Tensor | None = None  # for each of all tokens, its index among the computed ones
        self.prefixes: Prefixes | None = None
        self.plans: dict[tuple[int, int, int, bool], AttentionPlan] = {}
        if any(shared):
            computed, restore = segments.computed()
            self.computed, self.restore = upload(computed, self.device), upload(restore, self.device)
            if any(prefix >= 0 for prefix in segments.prefixes):  # false if all sequences equal their leaders
                self.prefixes = Prefixes(segments, self.device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, window: int = 0, scale: float | None = None) -> Tensor:
        """`scale`: factor of the scores; None: 1 / sqrt(d)."""
        window = 0 if window >= self.longest else window
        kernels = kernels_for(q)
        if kernels is None:
            rows = self.padded if self.prefixes is None else self.prefixes
            return rows.attend(q, k, v, window, scale)
        size, kv_heads = q.shape[2], k.shape[1]
        # cuDNN's gradients may differ in the last bits from call to call.
        with_cudnn = not window and not torch.are_deterministic_algorithms_enabled() and has_fast_cudnn(q.device, size)
        key = size, kv_heads, window, with_cudnn
        if key not in self.plans:
            lengths, prefixes, long = self.segments.lengths, self.segments.prefixes, LONG if with_cudnn else None
            self.plans[key] = kernels.AttentionPlan.of(lengths, prefixes, self.positions, size, kv_heads, window, long)
        q, k, v = (x if x.stride()[1:] == (size, 1) else x.contiguous() for x in (q, k, v))
        return _PackedAttention.apply(q, k, v, self.plans[key], scale, self.long_spans if with_cudnn else [])

    @cached_property
    def long_spans(self) -> list[slice]:
        """Tokens of the segments that cuDNN computes, one by one."""
        bounds = pairwise([0, *accumulate(self.segments.lengths)])
        return [slice(start, end) for start, end in bounds if end - start >= LONG]


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
    """Shared prefixes and the suffixes that follow them, as rows of a batch. Token indices count computed tokens."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.masks: dict[int, Tensor] = {}  # by window

    @cached_property
    def spans(self) -> list[Tensor]:
        return [torch.arange(a, b) for a, b in pairwise([0, *accumulate(self.segments.lengths)])]

    @cached_property
    def followers(self) -> list[int]:
        return [i for i, prefix in enumerate(self.segments.prefixes) if prefix >= 0]

    @cached_property
    def rows(self) -> tuple[tuple[Tensor, Padded], tuple[Tensor, Padded], Tensor]:
        """For `attend`: tokens of the segments without a prefix, and these as rows; the same of the suffixes; and the
        keys of the suffixes."""
        roots = [i for i, prefix in enumerate(self.segments.prefixes) if prefix < 0]
        keys, self.masks[0] = self.keys_and_mask()
        return self._tokens_and_rows(roots), self._tokens_and_rows(self.followers), keys

    def _tokens_and_rows(self, segments: list[int]) -> tuple[Tensor, Padded]:
        tokens = upload(torch.cat([self.spans[i] for i in segments]), self.device)
        return tokens, Padded([self.segments.lengths[i] for i in segments], self.device)

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
        (roots, root_rows), (suffixes, suffix_rows), tokens = self.rows
        if window not in self.masks:
            self.masks[window] = self.keys_and_mask(window)[1]
        mask = self.masks[window]
        own_q, own_k, own_v = (x.index_select(0, roots) for x in (q, k, v))
        first = root_rows.attend(own_q, own_k, own_v, window, scale)
        keys, values = (x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape).transpose(1, 2) for x in (k, v))
        queries = suffix_rows.pad(q.index_select(0, suffixes))
        gqa = q.shape[1] != k.shape[1]
        rest = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=gqa)
        out = torch.empty_like(q).index_copy(0, roots, first)
        return out.index_copy(0, suffixes, suffix_rows.unpad(rest))


def positions_within(lengths: Sequence[int]) -> np.ndarray:
    """0, 1, ... within each segment. In numpy: torch would wake its thread pool for this."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def seen_within(positions: Tensor, window: int) -> Tensor:
    """Which tokens each token of a sequence sees: [T, T]."""
    distances = positions[:, None] - positions
    return (distances >= 0) & (distances < window)


def kernels_for(q: Tensor) -> ModuleType | None:
    """The module of Triton kernels, if they can compute attention with these queries."""
    if q.dtype not in (torch.bfloat16, torch.float16) or not uses_triton(q.device) or not _has_tensor_cores(q.device):
        return None
    from assay.models import attention_kernels

    return attention_kernels if q.shape[-1] <= attention_kernels.MAX_SIZE else None


@cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Those for both 16-bit types."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def has_fast_cudnn(device: torch.device, head_dim: int) -> bool:
    """Whether cuDNN's attention is available and known to be faster than flash attention."""
    fast = torch.cuda.get_device_capability(device)[0] in (9, 10) and head_dim <= 128 and head_dim % 8 == 0
    return fast and torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cudnn.is_available()


class _PackedAttention(torch.autograd.Function):
    """Segments in `spans` are computed by cuDNN, all others and prefixes by the Triton kernels.

    The kernels continue from what cuDNN computed for suffixes in `spans`. The gradient of each part is computed from
    the combined result and the combined log-partition sum, which give every key its weight.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float | None, spans: list[slice]
    ) -> Tensor:
        from assay.models import attention_kernels

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sums = q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        long_forward(q, k, v, out, sums, spans, scale)
        attention_kernels.forward(q, k, v, out, sums, plan, scale)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.plan, ctx.scale, ctx.spans = plan, scale, spans
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from assay.models import attention_kernels

        q, k, v, out, sums = ctx.saved_tensors
        grad = grad.contiguous()
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        long_backward(grad, q, k, v, out, sums, grads, ctx.spans, ctx.scale)
        attention_kernels.backward(grad, q, k, v, out, sums, grads, ctx.plan, ctx.scale)
        return *grads, None, None, None


def long_forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, spans: list[slice], scale: float | None
) -> None:
    """Causal attention within each span, by cuDNN: writes results and log-partition sums."""
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    for span in spans:
        rows = [rounded_up(x[span]) for x in (q, k, v)]
        result, result_sums, *_ = forward(*rows, None, True, 0.0, True, scale=scale)
        length = span.stop - span.start
        out[span] = result[0, :, :length].transpose(0, 1)
        sums[:, span] = result_sums.view(q.shape[1], -1)[:, :length]


def long_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    grads: tuple[Tensor, ...],
    spans: list[slice],
    scale: float | None,
) -> None:
    none = q.new_zeros((), dtype=torch.int64)  # a random state that nothing reads
    for span in spans:
        rows = [rounded_up(x[span]) for x in (grad, q, k, v, out)]
        length, padded = span.stop - span.start, rows[0].shape[2]
        # Padding has no gradient. Its sum must be large: else probabilities there could overflow.
        own_sums = F.pad(sums[:, span], (0, padded - length), value=PADDED_SUM)[None, :, :, None].contiguous()
        results = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *rows, own_sums, none, none, None, None, None, padded, padded, 0.0, True, scale=scale
        )
        for total, gradient in zip(grads, results, strict=True):
            total[span] = gradient[0, :, :length].transpose(0, 1)


def rounded_up(x: Tensor) -> Tensor:
    """[N, H, d] -> [1, H, M, d], with zeros at the end. cuDNN builds a kernel for each M: there are 16 per octave."""
    step = 1 << max(len(x).bit_length() - 5, 6)
    missing = -len(x) % step
    return (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).transpose(0, 1)[None]
