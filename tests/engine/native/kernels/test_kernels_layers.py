from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from assay.engine.native.kernels.layers import (
    gated,
    quantized_activation,
    quantized_norm,
    rms_norm,
    rope_store,
    start_step,
)
from assay.engine.sequence import BLOCK_SIZE, WIDTH, Column, RowState
from assay.models.fp8 import LARGEST, Quantized, Scaled

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts bfloat16 off where a device rounds it to the nearest.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # an infinity is meant


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_near(value: Tensor, expected: Tensor, roundings: int = 1) -> None:
    assert value.shape == expected.shape
    tolerance = TOLERANCE[value.dtype] * roundings
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [12, 896, 4096])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = 3 * normal(3, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    x[1] *= 1e-3  # so small that eps counts
    y = x.double()
    expected = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_near(rms_norm(x, weight, 1e-6), expected)
    assert_near(rms_norm(x, weight, 1e-6, 1.0), expected / weight.double() * (1 + weight.double()))
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [12, 1536])
def test_gated(size: int, dtype: torch.dtype) -> None:
    gate_up = 5 * normal(3, 2 * size, dtype=dtype)
    gate_up[0, :2] = torch.tensor([-120.0, 120.0])  # where a careless exponential overflows
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(gated(gate_up), F.silu(gate) * up)
    assert_near(gated(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)


def scaled(rows: int, sizes: list[int], bias: bool, seed: int = 0) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    scales = [torch.rand(count, generator=generator).to(DEVICE) + 0.1 for count in (rows, len(sizes))]
    size = sum(sizes)
    columns_bias = normal(size, dtype=torch.bfloat16, seed=seed + 1) if bias else None
    return Scaled(normal(rows, size, dtype=torch.bfloat16, seed=seed + 2), *scales, sizes, columns_bias)


def in_64_bits(x: Scaled) -> Tensor:
    columns = x.parts.double().repeat_interleave(torch.tensor(x.sizes, device=DEVICE))
    return x.values.double() * x.rows.double()[:, None] * columns + (0.0 if x.bias is None else x.bias.double())


def assert_quantized(found: Quantized, expected: Tensor) -> None:
    """`expected` in float64, before it is rounded to bfloat16 and then to codes."""
    torch.testing.assert_close(found.scales.double(), expected.abs().amax(1) / LARGEST, rtol=2**-7, atol=0)
    if DEVICE == "cuda":  # Triton's interpreter rounds 8-bit numbers wrongly
        values = found.codes.double() * found.scales[:, None].double()
        gap = (values - expected).abs()
        assert (gap <= expected.abs() * 2**-3.9 + found.scales[:, None] * 2**-9).all()
        assert gap.norm() < 0.04 * expected.norm()


@pytest.mark.parametrize(("size", "offset", "bias"), [(48, 0.0, False), (896, 1.0, True)])
def test_a_scaled_product_is_added_normalized_and_quantized(size: int, offset: float, bias: bool) -> None:
    x, weight, added = normal(3, size, dtype=torch.bfloat16), normal(size, dtype=torch.bfloat16, seed=1), None
    for added in (scaled(3, [size], bias), None):
        before = x.double()
        total = before + (0.0 if added is None else in_64_bits(added))
        found = quantized_norm(x, added, weight, 1e-6, offset)
        assert_near(x, total, 2)
        y = x.double()
        normed = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + offset)
        assert_quantized(found, normed)
    assert_quantized(quantized_norm(x, None, None, 1e-6), x.double())


def test_a_product_with_one_scale_is_added_and_normalized() -> None:
    x, weight, added = (
        normal(3, 48, dtype=torch.bfloat16),
        normal(48, dtype=torch.bfloat16, seed=1),
        scaled(3, [48], False),
    )
    added = replace(added, rows=added.rows[:1])
    total = x.double() + in_64_bits(added)
    found = rms_norm(x, weight, 1e-6, 0.0, added)
    assert_near(x, total, 2)
    y = x.double()
    assert_near(found, y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double(), 2)


@pytest.mark.gpu  # Triton's interpreter makes NaN a number
def test_nan_stays_nan_in_8_bits() -> None:
    x, gate_up = normal(2, 64, dtype=torch.bfloat16), scaled(2, [48, 48], False)
    x[1, 3], gate_up.values[1, 50] = torch.nan, torch.nan
    for found in (quantized_norm(x, None, None, 1e-6), quantized_activation(gate_up)):
        assert found.codes.float().isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("size", "parts", "bias", "activation"),
    [(48, 2, True, "silu"), (4112, 1, False, "gelu_tanh"), (64, 2, False, "silu")],
)
def test_a_scaled_activation_is_quantized(size: int, parts: int, bias: bool, activation: str) -> None:
    gate_up = scaled(3, [2 * size // parts] * parts, bias)
    gate, up = in_64_bits(gate_up).chunk(2, dim=-1)
    function = F.silu if activation == "silu" else lambda x: F.gelu(x, approximate="tanh")
    assert_quantized(quantized_activation(gate_up, activation), function(gate) * up)


@pytest.mark.parametrize(
    ("rotated", "parts", "bias", "norm"), [(64, 3, True, False), (32, 3, False, False), (64, 1, False, True)]
)
def test_rope_store_of_a_scaled_product(rotated: int, parts: int, bias: bool, norm: bool) -> None:
    heads, kv_heads, size = 6, 2, 64
    sizes = [heads * size, kv_heads * size, kv_heads * size]
    qkv = scaled(4, sizes if parts == 3 else [sum(sizes)], bias)
    positions, slots = torch.tensor([3, 0, 199, 17], device=DEVICE), torch.tensor([1, -1, 0, 9], device=DEVICE)
    norms = (normal(size, dtype=torch.bfloat16, seed=seed) if norm else None for seed in (1, 2))
    layout = positions, slots, rope_table(rotated), *norms, 1e-3
    caches = [torch.zeros(2, kv_heads, 2, BLOCK_SIZE, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    found, expected = (rope_store(x, *layout, cache) for x, cache in zip((qkv, qkv.tensor()), caches, strict=True))
    for mine, theirs in ((found, expected), caches):
        assert_near(mine, theirs.double(), 4)


def rope_table(size: int, length: int = 200) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(DEVICE)


def turned(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    positions: Tensor,
    rotations: Tensor,
    offset: float = 0.0,
    interleaved: bool = False,
) -> Tensor:
    """Reference in 64 bits, as complex numbers. [N, heads, d]"""
    x = x.double()
    if norm is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (norm.double() + offset)
    x, rest = x[..., : rotations.shape[1]], x[..., rotations.shape[1] :]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    cos, sin = rotations[positions].double()[:, None].chunk(2, dim=-1)
    product = torch.complex(a, b) * torch.complex(cos, sin)
    pairs = product.real, product.imag
    done = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((done, rest), dim=-1)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated", "norm", "offset", "interleaved", "dtype"),
    [
        (14, 2, 64, 64, False, 0.0, False, torch.bfloat16),
        (3, 3, 80, 80, True, 0.0, False, torch.float32),
        (7, 1, 128, 128, True, 0.0, False, torch.bfloat16),
        (2, 1, 8, 8, False, 0.0, False, torch.float32),
        (4, 2, 12, 12, True, 0.0, False, torch.float32),
        (3, 2, 64, 64, True, 1.0, False, torch.bfloat16),  # Gemma 3
        (3, 2, 256, 256, True, 1.0, False, torch.float32),
        (3, 2, 128, 64, False, 0.0, True, torch.float32),  # GLM-4
        (3, 2, 96, 96, False, 0.0, True, torch.bfloat16),
        (3, 2, 128, 96, False, 0.0, False, torch.float32),  # Phi-4-mini
        (3, 2, 12, 2, False, 0.0, False, torch.bfloat16),
    ],
)
def test_rope_store(
    heads: int,
    kv_heads: int,
    size: int,
    rotated: int,
    norm: bool,
    offset: float,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    blocks, eps = 5, 1e-3
    qkv = normal(4, (heads + 2 * kv_heads) * size, dtype=dtype)
    positions = torch.tensor([3, 0, 199, 17], device=DEVICE)
    slots = torch.tensor([blocks * BLOCK_SIZE - 1, -1, 0, 2 * BLOCK_SIZE + 6], device=DEVICE)
    q_norm, k_norm = (normal(size, dtype=dtype, seed=seed) if norm else None for seed in (1, 2))
    before = normal(2, kv_heads, blocks, BLOCK_SIZE, size, dtype=dtype, seed=3)
    cache, rotations = before.clone(), rope_table(rotated)
    q = rope_store(
        *(qkv, positions, slots, rotations, q_norm, k_norm, eps, cache), offset=offset, interleaved=interleaved
    )
    parts = qkv.view(4, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    layout = positions, rotations, offset, interleaved
    keys = turned(parts[1], k_norm, eps, *layout)
    roundings = 4 if norm else 1  # the norm rounds twice more, and turning mixes two numbers of a head
    assert_near(q, turned(parts[0], q_norm, eps, *layout), roundings)
    new, old = cache.view(2, kv_heads, -1, size), before.view(2, kv_heads, -1, size)
    used = [0, 2, 3]
    assert_near(new[0][:, slots[used]], keys[used].transpose(0, 1), roundings)
    assert torch.equal(new[1][:, slots[used]], parts[2][used].transpose(0, 1))
    others = torch.ones(blocks * BLOCK_SIZE, dtype=torch.bool, device=DEVICE)
    others[slots[used]] = False
    assert torch.equal(new[:, :, others], old[:, :, others])


def test_rope_store_into_a_cache_in_8_bits() -> None:
    qkv, positions = 100 * normal(3, 8 * 64, dtype=torch.bfloat16), torch.tensor([3, 0, 199], device=DEVICE)
    slots = torch.tensor([2, -1, 9], device=DEVICE)
    wide = torch.zeros(2, 2, 2, BLOCK_SIZE, 64, device=DEVICE, dtype=torch.bfloat16)
    narrow = wide.to(torch.float8_e4m3fn)
    found, expected = (
        rope_store(qkv, positions, slots, rope_table(64), None, None, 0.0, cache) for cache in (narrow, wide)
    )
    assert torch.equal(found, expected) and wide.abs().max() < LARGEST
    if DEVICE == "cuda":  # Triton's interpreter rounds 8-bit numbers wrongly
        assert torch.equal(narrow.float(), wide.to(torch.float8_e4m3fn).float())
        rope_store(1e3 * qkv, positions, slots, rope_table(64), None, None, 0.0, narrow)
        assert narrow.float().abs().max() == LARGEST


def test_rope_store_of_nothing_stored_leaves_the_cache_alone() -> None:
    cache = normal(2, 1, 2, BLOCK_SIZE, 8, dtype=torch.float32)
    before = cache.clone()
    nowhere = torch.full((2,), -1, device=DEVICE)
    rope_store(
        normal(2, 32, dtype=torch.float32), torch.arange(2, device=DEVICE), nowhere, rope_table(8), None, None, 0, cache
    )
    assert torch.equal(cache, before)


@pytest.mark.parametrize(("n", "block_size"), [(1, BLOCK_SIZE), (9, 16), (150, 4)])
def test_start_step(n: int, block_size: int) -> None:
    rows, max_blocks = n + 2, 12
    generator = torch.Generator().manual_seed(n)
    ints = torch.randint(1, 40, (rows, WIDTH), generator=generator)
    ints[:, Column.STATE] = torch.arange(rows) % 7 % 5  # running in two rows of seven
    ints[::7, Column.STORED] = 0
    tables = torch.randint(0, 2**20, (rows, max_blocks), generator=generator, dtype=torch.int32)
    positions, slots, ids = (torch.full((rows,), -7, device=DEVICE) for _ in range(3))
    lengths = positions.int()
    start_step(ints.to(DEVICE), tables.to(DEVICE), n, block_size, positions, lengths, slots, ids)

    expected = []
    for row, table in zip(ints[:n].tolist(), tables.tolist(), strict=False):
        position, slot = row[Column.POSITION], -1
        if row[Column.STATE] != RowState.RUNNING:
            expected.append([0, 0, -1, 0])
            continue
        if position >= row[Column.STORED]:
            slot = table[position // block_size] * block_size + position % block_size
        expected.append([position, position + 1, slot, row[Column.TOKEN]])
    found = torch.stack([positions, lengths.long(), slots, ids], dim=1).tolist()
    assert found[:n] == expected
    assert found[n:] == [[-7] * 4] * 2, "rows beyond n were written"
