"""Diagnosis of settings before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns

from assay.build import dry_run
from assay.build.dry_run import diagnose_config
from assay.checks import Diagnosis
from assay.config import TrainConfig
from assay.config.settings import load_settings


def config(tmp_path: Path, **changes: Any) -> TrainConfig:
    small = SmallRuns(tmp_path)
    settings = {"reward.function": "", "train.prompts": 64, "train.samples": 4, **changes}
    return load_settings(TrainConfig, small.config, settings)


def names(causes: list[Diagnosis]) -> list[tuple[str, str]]:
    return [(cause.name, cause.severity) for cause in causes]


def test_a_config_that_can_train_has_no_causes(tmp_path: Path) -> None:
    assert diagnose_config(config(tmp_path)) == []


CASES: dict[str, tuple[dict[str, Any], list[tuple[str, str]], str]] = {  # overrides, causes, part of the first one
    "one sample": ({"train.samples": 1}, [("zero_loss", "error")], "batch_mean"),
    "no reward": ({"reward.accuracy": 0.0}, [("zero_loss", "error")], "reward.accuracy"),
    "high rate": ({"optim.lr": 5.0}, [("learning_rate_high", "warning")], "0.3M parameters"),
    "nothing is trained": ({"lora.quantize": "nf4"}, [("refused", "error")], "lora.rank"),
    "unknown task": ({"task.name": "abacas"}, [("refused", "error")], "abacus"),
    "unknown model": ({"model.source": "preset:nanoo"}, [("refused", "error")], "nano"),
    "truncated sampling": ({"sampling.top_k": 5}, [("risky_setting", "note")], "top_k"),
    "no effect": ({"env.max_steps": 5}, [("unused_setting", "note")], "env.max_steps"),
    "two": (
        {"optim.lr": 1e-12, "train.steps": 5, "optim.warmup": 9},
        [("learning_rate_low", "warning")],
        "optim.lr = 1e-12 is below",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_that_cannot_train_or_do_harm_are_named(name: str, tmp_path: Path) -> None:
    changes, expected, text = CASES[name]
    causes = diagnose_config(config(tmp_path, **changes))
    assert names(causes) == expected and text in str(causes[0])


def test_problems_in_both_splits_and_a_broken_judge_are_found(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    for split, part in (("train", rows), ("validation", rows[:3]), ("test", [*rows[:4], rows[0] | {"question": "x"}])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    given = {"task.name": "jsonl", "task.path": str(tmp_path), "task.args": {}}
    (tmp_path / "code.py").write_text("def broken(completion, answer):\n    raise ValueError('no')\n")
    causes = diagnose_config(config(tmp_path, **given, **{"reward.function": f"{tmp_path}/code.py:broken"}))
    assert [cause.name for cause in causes] == ["judge_fails", "leakage"]
    assert "4 of the 5 test problems" in causes[1].evidence and "3 of the 3 validation" in causes[1].evidence


def test_a_model_that_does_not_fit_into_memory_is_found_without_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    monkeypatch.setattr(dry_run, "free_memory", lambda device: 64 * 2**30)
    (cause,) = diagnose_config(config(tmp_path, **{"model.source": str(folder), "optim.lr": 1e-6}))
    # 6.7 billion weights: 16 bytes for training, 4 for the engine in float32.
    assert cause.name == "memory_full" and "64.0 GiB are free" in cause.evidence and "125.8 GiB" in cause.evidence
    assert "lora.rank (now 0)" in cause.remedy
    assert not diagnose_config(config(tmp_path, **{"model.source": str(folder), "optim.lr": 1e-6, "lora.rank": 8}))
