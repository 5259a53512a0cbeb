"""A whole decoding step in kernels, as it is captured on CUDA, compared with the same step in torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from engine_parts import UNUSUAL_SPECS, assert_same_tokens, random_prompts, small_decoder, small_spec

from assay.engine import NativeEngine, Request, SamplingParams, generate
from assay.engine.native.network import TritonOperations
from assay.engine.native.runner import GraphRunner, StepKind, sizes_up_to
from assay.models.decoder import Decoder, rope_tables


class SteppedRunner(GraphRunner):
    """Runs each step instead of replaying a graph: the interpreter cannot capture graphs."""

    def __init__(self, engine: NativeEngine, window: int, splits: int) -> None:
        torch_pool, torch.cuda.graph_pool_handle = torch.cuda.graph_pool_handle, lambda: None  # type: ignore[assignment]
        try:
            super().__init__(engine.network, engine.rows, engine.runner.kv)
        finally:
            torch.cuda.graph_pool_handle = torch_pool
        self.window, self.splits = window, splits
        self.min_shared_blocks = 1

    def decode(self, size: int, steps: int, span: int) -> None:
        rows = next(one for one in self.sizes if one >= size)
        for _ in range(steps):
            self._whole_step(StepKind(rows, self.sharing and self.splits == 1, self.splits))


def kernel_engine(model: Decoder, window: int, splits: int, **options: object) -> NativeEngine:
    engine = NativeEngine(model.spec, device="cpu", dtype=torch.float32, **options)  # type: ignore[arg-type]
    engine.update_weights(model, 0)
    angles = torch.arange(model.spec.max_length)[:, None].float() * rope_tables(model.spec)[:, None]
    engine.network.ops = TritonOperations(model.spec, torch.cat((angles.cos(), angles.sin()), dim=-1))
    engine.runner = SteppedRunner(engine, window, splits)
    return engine


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CUDA tests run the captured step itself")
@pytest.mark.parametrize(
    ("family", "splits", "layers", "steps"),
    [
        ("qwen3", 1, 1, 1),
        pytest.param("qwen2", 1, 2, 4, marks=pytest.mark.slow),
        pytest.param("llama", 2, 2, 3, marks=pytest.mark.slow),
        *(pytest.param(family, 1 + i % 2, 2, 2, marks=pytest.mark.slow) for i, family in enumerate(UNUSUAL_SPECS)),
    ],
)
def test_decoding_in_kernels_equals_decoding_in_torch(family: str, splits: int, layers: int, steps: int) -> None:
    """With one split, rows that begin with the same blocks form a prefix group."""
    model = small_decoder(UNUSUAL_SPECS.get(family) or small_spec(family, layers=layers), seed=3)
    plain = SamplingParams(n=2, temperature=1.1, max_new_tokens=steps, stop_token_ids=(1, 2))
    kinds = [
        plain,
        replace(plain, n=1, temperature=0.0),
        replace(plain, n=1, top_k=5, top_p=0.8),
        replace(plain, n=1, min_p=0.2, forbidden_token_ids=(5, 9), min_new_tokens=4),
    ]
    prompts = [list(range(40)), *random_prompts(3, 61, seed=4)]
    requests = [Request(p, kinds[i], seed=i) for i, p in enumerate(prompts)]
    expected_engine = NativeEngine(model.spec, device="cpu", dtype=torch.float32, max_batch=5)
    expected_engine.update_weights(model, 0)
    expected = generate(expected_engine, requests)
    found = generate(kernel_engine(model, window=3, splits=splits, max_batch=5), requests)
    for request, ours, theirs in zip(requests, found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_same_tokens(model, request.prompt_ids, a.token_ids, b.token_ids)
            if a.token_ids == b.token_ids:
                assert a.finish == b.finish
                for name in ("engine_logprobs", "sampling_logprobs", "kept_mass", "entropy"):
                    x, y = (torch.tensor(getattr(one, name)) for one in (a, b))
                    assert torch.allclose(x, y, atol=1e-4), name


def test_graph_sizes_are_few_and_cover_all_row_counts() -> None:
    for rows in (1, 2, 3, 7, 64, 100, 1000, 1024):
        sizes = sizes_up_to(rows)
        assert sizes == sorted(set(sizes)) and sizes[-1] == rows
        assert len(sizes) <= 29
        assert all(b <= 2 * a for a, b in pairwise(sizes))
    steps = [*range(64, 512, 32), *range(512, 1025, 64)]
    assert sizes_up_to(1024) == [1, 2, 4, 8, 16, 32, *steps]
