"""Weight sync with verification, and the evaluations of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_run import SmallRuns, gpt2_folder
from train_parts import tiny_decoder

from assay.engine import WeightSource, make_engine
from assay.engine.native.engine import NativeEngine
from assay.runs.rollouts import read_lines
from assay.train.evaluation import sync_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sync_copies_all_weights_and_sets_the_version(dtype: torch.dtype) -> None:
    first, second = tiny_decoder(0, torch.float32), tiny_decoder(1, torch.float32)
    engine = make_engine("native", first, device="cpu", dtype=dtype)
    before = engine.fingerprint()
    sync_weights(second, engine, version=7)
    assert engine.info.version == 7 and engine.fingerprint() != before
    sync_weights(first, engine, version=8)
    assert engine.fingerprint() == before
    with torch.no_grad():
        next(first.parameters()).add_(1.0)
    assert engine.fingerprint() == before  # copied, not shared


class Forgetful(NativeEngine):
    """Changes one value of one weight."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        super().update_weights(source, version)
        with torch.no_grad():
            weight = list(self.network.canonical().values())[-1]
            weight[(0,) * weight.dim()] += 1.0


class Deaf(NativeEngine):
    """Ignores updates of the weights."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        if self.info.version < 0:
            super().update_weights(source, version)
        self.info = replace(self.info, version=version)


@pytest.mark.parametrize("kind", [Forgetful, Deaf])
def test_sync_raises_if_the_engine_serves_other_weights(kind: type[NativeEngine]) -> None:
    policy = tiny_decoder(0, torch.float32)
    engine = kind(policy.spec, device="cpu", dtype=torch.float32)
    engine.update_weights(policy, 0)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.01)
    with pytest.raises(RuntimeError, match="differ from those of the trainer"):
        sync_weights(policy, engine, version=1)


@pytest.fixture
def small(tmp_path: Path, no_curves: None) -> SmallRuns:
    return SmallRuns(tmp_path)


def test_every_evaluation_writes_its_answers(small: SmallRuns) -> None:
    assert small.train("--eval.every", 1) == 0
    path = small.runs / "small"
    assert len(read_lines(path, 0, "eval", "before-test")) == 5
    assert len(read_lines(path, 1, "eval", "eval-validation")) == 4
    after = read_lines(path, 2, "eval", "after-test")
    right = sum(line["verdict"]["status"] == "ok" for line in after)
    assert small.summary()["after"]["accuracy"] == right / 5
    assert json.loads((path / "environment.json").read_text())["versions"]["torch"]


def test_several_samples_per_problem_give_pass_at_k(small: SmallRuns) -> None:
    assert small.train("--eval.samples", 3, "--eval.temperature", 1) == 0
    after = small.summary()["after"]
    assert after["samples"] == 3 and set(after["pass_at_k"]) == {"1", "2", "3"} == set(after["majority_at_k"])
    assert after["pass_at_k"]["1"] == pytest.approx(after["accuracy"])
    assert after["pass_at_k"]["1"] <= after["pass_at_k"]["2"] <= after["pass_at_k"]["3"]
    assert any("eval/pass@3" in row for row in small.metrics())


@pytest.mark.slow
def test_a_pretrained_model_is_also_evaluated_before_its_warm_start(small: SmallRuns) -> None:
    warm = ("--sft.steps", 60, "--sft.batch", 8, "--sft.lr", 1e-2)
    warm = (*warm, "--reward.function", "", "--sampling.max_new_tokens", 30)
    assert small.train(*warm, "--name", "fresh") == 0
    assert "before" not in small.summary("fresh")["sft"]  # of a fresh model there is nothing to know
    folder = gpt2_folder(small.folder / "gpt2")
    assert small.train(*warm, "--model", folder) == 0
    summary, rows = small.summary(), small.metrics()
    start, before = (next(row for row in rows if f"{label}/accuracy" in row) for label in ("start", "before"))
    assert rows.index(start) < next(i for i, row in enumerate(rows) if "sft/loss" in row) < rows.index(before)
    assert summary["sft"]["before"]["n"] == summary["before"]["n"] == 5
    assert summary["sft"]["before"]["accuracy"] == start["start/accuracy"] and start["start/format"] == 0
    assert before["before/format"] > 0  # the warm start taught the form
    assert summary["sft"]["paired"]["gained"] - summary["sft"]["paired"]["lost"] == round(5 * before["before/accuracy"])
    assert len(read_lines(small.runs / "small", 0, "eval", "start-test")) == 5
