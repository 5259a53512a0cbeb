"""Metrics of how tokens were sampled, from completions of the native engine."""

from __future__ import annotations

import pytest
import torch

from assay.config import TrainConfig
from assay.engine import SamplingParams, make_engine
from assay.models import build_preset
from assay.rewards import JudgePool
from assay.rollout import Collector
from assay.tasks import make_task
from assay.text import Renderer, word_tokenizer
from assay.train.components import build_algorithm
from assay.train.recorder import rollout_metrics
from assay.train.sources import SampledGroups

TASK = make_task("abacus", eval_size=8)


@pytest.mark.parametrize("top_k", [0, 3])
def test_truncation_kl_is_the_mean_log_of_the_kept_mass_and_absent_without_truncation(top_k: int) -> None:
    tokenizer = word_tokenizer(TASK.words())  # type: ignore[attr-defined]
    policy, renderer = build_preset("nano", tokenizer.vocab_size, 64, seed=3), Renderer(tokenizer)
    engine = make_engine("native", policy, device="cpu", dtype=torch.float32, decode=renderer.decode)
    collector = Collector(engine, renderer, JudgePool(TASK.judge(), 0, 5.0))
    groups = collector.collect(TASK.prompts("test")[:3], SamplingParams(n=2, max_new_tokens=6, top_k=top_k), (0, 0))
    metrics = rollout_metrics(SampledGroups(groups), build_algorithm(TrainConfig()), engine.info.capabilities)
    if not top_k:
        assert "sampling/truncation_kl" not in metrics and metrics["sampling/kept_mass"] == 1.0
        return
    logs = []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        ids = torch.tensor(rollout.token_ids)
        with torch.no_grad():
            logits = policy.unembed(policy.hidden(ids, [len(ids)])).double()
        kept = logits.softmax(-1).topk(top_k, dim=-1).values.sum(-1)
        logs += (-kept[len(rollout.turns[0].context_ids) - 1 : -1].log()).tolist()
    assert metrics["sampling/truncation_kl"] == pytest.approx(sum(logs) / len(logs), abs=1e-4)
