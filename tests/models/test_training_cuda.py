"""The training pass on a GPU, at 16 bits, against float64 on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.models import Decoder, ModelSpec, attention
from assay.models.attention import PackedCausal
from assay.models.logprobs import token_logprobs, token_loss

pytestmark = pytest.mark.gpu
LENGTHS, SHARED = [90, 70, 71, 200, 64, 80], [0, 64, 64, 0, 0, 40]


SPEC = ModelSpec(
    family="qwen2",
    vocab_size=1000,
    hidden=128,
    intermediate=256,
    layers=3,
    heads=6,
    kv_heads=2,
    head_dim=64,
    max_length=512,
    qkv_bias=True,
)


def batch() -> tuple[Tensor, Tensor]:
    """Sequences of which some begin alike, and which tokens are trained."""
    generator = torch.Generator().manual_seed(1)
    sequences: list[Tensor] = []
    leader = 0
    for index, (length, shared) in enumerate(zip(LENGTHS, SHARED, strict=True)):
        leader = leader if shared else index
        own = torch.randint(1000, (length - shared,), generator=generator)
        sequences.append(torch.cat((sequences[leader][:shared], own)) if shared else own)
    chosen = [torch.arange(length) >= max(shared, 40) for length, shared in zip(LENGTHS, SHARED, strict=True)]
    return torch.cat(sequences), torch.cat(chosen)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 64), (4, 4, 128), (14, 2, 64), (4, 1, 256)])
@pytest.mark.parametrize("shared", [None, SHARED])
@pytest.mark.parametrize(("window", "scale"), [(0, None), (0, 0.2), (33, None), (75, 0.2), (500, None)])
@pytest.mark.parametrize("long", [attention.LONG, 65, 30])
def test_attention_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    size: int,
    shared: list[int] | None,
    window: int,
    scale: float | None,
    long: int,
) -> None:
    """Windows shorter than suffixes, of which some reach into the shared prefix, and longer than all sequences. From
    `long` tokens on, a segment is computed by cuDNN."""
    monkeypatch.setattr(attention, "LONG", long)
    exact = PackedCausal(LENGTHS, "cpu", shared)
    quick = PackedCausal(LENGTHS, "cuda", shared)
    count = len(exact.positions)
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(count, n, size, generator=generator).bfloat16() for n in (heads, kv_heads, kv_heads, heads)]
    found, wanted = [], []
    for layout, device, dtype, results in (
        (quick, "cuda", torch.bfloat16, found),
        (exact, "cpu", torch.float64, wanted),
    ):
        q, k, v, up = (x.to(device, dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = layout(*leaves, window, scale)
        results += [out.detach(), *torch.autograd.grad(out, leaves, up)]
    for a, b in zip(found, wanted, strict=True):
        error = (a.double().cpu() - b).norm() / b.norm()
        assert error < 0.01, error


# A group with a shared prompt, another one whose last answers have one token, and a long sequence.
BUSY = [640] * 8 + [300, 129, 129, 2500], [0] + [128] * 7 + [0, 128, 128, 0]
MANY_TILES = pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(14, 2, 64), (12, 2, 128), (4, 2, 96), (4, 1, 256)]
)


def one_pass(heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """The result and the gradients, always for the same numbers of 16 bits."""
    layout = PackedCausal(BUSY[0], "cuda", BUSY[1])
    generator = torch.Generator().manual_seed(4)
    shapes = [(len(layout.positions), n, size) for n in (heads, kv_heads, kv_heads, heads)]
    *leaves, up = (torch.randn(shape, generator=generator).bfloat16().to("cuda", dtype) for shape in shapes)
    for x in leaves:
        x.requires_grad_()
    out = layout(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, up)]


def largest_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, wanted, strict=True))


@MANY_TILES
def test_attention_over_many_tiles_is_exact_and_deterministic(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, size: int
) -> None:
    monkeypatch.setattr(attention, "LONG", 1 << 30)
    first, second = (one_pass(heads, kv_heads, size) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert largest_error(first, one_pass(heads, kv_heads, size, torch.float32)) < 0.01


@pytest.mark.parametrize("long", [2000, 500, 100])
@MANY_TILES
def test_long_segments_by_cudnn_equal_those_by_triton(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, size: int, long: int
) -> None:
    """From `long` tokens on, segments are computed by cuDNN: sequences, suffixes, or prefixes too."""
    monkeypatch.setattr(attention, "LONG", 1 << 30)
    triton_only = one_pass(heads, kv_heads, size)
    monkeypatch.setattr(attention, "LONG", long)
    combined = one_pass(heads, kv_heads, size)
    assert largest_error(combined, triton_only) < 0.01
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        alone = one_pass(heads, kv_heads, size)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(alone, triton_only, strict=True))


def gradients(model: Decoder, device: str, dtype: torch.dtype, shared: list[int] | None) -> tuple[Tensor, Tensor]:
    ids, chosen = (x.to(device) for x in batch())
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(int(chosen.sum()), generator=generator).to(device, torch.promote_types(dtype, torch.float32))

    def loss(at: slice, logprobs: Tensor, entropy: Tensor) -> Tensor:
        return (logprobs * mix[at]).sum() + 0.1 * (entropy * mix[at]).sum()

    model.zero_grad(set_to_none=True)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        total = token_loss(model, ids, LENGTHS, chosen, loss, 0.9, logits_at_once=100_000, shared=shared)
        with torch.no_grad():
            logprobs, _ = token_logprobs(model, ids, LENGTHS, chosen, 0.9, shared=shared)
    total.backward()
    return logprobs.double().cpu(), torch.cat([p.grad.flatten() for p in model.parameters()]).double().cpu()


FAMILIES = {
    "qwen2": SPEC,
    "gemma3": replace(
        SPEC,
        family="gemma3_text",
        qkv_bias=False,
        qk_norm=True,
        windows=(30, 0, 75),
        local_rope_theta=1e3,
        query_scalar=50,
    ),
    "olmo2": replace(SPEC, family="olmo2", qkv_bias=False, qk_norm=True),
    "phi3": replace(SPEC, family="phi3", qkv_bias=False, rotary=48, windows=(70, 70, 70)),
    "glm4": replace(SPEC, family="glm4", rotary=32),
    "smollm3": replace(SPEC, family="smollm3", qkv_bias=False, no_rope=(1,)),
}
WAYS = [*(("qwen2", way) for way in ("plain", "shared", "recomputed", "compiled"))]
WAYS += [(family, way) for family in FAMILIES if family != "qwen2" for way in ("shared", "compiled")]


@pytest.mark.parametrize(("family", "way"), WAYS)
def test_a_whole_pass(family: str, way: str) -> None:
    model = Decoder(FAMILIES[family])
    model.initialise(0)
    expected = gradients(model.double(), "cpu", torch.float64, None)
    model = model.float().cuda()
    model.recompute = way == "recomputed"
    if way == "compiled":
        model.compile_layers()
    logprobs, gradient = gradients(model, "cuda", torch.bfloat16, None if way == "plain" else SHARED)
    assert (logprobs - expected[0]).abs().mean() < 0.01
    assert (gradient - expected[1]).norm() / expected[1].norm() < 0.03
