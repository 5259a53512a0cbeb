"""Programs of test processes that serve one model with tensor parallelism."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from engine_parts import small_decoder, small_spec
from native_parts import MODES, SPECS, Weights, engine_for, idle, mixed_prompts, mixed_requests, served, words
from torch import Tensor

from assay.engine import NativeEngine, Request, SamplingParams, generate, make_engine
from assay.engine.native import kv_cache
from assay.engine.native.kv_cache import MEMORY_FRACTION
from assay.engine.sequence import BLOCK_SIZE
from assay.mesh import Mesh, init_mesh
from assay.models.base import fingerprint
from assay.models.decoder import Decoder
from assay.models.parallel import shard_decoder, split_dim
from assay.models.spec import ModelSpec
from assay.types import Completion, UserError

# Together they have every kind of weight. The vocabulary of 61 divides by neither 2 nor 4, that of llama by both.
FAMILIES: dict[str, ModelSpec] = {
    "qwen2": small_spec("qwen2", layers=2),
    "qwen3": small_spec("qwen3", layers=2, head_dim=12),
    "llama": replace(SPECS["llama"], vocab_size=64),
    "gemma3": SPECS["gemma3"],
}
MIXED = SamplingParams(n=2, temperature=0.8, max_new_tokens=40, stop_token_ids=(3, 5, 7, 11))
KINDS = [
    MIXED,
    replace(MIXED, temperature=0.0, n=1),
    replace(MIXED, top_k=9, top_p=0.8),
    replace(MIXED, min_p=0.1, forbidden_token_ids=(2, 30, 31, 60), min_new_tokens=9),
    replace(MIXED, stop=("c", "xy")),
]
Found = dict[str, object]


def serve(engine: NativeEngine, model: Decoder, other: Decoder) -> Found:
    """A sequence of calls with all kinds of requests, kept sequences and weight updates."""
    found: Found = {"before": engine.fingerprint()}
    requests = [
        replace(request, params=replace(KINDS[i % len(KINDS)], stop_token_ids=request.params.stop_token_ids))
        for i, request in enumerate(mixed_requests(MIXED))
    ]
    found["first"] = rows(generate(engine, requests))
    short = SamplingParams(n=2, max_new_tokens=9)
    kept = generate(engine, [Request(p, short, seed=i, keep=True) for i, p in enumerate(mixed_prompts(seed=2)[4:9])])
    handles = [completion.handle for group in kept for completion in group]
    found["kept"] = rows(kept)
    turns = [Request([4, 8, 6], short, seed=70 + i, keep=True, continues=handle) for i, handle in enumerate(handles)]
    continued = generate(engine, turns[:6])
    found["continued"] = rows(continued)
    engine.update_weights(other, version=7)
    found["after"] = engine.fingerprint()
    found["with other weights"] = rows(generate(engine, turns[6:]))
    engine.release(completion.handle for group in continued for completion in group if completion.handle is not None)
    engine.update_weights(model, version=8)
    found["again"] = rows(generate(engine, requests[:5]))
    found["stats"] = asdict(engine.stats)
    return found


def rows(groups: Sequence[Sequence[Completion]]) -> list[dict[str, object]]:
    return [asdict(completion) for group in groups for completion in group]


def models(family: str) -> tuple[Decoder, Decoder]:
    first, second = (small_decoder(FAMILIES[family], seed).double() for seed in (21, 22))
    return first, second


def serve_cases(mesh: Mesh, folder: Path, tp: int, cases: Sequence[tuple[str, str]]) -> None:
    """Write the results of each rank, by family and mode, to files."""
    group = init_mesh(tp).tp_group
    for family, mode in cases:
        model, other = models(family)
        engine = engine_for(model, MODES[mode], dtype=torch.float64, decode=words, group=group)
        found = serve(engine, model, other)
        (folder / f"{family}-{mode}-{mesh.rank}.json").write_text(json.dumps(found))


def serve_alone(family: str, mode: str) -> Found:
    model, other = models(family)
    engine = engine_for(model, MODES[mode], dtype=torch.float64, decode=words)
    return json.loads(json.dumps(serve(engine, model, other)))


@torch.no_grad()
def wrong_parts_are_found(mesh: Mesh) -> None:
    mesh = init_mesh(tp=2)
    for family, dtype in (("qwen2", torch.float64), ("llama", torch.bfloat16)):
        model = small_decoder(FAMILIES[family])
        engine = make_engine("native", model, device="cpu", dtype=dtype, group=mesh.tp_group)
        assert isinstance(engine, NativeEngine)
        right = fingerprint(model.weights(), dtype)
        assert engine.fingerprint() == right
        held = engine.network.canonical()
        assert sum(w.numel() for w in held.values()) < 0.6 * sum(w.numel() for _, w in model.weights())
        for name, weight in model.weights():
            mine, dim = held[name], split_dim(name)
            before = mine.clone()
            if dim is None:
                mine[0] += mesh.tp_rank  # of what both hold, one has something else
                assert (engine.fingerprint() == right) == (mesh.tp_rank == 0), name
            elif weight.shape[dim] % 2 == 0:
                mine.copy_(weight.chunk(2, dim)[1 - mesh.tp_rank])
                assert engine.fingerprint() != right, name
            else:
                mine[-1, 0] += 1.0
                assert engine.fingerprint() != right, name
            mine.copy_(before)
        assert engine.fingerprint() == right
        parts = copy.deepcopy(model)
        shard_decoder(parts, mesh)
        engine.update_weights(Weights((name, torch.zeros_like(weight)) for name, weight in model.weights()), version=1)
        assert engine.fingerprint() != right
        engine.update_weights(parts, version=2)  # gathered from the trainer's parts
        assert engine.fingerprint() == right


def mistakes_are_told(mesh: Mesh) -> None:
    mesh = init_mesh(tp=2)
    group, rank = mesh.tp_group, mesh.tp_rank
    model = small_decoder(FAMILIES["qwen3"])
    with pytest.raises(UserError, match="tp = 2 does not divide the 1 key-value heads of this model: choose 1"):
        engine_for(small_decoder(replace(model.spec, kv_heads=1)), group=group)
    with pytest.raises(UserError, match="the hf engine cannot be split"):
        make_engine("hf", model, device="cpu", dtype=torch.float32, group=group)

    engine = engine_for(model, group=group)
    weights: dict[str, Tensor] = dict(model.weights())
    table = "model.embed_tokens.weight"
    with pytest.raises(UserError, match=r"has shape \(62, 32\), the engine's model has \(61, 32\)"):
        engine.update_weights(Weights((weights | {table: torch.zeros(62, 32)}).items()), version=1)
    engine.update_weights(Weights(weights.items()), version=2)

    params = SamplingParams(n=2, max_new_tokens=12)
    good = [Request([1, 2, 3], params, seed=0), Request([4, 5], params, seed=1)]
    changed = [replace(good[1], seed=2), replace(good[1], keep=True), replace(good[1], prompt_ids=[4, 6])]
    bad = [good[::-1], [*good, good[0]], good[:1], *([good[0], one] for one in changed)]
    for other in bad:
        with pytest.raises(RuntimeError, match="given different requests"):
            generate(engine, other if rank else good)
    expected = rows(generate(engine, good))

    enter = engine.rows.enter

    def enter_colder(samples: Sequence) -> None:  # type: ignore[type-arg]
        enter(samples)
        if rank:
            engine.rows.floats[:, 0] = 0.1

    engine.rows.enter = enter_colder  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="sampled different tokens"):
        generate(engine, good)
    engine.rows.enter = enter  # type: ignore[method-assign]
    engine.reset_prefix_cache()
    assert rows(generate(engine, good)) == expected and idle(engine)


def caches_are_of_one_size(mesh: Mesh) -> None:
    mesh = init_mesh(tp=2)
    model = small_decoder(FAMILIES["qwen3"])
    block = 2 * 2 * 1 * 12 * 4 * BLOCK_SIZE  # layers, keys and values, one of two heads, its size, bytes of a float32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "free_memory", lambda device: 1000 * block * (3, 1)[mesh.tp_rank])
        engine = engine_for(model, group=mesh.tp_group)
    assert engine.blocks.total == int(1000 * MEMORY_FRACTION["cpu"])  # what the second rank can have
    assert engine.runner.kv.shape == (2, 2, 1, engine.blocks.total + 1, BLOCK_SIZE, 12)


def broken_weights_are_named(mesh: Mesh) -> None:
    """Token 31 is the last one of rank 0: the tokens of rank 1 must not be affected by it."""
    group = init_mesh(tp=2).tp_group
    model = small_decoder(FAMILIES["llama"]).double()
    with torch.no_grad():
        model.model.embed_tokens.weight[31] = torch.nan
    params = SamplingParams(n=2, max_new_tokens=6, forbidden_token_ids=(31,))
    prompts = [[1, 2], [40, 31], [40, 63, 32], [31, 5], [0, 33]]
    requests = [Request(ids, params, seed=i) for i, ids in enumerate(prompts)]
    found, errors = served(engine_for(model, dtype=torch.float64, group=group), requests)
    expected, expected_errors = served(engine_for(model, dtype=torch.float64), requests)
    assert errors == expected_errors and set(errors) == {1, 3}
    assert [c["token_ids"] for c in rows(found)] == [c["token_ids"] for c in rows(expected)]


def other_cases(mesh: Mesh) -> None:
    wrong_parts_are_found(mesh)
    mistakes_are_told(mesh)
    caches_are_of_one_size(mesh)
    broken_weights_are_named(mesh)
