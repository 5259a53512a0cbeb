"""Triton kernels for attention in training, by a full softmax over each whole sequence in 64 bits."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from assay.models import attention
from assay.models.attention import PackedCausal

pytest.importorskip("triton")
from assay.models import attention_kernels
from assay.models.attention_kernels import Tuning, Tunings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Followers longer and shorter than tiles, one of a single token, sequences equal to their prefix, two leaders.
LENGTHS, SHARED = [40, 21, 57, 20, 9, 35, 19, 19, 30], [0, 20, 20, 20, 0, 0, 18, 18, 18]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and runs of queries that are much shorter than the sequences, and no other way to compute attention."""
    tunings = Tunings(Tuning(32, 16, 4, 2), Tuning(16, 16, 4, 2), Tuning(16, 32, 4, 2))
    monkeypatch.setattr(attention_kernels, "tunings_for", lambda size, device: tunings)
    monkeypatch.setattr(attention_kernels, "CHUNK", 32)
    monkeypatch.setattr(attention_kernels, "SUMMED_ROWS", 16)
    monkeypatch.setattr(attention, "kernels_for", lambda q: attention_kernels)
    monkeypatch.setattr(attention, "has_fast_cudnn", lambda device, size: False)


def reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], shared: list[int], restore: Tensor, window: int, scale: float
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    results = []
    for (start, end), common in zip(pairwise([0, *accumulate(lengths)]), shared, strict=True):
        tokens = restore[start:end]
        scores = torch.einsum("qhd,khd->hqk", q[tokens[common:]], k[tokens]) * scale
        distance = torch.arange(common, end - start)[:, None] - torch.arange(end - start)
        seen = (distance >= 0) & (distance < (window or end))
        weights = scores.masked_fill(~seen.to(scores.device), float("-inf")).softmax(-1)
        results.append(torch.einsum("hqk,khd->qhd", weights, v[tokens]))
    return torch.cat(results)


def check(
    lengths: list[int],
    shared: list[int],
    heads: tuple[int, int] = (2, 1),
    size: int = 16,
    window: int = 0,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Results and gradients of the kernels equal those of the reference."""
    layout = PackedCausal(lengths, DEVICE, shared)
    count = sum(lengths) - sum(shared)
    generator = torch.Generator().manual_seed(0)
    q, k, v, up = (
        torch.randn(count, number, size, generator=generator).to(DEVICE, dtype)
        for number in (*heads, heads[1], heads[0])
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = layout(*leaves, window, scale)
    found = [out, *torch.autograd.grad(out, leaves, up)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    restore = torch.arange(count, device=DEVICE) if layout.restore is None else layout.restore
    out = reference(*exact, lengths, shared, restore, window, scale or size**-0.5)
    wanted = [out, *torch.autograd.grad(out, exact, up.double())]
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        error = (a.double() - b).norm() / (1 + b.norm())
        assert error < (1e-5 if dtype == torch.float32 else 2e-3), (name, error)


@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (6, 1), (7, 1)])
def test_query_heads_of_a_key_value_head(heads: tuple[int, int]) -> None:
    check([38, 20, 18], [0, 17, 17], heads)


@pytest.mark.parametrize("size", [8, 64, 80, 128])
def test_sizes_of_heads(size: int) -> None:
    check([38, 20, 18], [0, 17, 17], size=size)


@pytest.mark.parametrize(
    ("lengths", "shared"),
    [
        (LENGTHS, SHARED),
        ([1, 2, 100], [0, 0, 0]),
        ([20, 20, 20], [0, 20, 20]),  # equal sequences: no token follows the prefix
        ([20, 20, 36, 21], [0, 20, 20, 20]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ragged_lengths_and_prefixes(lengths: list[int], shared: list[int], dtype: torch.dtype) -> None:
    check(lengths, shared, scale=0.3, dtype=dtype)


@pytest.mark.parametrize("window", [1, 7, 18, 33, 56, 57])
def test_windows_shorter_and_longer_than_suffix_and_prefix(window: int) -> None:
    check(LENGTHS, SHARED, window=window)


@pytest.mark.parametrize("window", [7, 33])
def test_windows_without_prefixes(window: int) -> None:
    check([70, 9, 40], [0, 0, 0], window=window)


def test_values_that_are_part_of_a_larger_tensor() -> None:
    layout = PackedCausal([20, 13], DEVICE)
    generator = torch.Generator().manual_seed(0)
    joined = torch.randn(33, 4, 16, generator=generator).to(DEVICE)
    views = [x.requires_grad_() for x in joined.split((2, 1, 1), 1)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    assert not any(x.is_contiguous() for x in views)
    for a, b in zip(*(torch.autograd.grad(layout(*x).square().sum(), x) for x in (views, copies)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("long", [17, 30])
def test_long_segments_are_continued_from_what_another_kernel_computed(
    monkeypatch: pytest.MonkeyPatch, long: int
) -> None:
    """Instead of cuDNN's kernels, a softmax over each long segment."""

    def scores_of(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1))
        hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        return (scores * (scale or q.shape[2] ** -0.5)).masked_fill(hidden, float("-inf"))

    def long_forward(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, spans: list[slice], scale: float | None
    ) -> None:
        computed.extend(spans)
        for span in spans:
            scores = scores_of(q[span], k[span], scale)
            values = v[span].repeat_interleave(q.shape[1] // k.shape[1], 1)
            out[span] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            sums[:, span] = scores.logsumexp(-1)

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
        for span in spans:
            own_q, own_k = (x[span].clone().requires_grad_() for x in (q, k))
            with torch.enable_grad():
                scores = scores_of(own_q, own_k, scale)
            weights = (scores.detach() - sums[:, span, None]).exp()
            values = v[span].repeat_interleave(q.shape[1] // k.shape[1], 1)
            delta = (grad[span] * out[span]).sum(-1).t()[:, :, None]
            score_grad = weights * (torch.einsum("qhd,khd->hqk", grad[span], values) - delta)
            by_scores = torch.autograd.grad(scores, (own_q, own_k), score_grad)
            value_grad = torch.einsum("hqk,qhd->khd", weights, grad[span])
            value_grad = value_grad.unflatten(1, (k.shape[1], -1)).sum(2)
            for total, gradient in zip(grads, (*by_scores, value_grad), strict=True):
                total[span] = gradient

    computed: list[slice] = []
    monkeypatch.setattr(attention, "LONG", long)
    monkeypatch.setattr(attention, "has_fast_cudnn", lambda device, size: True)
    monkeypatch.setattr(attention, "long_forward", long_forward)
    monkeypatch.setattr(attention, "long_backward", long_backward)
    lengths, shared = [40, 21, 57, 9, 18], [0, 20, 20, 0, 0]
    check(lengths, shared, (4, 2))
    assert len(computed) == (4 if long == 17 else 1)
    computed.clear()
    torch.use_deterministic_algorithms(True)
    try:
        PackedCausal(lengths, DEVICE, shared)(*(torch.ones(105, 1, 16, device=DEVICE) for _ in "qkv"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not computed
