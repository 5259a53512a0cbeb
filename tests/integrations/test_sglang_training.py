"""Training with the engine sglang and the stand-in server: a shipped config, and weight syncs that are broken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_parts import small_decoder, small_spec
from http_parts import small_server
from sglang_parts import FakeSGLang

ROOT = Path(__file__).resolve().parents[2]
from broken_sync import break_sync  # noqa: E402
from small_run import SmallRuns  # noqa: E402
from sync_parts import Learning  # noqa: E402
from train_parts import tiny_decoder  # noqa: E402

from assay.config import SGLangConfig  # noqa: E402
from assay.engine import make_engine  # noqa: E402
from assay.integrations.sglang import SGLangEngine  # noqa: E402
from assay.models import Lora  # noqa: E402
from assay.models.export import save_model  # noqa: E402
from assay.runs.rollouts import read_rollouts  # noqa: E402
from assay.tasks import make_task  # noqa: E402
from assay.text import word_tokenizer  # noqa: E402

FEW = (
    *("--train.prompts", 4, "--train.samples", 4, "--train.steps", 3, "--sampling.max_new_tokens", 8),
    *("--sampling.temperature", 1.5, "--sft.steps", 0, "--eval.every", 0, "--eval.examples", 1, "--save.every", 0),
    *("--eval.final_examples", 1, "--eval.max_new_tokens", 4, "--device", "cpu", "--engine.dtype", "float32"),
    # Rewards that differ also for a model that solves nothing; at this temperature, lengths differ.
    *("--reward.length", 1.0, "--reward.target_length", 5, "--engine.name", "sglang"),
)


@pytest.fixture
def served() -> Iterator[tuple[SGLangEngine, FakeSGLang]]:
    fake = FakeSGLang(tiny_decoder(3, torch.float32), str, context=2000)
    with small_server(fake) as server:
        settings = {"settings": SGLangConfig(urls=[server.url])}
        options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "max_batch": 8}
        engine = make_engine("sglang", tiny_decoder(0, torch.float32), settings, **options)
        assert isinstance(engine, SGLangEngine)
        yield engine, fake
        engine.close()


def test_the_probe_accepts_good_syncs_and_detects_a_broken_one(served: tuple[SGLangEngine, FakeSGLang]) -> None:
    engine, fake = served
    policy = tiny_decoder(0, torch.float32)
    policy.add_lora(Lora(2, 4.0))
    engine.update_weights(policy, 0)
    learning = Learning(policy, engine=engine)
    gaps = [learning.update() for _ in range(3)]
    assert all(one["sync/probe_gap"] < one["sync/probe_limit"] for one in gaps), gaps
    break_sync(engine, policy, "unmerged")
    steps, text = learning.steps_to_error(4)
    assert steps <= 5 and f"trainer: {engine.servers[0].url}: " in text
    assert fake.refused == []


@pytest.mark.slow
def test_a_shipped_config_trains_with_log_probabilities_of_the_trainer(small: SmallRuns, tmp_path: Path) -> None:
    tokenizer = word_tokenizer(make_task("abacus").words())  # type: ignore[attr-defined]
    spec = small_spec("llama", vocab_size=tokenizer.vocab_size, max_length=256, tied=True)
    save_model(small_decoder(spec), tmp_path / "model", torch.float32, eos_ids=tokenizer.eos_ids)
    tokenizer.save(tmp_path / "model")
    fakes = [FakeSGLang(small_decoder(spec, seed=8), tokenizer.decode, context=280) for _ in range(2)]
    with small_server(fakes[0]) as one, small_server(fakes[1]) as two:
        urls = f'--sglang.urls=["{one.url}", "{two.url}"]'
        assert small("train", ROOT / "configs" / "demo.toml", *FEW, "--model", tmp_path / "model", urls) == 0
    assert [fake.refused for fake in fakes] == [[], []]
    assert all(fake.calls.count("/update_weights_from_disk") == 4 for fake in fakes)  # the first weights, and 3 steps
    trained = 0
    for step in range(1, 4):
        for group in read_rollouts(small.runs / "demo", step):
            for rollout in group.rollouts:
                if rollout.trainer_logprobs is not None:
                    engine = [value for turn in rollout.turns for value in turn.completion.engine_logprobs]
                    assert np.abs(np.asarray(rollout.trainer_logprobs) - engine).max() < 1e-3
                    trained += 1
    assert trained >= 16
    assert sum(row.get("optim/grad_norm", 0) > 0 for row in small.metrics("demo")) >= 2  # the weights have changed
