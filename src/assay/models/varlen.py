"""torch's attention over sequences of different lengths, one behind the other: on CUDA, at 16 bits."""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor


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
