"""The runner: block copies, scores, precision, and which memory a decoding step writes to and keeps."""

from __future__ import annotations

import gc

import pytest
import torch
from engine_parts import greedy_by_transformers, random_prompts, small_decoder, small_spec
from native_parts import MODES, SPECS, Mode, engine_for, mixed_prompts, requests_for, transformers_model
from torch import Tensor

from assay.engine import SamplingParams, generate
from assay.engine.sequence import BLOCK_SIZE


def test_copy_copies_blocks_of_all_layers_and_no_others() -> None:
    engine = engine_for(small_decoder(SPECS["qwen3"]), Mode(max_batch=2))
    kv = engine.runner.kv.normal_(generator=torch.Generator().manual_seed(0))
    before = kv.clone()
    engine.runner.copy([(1, 4), (3, 0)])
    before[:, :, :, [4, 0]] = before[:, :, :, [1, 3]]
    assert torch.equal(kv, before)


@pytest.mark.parametrize("mode", ["plain", "all at once"])
def test_decoding_writes_only_to_unshared_blocks(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(small_decoder(SPECS["qwen3"], seed=21), MODES[mode])
    step, cache = engine.runner._step, engine.runner.kv
    written = []

    def note(size: int, span: int) -> None:
        before = cache.clone()
        step(size, span)
        changed = (cache != before).any(-1).any(-1).flatten(0, 2).any(0)[:-1]  # no sequence uses the last block
        blocks = changed.nonzero()[:, 0].tolist()
        assert all(engine.blocks.ref_counts[block] <= 1 and block not in engine.blocks.keys for block in blocks)
        written.append(len(blocks))

    monkeypatch.setattr(engine.runner, "_step", note)
    prompts = [prompt for prompt in mixed_prompts(seed=5) if len(prompt) >= BLOCK_SIZE]
    generate(engine, requests_for(prompts, SamplingParams(n=3, max_new_tokens=20)))
    assert len(written) == engine.stats.decode_steps and max(written) > 1


@pytest.mark.slow
def test_logits_are_freed_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 509  # different from all other sizes
    model = small_decoder(small_spec(vocab_size=vocabulary, tied=False), seed=3)
    engine = engine_for(model, Mode(max_batch=5, window=3, ahead=1))
    tables: list[int] = []
    step = engine.runner._step

    def alive() -> int:
        return sum(1 for x in gc.get_objects() if type(x) is Tensor and x.dim() and x.shape[-1] == vocabulary)

    def look(size: int, span: int) -> None:
        """Count logits of earlier steps that are still alive when a step begins."""
        tables.append(alive() - weights)
        step(size, span)

    weights = alive()  # weights may be stored by columns
    monkeypatch.setattr(engine.runner, "_step", look)
    params = SamplingParams(n=4, top_p=0.9, max_new_tokens=5, forbidden_token_ids=(1,))
    generate(engine, requests_for(random_prompts(3, vocabulary, seed=1), params))
    assert len(tables) == engine.stats.decode_steps > 5 and not any(tables)


def test_a_float64_engine_computes_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_decoder(SPECS["qwen3"], seed=21).double()
    prompt = mixed_prompts()[1]
    engine = engine_for(model, Mode(prefill_tokens=7, window=3, ahead=1), dtype=torch.float64)
    logits: list[Tensor] = []
    unembed = engine.network.unembed

    def note(hidden: Tensor) -> Tensor:
        logits.append(unembed(hidden))
        return logits[-1]

    monkeypatch.setattr(engine.network, "unembed", note)
    for temperature in (0.0, 1.0, 0.7):
        logits.clear()
        params = SamplingParams(temperature=temperature, max_new_tokens=20)
        (completion,) = generate(engine, requests_for([prompt], params))[0]
        with torch.no_grad():
            ids = torch.tensor([*prompt, *completion.token_ids])
            exact = model.unembed(model.hidden(ids, [len(ids)]))[len(prompt) - 1 : -1]
        assert exact.dtype == torch.float64 and (torch.cat(logits)[:20] - exact).abs().max() < 1e-9
        logprobs = (exact / (temperature or 1.0)).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        ours = torch.tensor(completion.engine_logprobs, dtype=torch.float64)
        assert (ours - logprobs).abs().max() < 1e-9
        if temperature == 0:
            hf = transformers_model(model.spec, small_decoder(SPECS["qwen3"], seed=21)).double()
            assert completion.token_ids == greedy_by_transformers(hf, prompt, 20, ())
