"""Decoding steps in C against the same steps in torch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from engine_parts import UNUSUAL_SPECS, assert_same_tokens, needed_library, random_prompts, small_decoder, small_spec
from torch import Tensor

from assay.engine import NativeEngine, Request, SamplingParams, generate
from assay.engine.native import compiled
from assay.engine.native.compiled import CompiledAttention, CompiledRunner, SmallModel, library_for, load_library
from assay.engine.native.runner import Runner
from assay.engine.sampler import Rows, noise_keys
from assay.engine.sequence import Column, Modes, RowState
from assay.models.decoder import Decoder

CPU = torch.device("cpu")
TEMPERATURES = (0.0, 0.5, 1.0, 1.7)


def some_rows(size: int, vocabulary: int) -> Rows:
    """Rows of all temperatures and states, some about to reach their limit."""
    rows = Rows(size + 2, 1, CPU)
    index = torch.arange(size)
    rows.ints[:size, Column.KEY] = noise_keys(index * 77, index)
    rows.ints[:size, Column.COUNT] = index % 5
    rows.ints[:size, Column.LIMIT] = 5
    rows.ints[:size, Column.STATE] = torch.where(index % 7 == 3, RowState.STOP, RowState.RUNNING)
    rows.ints[:size, Column.STOPS :] = -1
    rows.ints[:size, Column.STOPS + 1] = index % vocabulary
    rows.floats[:size, 0] = torch.tensor(TEMPERATURES).repeat(size)[:size]
    rows.floats[:size, 1] = 1.0
    rows.step += 3
    rows.modes = Modes(greedy=True, random=True)
    return rows


def sampled_in_c_and_torch(logits: Tensor) -> tuple[Rows, Rows]:
    ours, theirs = (some_rows(*logits.shape) for _ in range(2))
    network = NativeEngine(small_spec(), device="cpu", dtype=torch.float32, max_batch=1).network
    CompiledRunner(network, ours, torch.zeros(1), needed_library())._draw(logits)
    theirs.draw(logits)
    return ours, theirs


@pytest.mark.parametrize("vocabulary", [1, 61, 256, 1000])
def test_samples_in_c_equal_samples_in_torch(vocabulary: int) -> None:
    logits = torch.randn(200, vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    logits[::3, ::2] = -math.inf  # tokens of probability 0
    logits[:, 0] = 0.5
    ours, theirs = sampled_in_c_and_torch(logits)
    assert torch.equal(ours.ints, theirs.ints)
    assert torch.equal(ours.log_tokens, theirs.log_tokens)
    assert (ours.log_scores - theirs.log_scores).abs().max() < 1e-5
    if vocabulary > 1:
        assert set(ours.ints[:200, Column.STATE].tolist()) == {RowState.RUNNING, RowState.LENGTH, RowState.STOP}


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_logits_break_only_their_row(broken: float) -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(2))
    logits[4, 280] = broken
    if broken == -math.inf:
        logits[4] = broken
    ours, theirs = sampled_in_c_and_torch(logits)
    assert [row for row in range(9) if ours.ints[row, Column.STATE] == RowState.BROKEN] == [4]
    others = [row for row in range(9) if row != 4]
    assert torch.equal(ours.ints[others], theirs.ints[others])


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    library = needed_library()
    generator = torch.Generator().manual_seed(3)
    kv, q = torch.randn(2, 2, 40, 8, 16, generator=generator), torch.randn(13, 4, 16, generator=generator)
    tables = torch.randint(0, 40, (13, 5), dtype=torch.int32, generator=generator)
    positions = torch.randint(0, 40, (13,), generator=generator)
    attend, logits = CompiledAttention(library, tables, positions, 40), torch.randn(50, 61, generator=generator)
    alone, sampled_alone = attend(kv, q), sampled_in_c_and_torch(logits)[0]
    monkeypatch.setattr(compiled, "THREAD_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    together, sampled_together = attend(kv, q), sampled_in_c_and_torch(logits)[0]
    assert torch.equal(alone, together)
    assert torch.equal(sampled_alone.ints, sampled_together.ints)
    assert torch.equal(sampled_alone.log_scores, sampled_together.log_scores)


def engine_of(model: Decoder, kind: type[Runner]) -> NativeEngine:
    engine = NativeEngine(model.spec, device="cpu", dtype=torch.float32, max_batch=5)
    engine.update_weights(model, 0)
    assert type(engine.runner) is kind
    return engine


SPECS = {
    "llama": small_spec("llama", head_dim=32, hidden=48, intermediate=80),
    "llama with biases": small_spec("llama", qkv_bias=True, out_bias=True, mlp_bias=True),
    "qwen2": small_spec("qwen2", heads=3, kv_heads=1, head_dim=20),
    "qwen3": small_spec("qwen3"),
}
WAYS = [*((name, True) for name in SPECS), *((name, False) for name in ("qwen3", *UNUSUAL_SPECS))]


@pytest.mark.parametrize(("name", "whole"), WAYS)
def test_an_engine_without_a_compiler_generates_the_same(
    name: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whole steps in C, and with matrix products in torch."""
    needed_library()
    model = small_decoder((SPECS | UNUSUAL_SPECS)[name], seed=3)
    if not whole:
        monkeypatch.setattr(compiled, "SMALL_PRODUCT", 0)
    plain = SamplingParams(n=3, temperature=1.1, max_new_tokens=12, stop_token_ids=(1, 2))
    kinds = [plain, replace(plain, n=1, temperature=0.0), replace(plain, n=1, temperature=0.3)]
    special = [replace(plain, n=1, top_k=5), replace(plain, forbidden_token_ids=(5, 9), min_new_tokens=4)]
    prompts = [list(range(40)), *random_prompts(4, 61, seed=4)]
    with_compiler = engine_of(model, CompiledRunner)
    monkeypatch.setenv("CC", "/no/compiler")
    without = engine_of(model, Runner)
    for some in (kinds, kinds + special):
        requests = [Request(p, params, seed=i) for i, (p, params) in enumerate(zip(prompts, some, strict=False))]
        ours, theirs = generate(with_compiler, requests), generate(without, requests)
        for request, a, b in zip(requests, ours, theirs, strict=True):
            for one, other in zip(a, b, strict=True):
                assert_same_tokens(model, request.prompt_ids, one.token_ids, other.token_ids)
                if one.token_ids == other.token_ids:
                    assert one.finish == other.finish
                    for name in ("engine_logprobs", "sampling_logprobs", "kept_mass", "entropy"):
                        x, y = (torch.tensor(getattr(c, name)) for c in (one, other))
                        assert torch.allclose(x, y, atol=1e-4), name


@pytest.mark.parametrize("changes", [{"vocab_size": 9000}, {"intermediate": 5000}])
def test_only_small_models_decode_a_whole_step_in_c(changes: dict[str, int]) -> None:
    needed_library()
    assert SmallModel.fits(engine_of(small_decoder(small_spec()), CompiledRunner).network)
    large = small_spec(**changes)  # type: ignore[arg-type]
    assert not SmallModel.fits(NativeEngine(large, device="cpu", dtype=torch.float32, max_batch=1).network)


def test_the_library_is_for_float32_on_a_cpu() -> None:
    assert library_for(CPU, torch.float64) is None and library_for(CPU, torch.bfloat16) is None
    assert library_for(torch.device("mps"), torch.float32) is None
    assert library_for(CPU, torch.float32) is needed_library()


@pytest.mark.parametrize("compiler", ["/no/compiler", "false", "true"])  # missing, failing, without output
def test_a_failing_compiler_gives_no_library(compiler: str) -> None:
    assert load_library(compiler) is None
