"""The native engine and the update on a CUDA device, held against the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from assay.algos import make_algorithm
from assay.engine import make_engine
from assay.engine.base import Request, SamplingParams
from assay.models import build_preset, fingerprint

pytestmark = pytest.mark.gpu


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(n=3, temperature=temperature, max_new_tokens=24)
    return [Request(list(range(5, 9 + 4 * i)), params, seed=i) for i in range(5)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cuda_writes_what_the_cpu_writes_with_the_same_logprobs(temperature: float) -> None:
    model = build_preset("nano", vocab_size=101, max_length=128, seed=0)
    written = []
    for device in ("cpu", "cuda"):
        engine = make_engine("native", model.to(device), device=torch.device(device), dtype=torch.float32, max_batch=8)
        assert engine.fingerprint() == fingerprint(model.weights(), torch.float32)
        written.append([c for group in engine.generate(requests(temperature)) for c in group])
    same = sum(a.token_ids == b.token_ids for a, b in zip(*written, strict=True))
    assert same >= 0.8 * len(written[0])  # a near-tie may fall differently: floating point is not the same on both
    for a, b in zip(*written, strict=True):
        if a.token_ids == b.token_ids:
            assert torch.allclose(torch.tensor(a.engine_logprobs), torch.tensor(b.engine_logprobs), atol=1e-3)


def test_bfloat16_serving_stays_close_to_float32() -> None:
    model = build_preset("nano", vocab_size=101, max_length=128, seed=0).to("cuda")
    engine = make_engine("native", model, device=torch.device("cuda"), dtype=torch.bfloat16, max_batch=8)
    completions = [c for group in engine.generate(requests(1.0)) for c in group]
    for request, group in zip(requests(1.0), [completions[i : i + 3] for i in range(0, 15, 3)], strict=True):
        for completion in group:
            ids = torch.tensor([*request.prompt_ids, *completion.token_ids], device="cuda")
            with torch.no_grad():
                logits = copy.deepcopy(model).unembed(model.hidden(ids, [len(ids)])).log_softmax(-1)
            start = len(request.prompt_ids)
            expected = logits[start - 1 : -1].gather(-1, ids[start:, None])[:, 0].cpu()
            assert (expected - torch.tensor(completion.engine_logprobs)).abs().mean() < 0.1


def test_every_recipe_is_made_of_parts_that_run_on_cuda() -> None:
    from assay.algos import LossBatch

    values = torch.randn(40, device="cuda")
    for name in ("grpo", "dr_grpo", "dapo", "rloo", "simple", "reinforce"):
        algo = make_algorithm(name, max_new_tokens=32)
        logprobs = values.clone().requires_grad_()
        out = algo.loss(LossBatch(logprobs, values, torch.ones_like(values), torch.full_like(values, 0.1)))
        out.total.backward()
        assert logprobs.grad is not None and bool(logprobs.grad.isfinite().all())
