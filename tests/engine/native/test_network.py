"""The fused network against the trainer's decoder, and the operations of a layer against formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engine_parts import needed_library, small_decoder, small_spec
from native_parts import SPECS, Weights, engine_for, requests_for
from torch import Tensor

from assay.engine import NativeEngine, SamplingParams, generate, make_engine
from assay.engine.base import copy_weights
from assay.engine.native.attention import ChunkAttention
from assay.engine.native.compiled import CompiledOperations
from assay.engine.native.engine import make_operations
from assay.engine.native.kv_cache import new_cache
from assay.engine.native.network import FusedDecoder, Operations, TorchOperations
from assay.engine.native.scheduler import Chunk
from assay.engine.sequence import BLOCK_SIZE
from assay.models.base import fingerprint
from assay.models.decoder import Decoder, rope_frequencies
from assay.models.device import uses_triton
from assay.models.spec import ModelSpec
from assay.types import UserError

CPU = torch.device("cpu")


def fused(model: Decoder, dtype: torch.dtype) -> FusedDecoder:
    network = FusedDecoder(model.spec, make_operations(model.spec, model.spec.max_length, CPU, dtype), CPU, dtype)
    copy_weights(network.canonical(), model.weights())
    return network


def test_canonical_weights_are_views_with_the_names_and_values_of_the_decoder() -> None:
    for spec in SPECS.values():
        model = small_decoder(spec)
        network = fused(model, torch.float64)
        weights = dict(model.weights())
        assert network.canonical().keys() == weights.keys()
        assert all(torch.equal(weight, weights[name].double()) for name, weight in network.weights())
        if spec.design.fused_qkv:
            network.canonical()["model.layers.1.self_attn.qkv_proj.weight"].fill_(7.0)
            assert (network.layers[1].qkv == 7.0).all()
        else:
            network.canonical()["model.layers.1.self_attn.k_proj.weight"].fill_(7.0)
            queries = spec.heads * spec.head_dim
            assert (network.layers[1].qkv[queries : queries + spec.kv_heads * spec.head_dim] == 7.0).all()


@pytest.mark.parametrize("name", SPECS)
def test_hidden_states_equal_those_of_the_decoder(name: str) -> None:
    model = small_decoder(SPECS[name]).double()
    network = fused(model, torch.float64)
    tokens = [5, 3, 60, 1, 1, 2, 17, 40, 8, 11]
    chunk = Chunk(tokens, 0, len(tokens), [2, 0])
    positions = torch.arange(len(tokens))
    slots = torch.tensor(chunk.blocks)[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    def run(method: str) -> tuple[Tensor | None, Tensor]:
        kv, _ = new_cache(model.spec, 4, CPU, torch.float64)
        attend = ChunkAttention([chunk], BLOCK_SIZE, CPU, torch.float64)
        at = network.ops.token_positions(positions, slots)
        return getattr(network, method)(torch.tensor(tokens), at, kv, attend), kv

    with torch.no_grad():
        hidden, kv = run("forward")
        _, filled = run("fill")
        expected = model.hidden(torch.tensor(tokens), [len(tokens)])
        assert hidden is not None and (hidden - expected).abs().max() < 1e-6  # rotary angles are float32
        assert (network.unembed(hidden) - model.unembed(expected)).abs().max() < 1e-5
    assert torch.equal(kv, filled) and not kv[:, :, :, [1, 3]].any()  # `fill` stores the same keys and values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_fingerprint_equals_that_of_the_canonical_weights(name: str, dtype: torch.dtype) -> None:
    model = small_decoder(SPECS[name])
    engine = make_engine("auto", model, device="cpu", dtype=dtype)
    assert isinstance(engine, NativeEngine) and engine.info.version == 0
    assert engine.fingerprint() == fingerprint(model.weights(), dtype)
    with torch.no_grad():
        dict(model.weights())["model.layers.1.mlp.down_proj.weight"][3, 2] += 1.0
    assert engine.fingerprint() != fingerprint(model.weights(), dtype)


def test_weights_of_another_model_are_named_in_the_error() -> None:
    model = small_decoder(small_spec())
    engine = engine_for(model)
    weights = dict(model.weights())
    norm = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UserError, match=norm):
        engine.update_weights(Weights((weights | {norm: torch.zeros(2, 3)}).items()), 1)
    with pytest.raises(UserError, match=r"model\.layers\.9\.odd"):
        engine.update_weights(Weights((weights | {"model.layers.9.odd": torch.zeros(1)}).items()), 1)
    with pytest.raises(UserError, match=norm):
        engine.update_weights(Weights([(name, weight) for name, weight in weights.items() if name != norm]), 1)
    assert engine.info.version == 0
    empty = NativeEngine(model.spec, device="cpu", dtype=torch.float32)
    with pytest.raises(UserError, match="update_weights"):
        generate(empty, requests_for([[1]], SamplingParams()))


TOLERANCE = {torch.float32: 1e-5, torch.float64: 2e-6, torch.bfloat16: 0.05}  # angles are float32 in all of them
KINDS = [*(("torch", dtype) for dtype in TOLERANCE), ("compiled", torch.float32)]
SPEC = small_spec(heads=4, kv_heads=2, head_dim=8, max_length=96)


def made(spec: ModelSpec, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Operations:
    if kind == "compiled":
        needed_library()
    else:
        monkeypatch.setenv("CC", "/no/compiler")
    ops = make_operations(spec, spec.max_length, CPU, dtype)
    assert isinstance(ops, CompiledOperations if kind == "compiled" else TorchOperations)  # Triton is for CUDA
    return ops


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rotated(x: Tensor, position: int, spec: ModelSpec) -> Tensor:
    """Pairs half of the rotated numbers apart, or neighbors, turned by the position's angles: [heads, d]."""
    out = x.double().clone()
    for pair, frequency in enumerate(rope_frequencies(spec).double().tolist()):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        i, j = (2 * pair, 2 * pair + 1) if spec.family == "glm4" else (pair, pair + spec.rotated // 2)
        a, b = x[:, i].double(), x[:, j].double()
        out[:, i], out[:, j] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_norm_and_activation(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = made(SPEC, kind, dtype, monkeypatch)
    x, weight = normal(5, 32, dtype=dtype), normal(32, seed=1, dtype=dtype)
    assert (ops.norm(x, weight).double() - rms_norm(x, weight, SPEC.norm_eps)).abs().max() < TOLERANCE[dtype]
    gate, up = normal(5, 9, dtype=dtype), normal(5, 9, seed=1, dtype=dtype)
    together = torch.cat((gate, up), dim=-1)
    expected = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    assert (ops.activate(together).double() - expected).abs().max() < TOLERANCE[dtype]
    assert torch.equal(together, torch.cat((gate, up), dim=-1))  # its input is left alone

    gemma = made(SPECS["gemma3"], kind, dtype, monkeypatch)
    normed = rms_norm(x, 1 + weight.double(), SPEC.norm_eps)
    assert (gemma.norm(x, weight).double() - normed).abs().max() < TOLERANCE[dtype]
    gelu = torch.nn.functional.gelu(gate.double(), approximate="tanh") * up.double()
    assert (gemma.activate(together).double() - gelu).abs().max() < TOLERANCE[dtype]


LINEAR = (("factor", 2.0), ("rope_type", "linear"))
ROTATIONS = {
    "qwen2": small_spec("qwen2", head_dim=8),
    "qwen2 scaled": small_spec("qwen2", head_dim=8, rope_scaling=LINEAR),
    "qwen3": small_spec("qwen3", head_dim=8),
    "gemma3": SPECS["gemma3"],
    "phi3": SPECS["phi3"],
    "glm4": SPECS["glm4"],
    "glm4 whole": small_spec("glm4", head_dim=8),
}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_rotating_and_storing(kind: str, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ROTATIONS[name]
    normed, offset = spec.qk_norm, 1.0 if name == "gemma3" else 0.0
    ops = made(spec, kind, dtype, monkeypatch)
    positions = torch.tensor([0, 5, 95, 17, 31])
    slots = torch.tensor([3, 2 * BLOCK_SIZE + 5, -1, BLOCK_SIZE, -1])
    qkv = normal(5, (4 + 2 * 2) * 8, dtype=dtype)
    q_norm, k_norm = (normal(8, seed=seed, dtype=dtype) if normed else None for seed in (1, 2))
    cache = torch.full((2, 2, 4, BLOCK_SIZE, 8), 7.0, dtype=dtype)
    out = ops.rotate_and_store(qkv.clone(), ops.token_positions(positions, slots), q_norm, k_norm, cache)
    q, k, v = qkv.view(5, 8, 8).split([4, 2, 2], dim=1)
    for token, (position, slot) in enumerate(zip(positions.tolist(), slots.tolist(), strict=True)):
        query, key = q[token].double(), k[token].double()
        if q_norm is not None and k_norm is not None:
            query = rms_norm(query, offset + q_norm.double(), spec.norm_eps)
            key = rms_norm(key, offset + k_norm.double(), spec.norm_eps)
        assert (out[token].double() - rotated(query, position, spec)).abs().max() < TOLERANCE[dtype]
        if slot >= 0:
            stored = cache.flatten(2, 3)[:, :, slot].double()
            assert (stored[0] - rotated(key, position, spec)).abs().max() < TOLERANCE[dtype]
            assert torch.equal(stored[1], v[token].double())
    untouched = sorted(set(range(4 * BLOCK_SIZE - 1)) - set(slots.tolist()))  # all but the very last, which is nobody's
    assert (cache.flatten(2, 3)[:, :, untouched] == 7.0).all()


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_each_layer_has_its_own_rotary_table(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's layers with a window have another base; layers of SmolLM3 may have no rotation."""
    for name, bases in (("gemma3", {0: 50.0, 1: 500.0, 2: 50.0}), ("smollm3", {0: 10_000.0, 1: None})):
        spec = SPECS[name]
        ops = made(spec, kind, dtype, monkeypatch)
        places = ops.token_positions(torch.tensor([31]), torch.tensor([-1]))
        for layer, base in bases.items():
            qkv, cache = normal(1, 8 * 8, dtype=dtype), torch.zeros((2, 2, 1, BLOCK_SIZE, 8), dtype=dtype)
            out = ops.rotate_and_store(qkv.clone(), places, None, None, cache, spec.rope_table(layer))
            query = qkv.view(8, 8)[:4]
            expected = query.double() if base is None else rotated(query, 31, replace(spec, rope_theta=base))
            assert (out[0].double() - expected).abs().max() < TOLERANCE[dtype]


def test_activation_of_extreme_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = made(SPEC, "compiled", torch.float32, monkeypatch)
    gate = torch.tensor([[-1e30, -200.0, -88.5, -30.0, -1e-30, 0.0, 1e-30, 30.0, 200.0, 1e30, math.nan]])
    out = ops.activate(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    assert torch.allclose(out, torch.nn.functional.silu(gate), rtol=1e-6, atol=1e-30, equal_nan=True)
    gemma = made(SPECS["gemma3"], "compiled", torch.float32, monkeypatch)
    out = gemma.activate(torch.cat((gate, torch.ones_like(gate)), dim=-1))
    expected = torch.nn.functional.gelu(gate.double(), approximate="tanh").float()
    assert torch.allclose(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_triton_is_for_cuda_alone() -> None:
    assert not uses_triton(CPU) and not uses_triton(torch.device("mps"))
