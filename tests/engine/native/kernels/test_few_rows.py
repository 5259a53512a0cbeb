"""Products and layers of decoding steps with few rows, on a CUDA device, held against float64 and other kernels."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from engine_parts import UNUSUAL_SPECS, small_decoder, small_spec
from torch import Tensor

from assay.engine import NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.native.kernels import cuda, few_rows, layers
from assay.engine.native.runner import GraphRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda.is_available(torch.device("cuda")), reason="needs a Hopper GPU or a later one"),
]
SHAPES = [None, few_rows.Shape(2, 4, 2), few_rows.Shape(4, 8, 4), few_rows.Shape(2, 16, 4)]
ROWS = [1, 3, 8, 13, 16]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def normed(x: Tensor, weight: Tensor, offset: float = 0.0) -> Tensor:
    return F.rms_norm(x.double(), weight.shape, None, 1e-6) * (weight.double() + offset)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Up to roundings to bfloat16: of inputs, of results, and before a gate."""
    assert (found.double() - expected).norm() / expected.norm() < 6e-3


@pytest.mark.parametrize("shape", [*SHAPES, few_rows.Shape(1, 4, 2)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("features", "inputs"), [(896, 4864), (904, 72)])
def test_products_equal_float64(shape: few_rows.Shape | None, rows: int, features: int, inputs: int) -> None:
    x, weight, bias, norm = (
        random(rows, inputs),
        random(features, inputs) / inputs**0.5,
        random(features),
        random(inputs),
    )
    product = x.double() @ weight.double().t()
    assert_near(few_rows.product(x, weight, torch.empty_like(random(rows, features)), shape=shape), product)
    before = random(rows, features)
    after = few_rows.product(x, weight, before.clone(), few_rows.ADD, bias=bias, shape=shape)
    assert_near(after, before.double() + product + bias.double())
    out = few_rows.product(x, weight, random(rows, features), norm=norm, eps=1e-6, offset=1.0, shape=shape)
    assert_near(out, normed(x, norm, 1.0) @ weight.double().t())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
def test_gated_products_equal_float64(shape: few_rows.Shape | None, rows: int) -> None:
    x, weight, bias, norm = random(rows, 896) * 3, random(2 * 1208, 896) / 30, random(2 * 1208), random(896)
    gate, up = (normed(x, norm) @ weight.double().t() + bias.double()).bfloat16().double().chunk(2, 1)
    for mode, activated in ((few_rows.SILU, F.silu(gate)), (few_rows.GELU, F.gelu(gate, approximate="tanh"))):
        out = few_rows.product(x, weight, random(rows, 1208), mode, bias=bias, norm=norm, eps=1e-6, shape=shape)
        assert_near(out, activated * up)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(14, 2, 64), (5, 5, 128), (3, 1, 80)])
def test_rotated_products_equal_the_kernel_for_rotation(
    shape: few_rows.Shape | None, rows: int, heads: int, kv_heads: int, size: int
) -> None:
    features = (heads + 2 * kv_heads) * size
    x, weight, bias, norm = random(rows, 896) * 3, random(features, 896) / 30, random(features), random(896)
    positions, slots = (torch.randperm(64, device="cuda")[:rows].contiguous() for _ in range(2))
    slots[1:2] = -1
    angles = torch.randn(64, size // 2, device="cuda")
    rotations = torch.cat((angles.cos(), angles.sin()), dim=1)
    kv, expected_kv = (torch.zeros(2, kv_heads, 9, 8, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    stride = ctypes.c_int64(kv.stride(1))
    rotation = few_rows.Rotation(positions, slots, rotations, kv, stride, heads, kv_heads, size // 2)
    options = {"bias": bias, "norm": norm, "eps": 1e-6}
    q = few_rows.product(
        x, weight, random(rows, heads * size), few_rows.ROTATE, rotation=rotation, shape=shape, **options
    )
    qkv = (normed(x, norm) @ weight.double().t() + bias.double()).bfloat16()
    expected = layers.rope_store(qkv, positions, slots, rotations, None, None, 1e-6, expected_kv)
    assert_near(q, expected.flatten(1).double())
    assert_near(kv, expected_kv.double())
    assert torch.equal(kv == 0, expected_kv == 0)


def test_many_key_heads_and_a_shared_prompt() -> None:
    """Enough programs to read the shared prompt once, if there were more rows."""
    spec = replace(small_spec("llama"), hidden=256, heads=32, kv_heads=32, head_dim=64, max_length=512)
    engine = make_engine("native", small_decoder(spec, seed=1), device="cuda", dtype=torch.bfloat16, max_batch=16)
    params = SamplingParams(n=16, max_new_tokens=20)
    (group,) = generate(engine, [Request([i % 50 for i in range(288)], params, seed=0)])
    assert [len(completion.token_ids) for completion in group] == [20] * 16


def test_results_are_repeatable_and_rows_independent() -> None:
    x, weight = random(16, 896), random(896, 896)
    results = [few_rows.product(x, weight, random(16, 896)) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)
    x[3] = float("nan")
    broken = few_rows.product(x, weight, random(16, 896))
    assert torch.equal(broken.isnan().any(1).nonzero().flatten().cpu(), torch.tensor([3]))
    assert torch.equal(broken[4:], results[0][4:])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *UNUSUAL_SPECS])
@pytest.mark.parametrize("batch", [3, 16])
def test_scores_are_as_exact_as_with_the_other_kernels(
    family: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with float32."""
    spec = UNUSUAL_SPECS.get(family) or small_spec(family)
    model = small_decoder(replace(spec, head_dim=64, rotary=8 * spec.rotary, max_length=160), seed=3)
    params = SamplingParams(n=1, temperature=1.0, max_new_tokens=60)
    requests = [Request([i, 7, 9], params, seed=i) for i in range(batch)]
    exact = make_engine("native", model, device="cuda", dtype=torch.float32, max_batch=batch)

    def error() -> tuple[bool, float]:
        """Of log-probabilities, on average."""
        engine = make_engine("native", model, device="cuda", dtype=torch.bfloat16, max_batch=batch)
        assert isinstance(engine, NativeEngine) and isinstance(engine.runner, GraphRunner)
        completions = [group[0] for group in generate(engine, requests)]
        sequences = [[*request.prompt_ids, *c.token_ids] for request, c in zip(requests, completions, strict=True)]
        found = [score for c in completions for score in c.engine_logprobs]
        expected = [score for row in exact.score(sequences) for score in row[2:]]
        return engine.runner.few is not None, float((torch.tensor(found) - torch.tensor(expected)).abs().mean())

    used, ours = error()
    monkeypatch.setattr(few_rows, "MAX_LAYER_BYTES", -1)
    unused, others = error()
    assert used and not unused
    assert ours < 1.3 * others
