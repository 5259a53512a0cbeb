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
from assay.engine.native.network import FusedDecoder
from assay.engine.native.scheduler import Chunk
from assay.engine.sequence import BLOCK_SIZE
from assay.models.base import fingerprint
from assay.models.decoder import Decoder
from assay.models.device import uses_triton
from assay.models.fp8 import LARGEST, Fp8Matrix
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


@pytest.mark.parametrize("name", SPECS)
def test_products_in_8_bits_give_nearly_the_same_hidden_states(name: str) -> None:
    spec = replace(SPECS[name], hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, rotary=0)
    model = small_decoder(spec)
    exact, ops = fused(model, torch.float64), make_operations(spec, spec.max_length, CPU, torch.bfloat16)
    network = FusedDecoder(spec, ops, CPU, torch.bfloat16, quantize="fp8")
    copy_weights(network.canonical(), model.weights())
    tokens = torch.tensor([5, 3, 60, 1, 1, 2, 17, 40, 8, 11])
    chunk, positions = Chunk(tokens.tolist(), 0, len(tokens), [0, 1]), torch.arange(len(tokens))
    kv, _ = new_cache(spec, 3, CPU, torch.bfloat16)
    with torch.no_grad():
        attend = ChunkAttention([chunk], BLOCK_SIZE, CPU, torch.bfloat16)
        hidden = network.forward(tokens, ops.token_positions(positions, positions), kv, attend)
        for target, weight in zip(exact.canonical().values(), network.canonical().values(), strict=True):
            target.copy_(weight.codes.double() * weight.scales if isinstance(weight, Fp8Matrix) else weight)
        kv, _ = new_cache(spec, 3, CPU, torch.float64)
        attend = ChunkAttention([chunk], BLOCK_SIZE, CPU, torch.float64)
        expected = exact.forward(tokens, exact.ops.token_positions(positions, positions), kv, attend)
    error = (hidden.double() - expected).norm() / expected.norm()
    assert 0.005 < error < 0.25, error  # only activations are rounded


@pytest.mark.parametrize("name", SPECS)
def test_no_value_exceeds_the_largest_number_of_its_constant_scale(name: str) -> None:
    spec = replace(SPECS[name], hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, rotary=0)
    ops = make_operations(spec, spec.max_length, CPU, torch.bfloat16)
    network = FusedDecoder(spec, ops, CPU, torch.bfloat16, quantize="fp8")
    copy_weights(network.canonical(), small_decoder(spec).weights())
    network.weights_changed()
    tokens = torch.arange(2 * BLOCK_SIZE) % 7
    chunk, positions = Chunk(tokens.tolist(), 0, len(tokens), [0, 1]), torch.arange(len(tokens))
    kv, _ = new_cache(spec, 3, CPU, torch.bfloat16)
    with torch.no_grad():
        attend = ChunkAttention([chunk], BLOCK_SIZE, CPU, torch.bfloat16)
        network.fill(tokens, ops.token_positions(positions, positions), kv, attend)
    for layer, (_, values) in zip(network.layers, kv, strict=True):
        scale = layer.value_scale  # type: ignore[attr-defined]
        assert (scale is None) == (layer.norms[0] is None)  # without a norm, inputs have no bound
        if scale is not None:
            assert 0 < values.abs().max() < scale * LARGEST < 100 * values.abs().max()


@pytest.mark.parametrize("name", SPECS)
def test_fingerprint_equals_that_of_the_canonical_weights(name: str) -> None:
    model = small_decoder(SPECS[name])
    engine = make_engine("auto", model, device="cpu", dtype=torch.bfloat16)
    assert isinstance(engine, NativeEngine) and engine.info.version == 0
    assert engine.fingerprint() == fingerprint(model.weights(), torch.bfloat16)


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


SPEC = small_spec(heads=4, kv_heads=2, head_dim=8, max_length=96)


def test_activation_of_extreme_numbers_in_c() -> None:
    needed_library()
    gate = torch.tensor([[-1e30, -200.0, -88.5, -30.0, -1e-30, 0.0, 1e-30, 30.0, 200.0, 1e30, math.nan]])
    gelu = torch.nn.functional.gelu(gate.double(), approximate="tanh").float()
    for spec, expected in ((SPEC, torch.nn.functional.silu(gate)), (SPECS["gemma3"], gelu)):
        ops = make_operations(spec, spec.max_length, CPU, torch.float32)
        assert isinstance(ops, CompiledOperations)
        out = ops.activate(torch.cat((gate, torch.ones_like(gate)), dim=-1))
        assert torch.allclose(out, expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_triton_is_for_cuda_alone() -> None:
    assert not uses_triton(CPU) and not uses_triton(torch.device("mps"))
