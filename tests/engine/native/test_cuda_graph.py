"""The native engine and the update on a CUDA device, held against the CPU."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_parts import UNUSUAL_SPECS, small_decoder, small_spec
from native_parts import Consumer, model_of

from assay.algos import make_algorithm
from assay.engine import NativeEngine, generate, make_engine
from assay.engine.base import Request, SamplingParams
from assay.engine.native import kv_cache
from assay.engine.native.kv_cache import GIB
from assay.engine.sequence import BLOCK_SIZE
from assay.models.decoder import Decoder
from assay.types import Completion
from tests.engine.test_continuations import talks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch", [4, 64])
def test_requests_added_while_others_run_generate_the_same_as_alone(batch: int) -> None:
    """The host looks late here, and takes in who comes between two windows."""
    engine, talk = native(copy.deepcopy(model_of("qwen3")).to("cuda"), "cuda", max_batch=batch), talks()
    Consumer(engine, on_finish=talk.on_finish, more=talk.more).run()
    ours = [talk.done[number, turn] for number, turn, _, _ in talk.asked]
    alone = native(model_of("qwen3"), "cpu")
    whole = [Request([*before, *r.prompt_ids], r.params, r.seed) for _, _, before, r in talk.asked]
    assert share_of_equals(ours, flat(generate(alone, whole))) >= 0.9
    assert not (engine.scheduler.kept or engine.blocks.in_use or engine.scheduler.unfinished)


def native(model: Decoder, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> NativeEngine:
    engine = make_engine("native", model, device=device, dtype=dtype, **options)
    assert isinstance(engine, NativeEngine)
    return engine


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return [completion for group in groups for completion in group]


def share_of_equals(ours: list[Completion], theirs: list[Completion]) -> float:
    assert len(ours) == len(theirs)
    return sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True)) / len(ours)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *UNUSUAL_SPECS])
def test_cuda_graphs_generate_the_same_as_the_cpu_for_all_sampling_parameters(family: str) -> None:
    spec = UNUSUAL_SPECS.get(family) or small_spec(family)
    model = small_decoder(replace(spec, head_dim=64, rotary=8 * spec.rotary, max_length=160), seed=3)
    plain = SamplingParams(n=3, temperature=0.9, max_new_tokens=30, stop_token_ids=(1, 2))
    kinds = [
        plain,
        replace(plain, temperature=0.0),
        replace(plain, top_k=7, top_p=0.8),
        replace(plain, min_p=0.1, min_new_tokens=9, forbidden_token_ids=(4, 8, 15)),
    ]
    asked = [Request([(i * j) % 61 for j in range(1, 20 + 9 * i)], kinds[i % 4], seed=i) for i in range(9)]
    expected = flat(generate(native(model, "cpu"), asked))
    engine = native(model, "cuda", max_batch=8, prefill_tokens=32)
    found = flat(generate(engine, asked))
    assert share_of_equals(found, expected) >= 0.8  # a near-tie may fall differently
    for a, b in zip(found, expected, strict=True):
        if a.token_ids == b.token_ids:
            assert a.finish == b.finish
            for name in ("engine_logprobs", "sampling_logprobs", "kept_mass", "entropy"):
                x, y = torch.tensor(getattr(a, name)), torch.tensor(getattr(b, name))
                assert torch.allclose(x, y, atol=2e-3), name


def test_preemption_and_weight_updates_reuse_captured_graphs() -> None:
    spec = small_spec("qwen2", head_dim=64, max_length=160)
    model, other = small_decoder(spec, seed=1), small_decoder(spec, seed=2)
    asked = [Request([7 * i + j for j in range(5)], SamplingParams(n=6, max_new_tokens=60), seed=i) for i in range(3)]
    blocks = 192 // BLOCK_SIZE
    block = 2 * spec.layers * spec.kv_heads * spec.head_dim * 4 * BLOCK_SIZE
    engine = native(model, "cuda", max_batch=8, kv_cache_gib=(blocks * block + 1) / GIB)
    assert engine.blocks.total == blocks
    expected = flat(generate(native(model, "cuda", max_batch=8), asked))
    assert share_of_equals(flat(generate(engine, asked)), expected) >= 0.8
    assert engine.stats.preemptions > 0
    recorded = dict(engine.runner.graphs)  # type: ignore[attr-defined]
    engine.update_weights(other, 1)
    fresh = flat(generate(native(other, "cuda", max_batch=8), asked))
    new = flat(generate(engine, asked))
    assert share_of_equals(new, fresh) >= 0.8
    assert share_of_equals(new, expected) < 0.2
    assert {c.version for c in new} == {1}
    # Another number of rows may turn up, but nothing that was recorded is recorded again.
    assert all(engine.runner.graphs[key] is graph for key, graph in recorded.items())  # type: ignore[attr-defined]


def test_shared_prefixes_do_not_change_samples() -> None:
    model = small_decoder(small_spec("qwen3", head_dim=64, heads=6, kv_heads=2, max_length=512), seed=5)
    prompts = [[(i + 3) * j % 61 for j in range(300 + 50 * i)] for i in range(2)]
    asked = [Request(p, SamplingParams(n=128, max_new_tokens=12), seed=i) for i, p in enumerate(prompts)]
    engine = native(model, "cuda", torch.bfloat16, max_batch=256)
    together = flat(generate(engine, asked))
    assert any(key[:2] == (256, True) for key in engine.runner.graphs)  # type: ignore[attr-defined]
    engine.runner.min_shared_blocks = 1 << 20  # type: ignore[attr-defined]
    engine.update_weights(model, 1)
    alone = flat(generate(engine, asked))
    assert any(key[:2] == (256, False) for key in engine.runner.graphs)  # type: ignore[attr-defined]
    assert share_of_equals(together, alone) >= 0.5  # bfloat16: rounding differs
    first = torch.tensor([[a.engine_logprobs[0], b.engine_logprobs[0]] for a, b in zip(together, alone, strict=True)])
    same = torch.tensor([a.token_ids[0] == b.token_ids[0] for a, b in zip(together, alone, strict=True)])
    assert same.float().mean() > 0.9
    assert (first[same, 0] - first[same, 1]).abs().max() < 0.1


@torch.no_grad()
@pytest.mark.parametrize("name", UNUSUAL_SPECS)
def test_bfloat16_serving_of_other_families_equals_the_trainer(name: str) -> None:
    """Prompts are computed by flash attention, with windows; rows share the prefixes of layers without one."""
    spec = replace(UNUSUAL_SPECS[name], head_dim=64, rotary=8 * UNUSUAL_SPECS[name].rotary, max_length=512)
    spec = replace(spec, windows=tuple(30 * window for window in spec.windows))
    model = small_decoder(spec, seed=5).to("cuda", torch.bfloat16)
    exact = small_decoder(spec, seed=5).to("cuda", torch.bfloat16).to(torch.float32)
    prompts = [[(i + 3) * j % 61 for j in range(300 + 50 * i)] for i in range(2)]
    asked = [Request(p, SamplingParams(n=128, max_new_tokens=12), seed=i) for i, p in enumerate(prompts)]
    engine = native(model, "cuda", torch.bfloat16, max_batch=256)
    for request, group in zip(asked, generate(engine, asked), strict=True):
        for completion in group[:4]:
            ids = torch.tensor([*request.prompt_ids, *completion.token_ids], device="cuda")
            start = len(request.prompt_ids)
            expected, precise = (
                one.unembed(one.hidden(ids, [len(ids)]))
                .float()
                .log_softmax(-1)[start - 1 : -1]
                .gather(-1, ids[start:, None])
                for one in (model, exact)
            )
            noise = float((expected - precise).abs().mean())  # of the trainer's own rounding
            gap = expected[:, 0].cpu() - torch.tensor(completion.engine_logprobs)
            assert gap.abs().mean() < max(0.05, 2 * noise)


def test_losses_of_every_recipe_run_on_cuda() -> None:
    from assay.algos import RECIPES, LossBatch

    values = torch.randn(40, device="cuda")
    ones, marked = torch.ones_like(values), values > 0
    corrected = {"correction": "sequence_truncate", "cov": "kl_cov"}
    for name, changes in [*((name, {}) for name in RECIPES), ("grpo", corrected)]:
        algo = make_algorithm(name, max_new_tokens=32, **changes)
        logprobs = values.clone().requires_grad_()
        inputs = {one.name: marked for one in algo.inputs}
        known = {"engine_logprobs": values, "lengths": [10, 0, 30], "inputs": inputs}
        out = algo.loss(LossBatch(logprobs, values, ones, 0.1 * ones, **known))
        out.total.backward()
        assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())


def test_sleep_releases_the_kv_cache_and_captured_graphs_stay_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by the calls of the driver: the free memory of the GPU also depends on other processes."""
    calls: Counter[str] = Counter()

    def counted(name: str, *values: Any) -> None:
        call(name, *values)
        calls[name] += 1

    def is_held() -> bool:
        return calls["cuMemCreate"] > calls["cuMemRelease"]

    call = kv_cache.call
    monkeypatch.setattr(kv_cache, "call", counted)
    model = small_decoder(small_spec("qwen2", head_dim=64, max_length=160), seed=1)
    asked = [Request([7 * i + j for j in range(20)], SamplingParams(n=6, max_new_tokens=40), seed=i) for i in range(3)]
    engine = native(model, "cuda", torch.bfloat16, max_batch=8, kv_cache_gib=2.0, sleep_while_training=True)
    size = engine.runner.kv.nbytes
    assert size > GIB
    expected = flat(generate(engine, asked))
    recorded = dict(engine.runner.graphs)  # type: ignore[attr-defined]
    assert is_held()
    for _ in range(3):
        engine.sleep()
        engine.sleep()
        assert not is_held()
        taken = torch.full((size // 4,), float("nan"), device="cuda")  # used by another allocation
        del taken
        torch.cuda.empty_cache()
        assert [c.token_ids for c in flat(generate(engine, asked))] == [c.token_ids for c in expected]
    assert engine.runner.graphs == recorded  # type: ignore[attr-defined]
    del engine
    torch.cuda.empty_cache()
