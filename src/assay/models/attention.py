"""torch's attention over sequences of different lengths, one behind the other: on CUDA, at 16 bits.

Causal attention over packed sequences, for training and scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.models.device import upload


def has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _has_flash(device)


@cache
def _has_flash(device: torch.device) -> bool:
    """Some builds of torch lack it, and some devices are too old for it."""
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def varlen_attention(
    q: Tensor, keys: Tensor, values: Tensor, queries_at: Tensor, keys_at: Tensor, most: tuple[int, int]
) -> Tensor:
    """Causal, aligned at the ends of sequences, which begin at `queries_at` and `keys_at` (int32, ends included).

    q [N, H, d], keys and values [M, K, d]; `most`: queries and keys that a sequence has.
    """
    return flash(q, keys, values, queries_at, keys_at, most, causal=True)[0]


def packed_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Causal attention within segments that begin at `starts`; as above, with gradients."""
    return _PackedAttention.apply(q, k, v, starts, longest)


class _PackedAttention(torch.autograd.Function):
    """Flash attention by its bare operators: what torch wraps them in takes the host longer than all of this."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
        out, sums, seed, unused = flash(q, k, v, starts, starts, (longest, longest), causal=True)
        ctx.save_for_backward(q, k, v, out, sums, starts, seed, unused)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, starts, seed, unused = ctx.saved_tensors
        most = (ctx.longest, ctx.longest)
        found = flash_backward(grad.contiguous(), q, k, v, out, sums, starts, starts, most, seed, unused, causal=True)
        return *found, None, None


class Stems(Protocol):
    """What several sequences begin with, and what follows: see `attention.Branches`."""

    tails: Tensor
    stems: Tensor
    tail_starts: Tensor
    stem_starts: Tensor
    most: tuple[int, int]


def tree_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, stems: Stems) -> Tensor:
    """Causal attention within segments that begin at `starts`, where those that follow a stem see all of it too."""
    return _TreeAttention.apply(q, k, v, starts, longest, stems)


class _TreeAttention(torch.autograd.Function):
    """Two passes of flash attention, joined by their log-partition sums.

    The gradient of each pass follows from the joined result and the joined sum: with these a pass knows the true weight
    of each of its keys.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, stems: Stems) -> Tensor:
        out, sums, seed, unused = flash(q, k, v, starts, starts, (longest, longest), causal=True)
        tail = q.index_select(0, stems.tails)
        keys, values = k.index_select(0, stems.stems), v.index_select(0, stems.stems)
        ours, our_sums, _, _ = flash(tail, keys, values, stems.tail_starts, stems.stem_starts, stems.most, causal=False)
        theirs = sums.index_select(1, stems.tails)
        joined = torch.logaddexp(theirs, our_sums)
        theirs, ours_too = ((part - joined).exp().t()[:, :, None] for part in (theirs, our_sums))
        mixed = out.index_select(0, stems.tails) * theirs + ours * ours_too
        out.index_copy_(0, stems.tails, mixed.to(out.dtype))
        sums.index_copy_(1, stems.tails, joined)
        ctx.save_for_backward(q, k, v, out, sums, starts, seed, unused)
        ctx.longest, ctx.stems = longest, stems
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, starts, seed, unused = ctx.saved_tensors
        stems, most = ctx.stems, (ctx.longest, ctx.longest)
        grad = grad.contiguous()
        found = flash_backward(grad, q, k, v, out, sums, starts, starts, most, seed, unused, causal=True)
        tail, own_grad, own_out = (x.index_select(0, stems.tails) for x in (q, grad, out))
        keys, values = k.index_select(0, stems.stems), v.index_select(0, stems.stems)
        own_sums = sums.index_select(1, stems.tails)
        starts = (stems.tail_starts, stems.stem_starts)
        more = flash_backward(
            own_grad, tail, keys, values, own_out, own_sums, *starts, stems.most, seed, unused, causal=False
        )
        for whole, part, at in zip(found, more, (stems.tails, stems.stems, stems.stems), strict=True):
            whole.index_add_(0, at, part)
        return *found, None, None, None


def flash(
    q: Tensor, k: Tensor, v: Tensor, queries_at: Tensor, keys_at: Tensor, most: tuple[int, int], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result [N, H, d], log-partition sums [H, N], and two things that the backward pass wants to see again."""
    return torch.ops.aten._flash_attention_forward(q, k, v, queries_at, keys_at, *most, 0.0, causal, False)[:4]


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    queries_at: Tensor,
    keys_at: Tensor,
    most: tuple[int, int],
    seed: Tensor,
    unused: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, sums.contiguous(), queries_at, keys_at, *most, 0.0, causal, seed, unused
    )


class PackedCausal:
    """Each token sees the earlier tokens of its own sequence.

    `shared[i]` tokens with which sequence i begins are those of the nearest sequence before it that shares none, its
    leader: they are computed once. All that follow one leader share as much with it.

    On CUDA at 16 bits sequences stay as they are. Elsewhere they are laid out as a right-padded batch for the fused
    kernel, and taken back out of it. Everything outside attention stays free of padding.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str, shared: Sequence[int] | None = None) -> None:
        shared = shared or [0] * len(lengths)
        tree = Segments.of(lengths, shared)
        self.device = torch.device(device)
        self.segments = Padded(tree.lengths, self.device)
        starts = [0, *accumulate(tree.lengths)]
        positions = counted(tree.lengths) + np.repeat(tree.offsets, tree.lengths)
        self.positions = upload(torch.from_numpy(positions), self.device)  # of the tokens that are computed
        self.starts = upload(torch.tensor(starts, dtype=torch.int32), self.device)
        # Of all tokens, those that are computed; and where among these each of all tokens is found.
        self.computed = self.places = None
        self.branches: Branches | None = None
        if any(shared):
            computed, places = tree.computed()
            self.computed, self.places = upload(computed, self.device), upload(places, self.device)
            if any(stem >= 0 for stem in tree.stems):  # identical sequences have no tokens after the shared ones
                self.branches = Branches(tree, starts, self.device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        longest = self.segments.longest
        if has_varlen(q.device, q.dtype):
            if self.branches is not None:
                return tree_attention(q, k, v, self.starts, longest, self.branches)
            return packed_attention(q, k, v, self.starts, longest)
        if self.branches is None:
            return self.segments.attend(q, k, v)
        return self.branches.attend(q, k, v)


@dataclass(frozen=True)
class Segments:
    """Runs of tokens that are computed: whole sequences, stems that several begin with, and what follows the stems."""

    lengths: list[int]
    offsets: list[int]  # positions at which they begin in their sequences
    stems: list[int]  # for each the segment that it follows, or -1
    sequences: list[tuple[int, int, int]]  # length, shared tokens, and where in the computed ones those begin

    @classmethod
    def of(cls, lengths: Sequence[int], shared: Sequence[int]) -> Segments:
        tree = cls([], [], [], [])
        start = stem = stem_start = 0
        for index, (length, prefix) in enumerate(zip(lengths, shared, strict=True)):
            if not prefix:
                prefix = next(iter(shared[index + 1 : index + 2]), 0)  # a leader is a stem and what follows it
                stem, stem_start = len(tree.lengths), start
                tree._add(prefix or length, 0, -1)
                start += prefix or length
                tree.sequences.append((length, 0, 0))
            else:
                assert prefix == tree.lengths[stem], "all that follow a leader share as much with it"
                tree.sequences.append((length, prefix, stem_start))
            if prefix and length > prefix:
                tree._add(length - prefix, prefix, stem)
                start += length - prefix
        return tree

    def _add(self, length: int, offset: int, stem: int) -> None:
        self.lengths.append(length)
        self.offsets.append(offset)
        self.stems.append(stem)

    def computed(self) -> tuple[Tensor, Tensor]:
        """Which of all tokens are computed, and where among these each of all tokens is found."""
        kept, places, begun, done = [], [], 0, 0
        for length, prefix, stem_start in self.sequences:
            kept.append(np.arange(begun + prefix, begun + length))
            places += [np.arange(stem_start, stem_start + prefix), np.arange(done, done + length - prefix)]
            begun, done = begun + length, done + length - prefix
        return torch.from_numpy(np.concatenate(kept)), torch.from_numpy(np.concatenate(places))


class Padded:
    """Segments as rows of a batch. Padding sits behind every real token, where causal attention never looks."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.device = lengths, device
        self.batch, self.longest = len(lengths), max(lengths)
        self.even = min(lengths) == self.longest

    @cached_property
    def slots(self) -> Tensor:
        """Where each token sits in the padded batch."""
        rows = np.repeat(np.arange(self.batch), self.lengths)
        return upload(torch.from_numpy(rows * self.longest + counted(self.lengths)), self.device)

    def pad(self, x: Tensor) -> Tensor:
        """[N, H, d] -> [B, H, T, d]"""
        if not self.even:
            x = x.new_zeros(self.batch * self.longest, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.unflatten(0, (self.batch, self.longest)).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2).flatten(0, 1)
        return x if self.even else x.index_select(0, self.slots)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(self.pad(q), self.pad(k), self.pad(v), is_causal=True, enable_gqa=gqa)
        return self.unpad(out)


class Branches:
    """Segments that follow stems, and the stems. Token numbers are those of computed tokens."""

    def __init__(self, tree: Segments, starts: list[int], device: torch.device) -> None:
        self.tree, self.device = tree, device
        self.spans = [torch.arange(a, b) for a, b in pairwise(starts)]
        self.followers = [i for i, stem in enumerate(tree.stems) if stem >= 0]
        stems = sorted({tree.stems[i] for i in self.followers})
        in_tails = [sum(tree.lengths[i] for i in self.followers if tree.stems[i] == stem) for stem in stems]
        in_stems = [tree.lengths[stem] for stem in stems]
        self.tails = self._tokens(self.followers)  # of segments that follow a stem
        self.stems = self._tokens(stems)
        # Where the tails of each stem begin among `tails`, and each stem among `stems`; ends included.
        self.tail_starts, self.stem_starts = self._bounds(in_tails), self._bounds(in_stems)
        self.most = max(in_tails), max(in_stems)

    def _tokens(self, segments: list[int]) -> Tensor:
        return upload(torch.cat([self.spans[i] for i in segments]), self.device)

    def _bounds(self, sizes: list[int]) -> Tensor:
        return upload(torch.tensor([0, *sizes]).cumsum(0).int(), self.device)

    @cached_property
    def rows(self) -> tuple[Tensor, Padded, Padded, Tensor, Tensor]:
        """Tokens of segments that follow nothing, these as rows; tails as rows, what these may look at, and see."""
        lengths = self.tree.lengths
        roots = [i for i, stem in enumerate(self.tree.stems) if stem < 0]
        root_rows = Padded([lengths[i] for i in roots], self.device)
        tail_rows = Padded([lengths[i] for i in self.followers], self.device)
        stems = [self.spans[self.tree.stems[i]] for i in self.followers]
        seen, mask = visible(stems, [self.spans[i] for i in self.followers])
        return self._tokens(roots), root_rows, tail_rows, upload(seen, self.device), upload(mask, self.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """In torch, for any device and dtype."""
        roots, root_rows, tail_rows, seen, mask = self.rows
        first = root_rows.attend(*(x.index_select(0, roots) for x in (q, k, v)))
        keys, values = (x.index_select(0, seen.flatten()).unflatten(0, seen.shape).transpose(1, 2) for x in (k, v))
        queries = tail_rows.pad(q.index_select(0, self.tails))
        rest = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )
        return torch.empty_like(q).index_copy(0, roots, first).index_copy(0, self.tails, tail_rows.unpad(rest))


def counted(lengths: Sequence[int]) -> np.ndarray:
    """0, 1, ... within each of the segments. By numpy, as all that is counted here: torch would wake its threads."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def visible(stems: list[Tensor], tails: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens [rows, stem + tail] that rows of queries may look at, padded with any, and which of these are seen."""
    width, height = max(len(stem) for stem in stems), max(len(tail) for tail in tails)
    seen = torch.zeros(len(tails), width + height, dtype=torch.int64)
    mask = torch.zeros(len(tails), 1, height, width + height, dtype=torch.bool)
    causal = torch.ones(height, height, dtype=torch.bool).tril()
    for row, (stem, tail) in enumerate(zip(stems, tails, strict=True)):
        seen[row, : len(stem)], seen[row, width : width + len(tail)] = stem, tail
        mask[row, 0, :, : len(stem)] = True
        mask[row, 0, :, width:] = causal
    return seen, mask
