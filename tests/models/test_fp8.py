"""Weights and activations in 8 bits: rounding, products, the served weights, and an engine that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from assay.engine import Request, SamplingParams, generate, make_engine
from assay.mesh import Mesh
from assay.models import build_preset
from assay.models.base import HFModel
from assay.models.decoder import Decoder
from assay.models.fp8 import HEAD, LARGEST, SCALES, Fp8Head, Fp8Matrix, is_quantized, quantize, served_weights
from assay.training.sync import SyncError, compare_fingerprints, sync_weights
from assay.types import UserError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def engine_of(model: Any, **options: Any) -> Any:
    given = {"device": DEVICE, "dtype": torch.bfloat16, "max_batch": 8, "quantize": "fp8"}
    return make_engine("native", model, **{**given, **options})


def small(seed: int = 0, tied: bool = True) -> Any:
    model = build_preset("tiny", vocab_size=96, max_length=128, seed=seed)
    if model.spec.tied != tied:
        model = Decoder(replace(model.spec, tied=tied))
        model.initialise(seed)
    return model.to(DEVICE)


def test_a_row_is_rounded_to_its_nearest_codes() -> None:
    x = (
        torch.randn(33, 80, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        * torch.logspace(-6, 3, 33, device=DEVICE)[:, None]
    )
    x[4] = 0.0
    quantized = quantize(x)
    codes, scales = quantized.codes, quantized.scales
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    nearest = (x[:, :, None] * scales.reciprocal()[:, None, None] - every).abs().amin(2)
    found = (x * scales.reciprocal()[:, None] - codes.float()).abs()
    assert torch.equal(found, nearest)
    assert torch.allclose(codes.float().abs().amax(1)[x.abs().amax(1) > 0], torch.tensor(LARGEST, device=DEVICE))
    assert not codes[4].float().any()


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 64, generator=generator).to(DEVICE, torch.bfloat16)
    x, bias = (torch.randn(*size, generator=generator).to(DEVICE, torch.bfloat16) for size in ((5, 64), (48,)))
    matrix = Fp8Matrix.zeros([16, 32], 64, DEVICE, torch.bfloat16)
    first, second = matrix.split([16, 32])
    first.copy_(weight[:16])
    second.copy_(weight[16:])
    exact = (
        matrix.codes.double() * matrix.scales.double().repeat_interleave(torch.tensor([16, 32], device=DEVICE))[:, None]
    )
    assert (exact - weight.double()).norm() / weight.double().norm() < 0.03
    quantized = quantize(x)
    codes, scales = quantized.codes, quantized.scales
    expected = (codes.double() * scales[:, None].double()) @ exact.T + bias.double()
    torch.testing.assert_close(matrix.product(quantized, bias).tensor().double(), expected, rtol=0.02, atol=0.02)


def test_a_head_has_a_scale_per_row() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 64, generator=generator).to(DEVICE, torch.bfloat16)
    weight *= torch.logspace(-4, 2, 48, device=DEVICE, dtype=torch.bfloat16)[:, None]
    head = Fp8Head(48, 64, DEVICE)
    head.copy_(weight)
    exact = head.codes.double() * head.scales.double()[:, None]
    assert ((exact - weight.double()).norm(dim=1) / weight.double().norm(dim=1)).max() < 0.04
    x = quantize(torch.randn(5, 64, generator=generator).to(DEVICE, torch.bfloat16))
    expected = (x.codes.double() * x.scales[:, None].double()) @ exact.T
    torch.testing.assert_close(head.logits(x).double(), expected, rtol=0.02, atol=0.02)


def test_nan_stays_nan() -> None:
    weight, x = torch.ones(16, 32, device=DEVICE), torch.ones(2, 32, device=DEVICE, dtype=torch.bfloat16)
    matrix = Fp8Matrix.zeros([16], 32, DEVICE, torch.bfloat16)
    x[1, 5] = torch.nan
    matrix.copy_(weight)
    assert matrix.product(quantize(x)).tensor().isnan().any(1).tolist() == [False, True]
    weight[3, 4] = torch.nan
    matrix.copy_(weight)
    assert matrix.product(quantize(x[:1])).tensor().isnan().all()


def test_sizes_must_be_multiples() -> None:
    with pytest.raises(UserError, match="needs matrices with sizes that are multiples of 16, not 24 x 32"):
        Fp8Matrix.zeros([24], 32, DEVICE, torch.bfloat16)


@pytest.mark.parametrize("options", [{"quantize": "fp8"}, {"quantize": "fp8_head"}, {"kv_cache_dtype": "fp8"}])
def test_an_engine_samples_nearly_what_the_model_gives(options: dict[str, str]) -> None:
    model = small()
    requests = [Request([7, 3, 60 + i], SamplingParams(n=2, max_new_tokens=20), seed=i) for i in range(4)]
    groups = generate(engine_of(model, **{"quantize": "", **options}), requests)
    plain = {**{"device": DEVICE, "dtype": torch.bfloat16, "max_batch": 8}}
    exact = make_engine("native", model, **plain)
    gaps = []
    for request, group in zip(requests, groups, strict=True):
        for completion in group:
            (scores,) = exact.score([[*request.prompt_ids, *completion.token_ids]])
            mine = torch.tensor(completion.engine_logprobs)
            gaps.append((mine - torch.tensor(scores[len(request.prompt_ids) - 1 :])).abs().mean())
    assert 1e-4 < float(torch.stack(gaps).mean()) < 0.1  # it is another model, but nearly the same


@pytest.mark.parametrize("tied", [True, False])
def test_the_fingerprint_covers_the_head(tied: bool) -> None:
    model = small(tied=tied)
    engine = engine_of(model, quantize="fp8_head")
    other = small(seed=1, tied=tied)
    sync_weights(other, engine, 1)
    served = dict(served_weights(other.weights(), torch.bfloat16, head=True))
    assert engine.digests().keys() == served.keys() >= {HEAD, HEAD + SCALES, "model.embed_tokens.weight"}
    head = engine.network.head
    assert torch.equal(head.codes.view(torch.uint8), served[HEAD].view(torch.uint8))
    for part in (head.codes.view(torch.uint8), head.scales.view(torch.int32)):
        part[5:6] ^= 1
        with pytest.raises(SyncError, match=f"1 weight of .*{HEAD}"):
            compare_fingerprints(other, engine, 0, Mesh())
        part[5:6] ^= 1
    assert compare_fingerprints(other, engine, 0, Mesh()) == engine.fingerprint()


def test_the_fingerprint_covers_codes_and_scales() -> None:
    model = small()
    engine = engine_of(model)
    assert compare_fingerprints(model, engine, 0, Mesh()) == engine.fingerprint()
    names = set(engine.digests())
    linear = {name for name, _ in model.weights() if is_quantized(name)}
    assert len(linear) == 7 * model.spec.layers and {name + SCALES for name in linear} <= names
    served = dict(served_weights(model.weights(), torch.bfloat16))
    assert names == served.keys()
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        matrix = engine.network.canonical()[name]
        for part in (matrix.codes.view(torch.uint8), matrix.scales.view(torch.int32)):
            part[:1] ^= 1
            with pytest.raises(SyncError, match=f"1 weight of .*{name}"):
                compare_fingerprints(model, engine, 0, Mesh())
            part[:1] ^= 1
    other = small(seed=1)
    sync_weights(other, engine, 1)
    assert engine.info.version == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("native", {"dtype": torch.float32}, "needs engine.dtype"),
        (
            "native",
            {"dtype": torch.float32, "quantize": "", "kv_cache_dtype": "fp8"},
            "engine.kv_cache_dtype = 'fp8' needs",
        ),
        ("hf", {}, "engine.quantize is for the engine native"),
        ("hf", {"quantize": "", "kv_cache_dtype": "fp8"}, "engine.kv_cache_dtype is for the engine native"),
    ],
)
def test_what_cannot_be_quantized_is_refused(make_hf: Any, name: str, options: dict[str, Any], message: str) -> None:
    model = small() if name == "native" else HFModel(make_hf("llama", None))
    with pytest.raises(UserError, match=message):
        make_engine(name, model, **{"device": DEVICE, "dtype": torch.bfloat16, "quantize": "fp8", **options})
