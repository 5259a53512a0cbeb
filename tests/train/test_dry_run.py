"""Memory estimate and checks of a dry run; tests/cli/test_train.py checks the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs.console import Console
from assay.train.build import new_run
from assay.train.dry_run import check_writable, memory_by_purpose
from assay.types import UserError


def sizes(small: SmallRuns, **changes: object) -> tuple[dict[str, float], int]:
    """The estimate, and the number of parameters of the policy."""
    settings = {"runs_dir": str(small.runs), **{key.replace("__", "."): value for key, value in changes.items()}}
    cfg = load_settings(TrainConfig, small.config, settings)
    run = new_run(cfg, Console(quiet=True))
    count = sum(weight.numel() for weight in run.learner.policy.parameters())
    return memory_by_purpose(cfg, run.learner, run.collector.engine, prompt_tokens=20), count


def test_memory_of_weights_gradients_moments_and_engine(tmp_path: Path) -> None:
    plain, count = sizes(SmallRuns(tmp_path))
    assert plain["weights, gradients, AdamW"] == 16 * count  # float32: weights, gradients and two moments
    assert plain["engine's copy of the weights"] == 4 * count
    assert "reference" not in plain and "critic, gradients, AdamW" not in plain
    large, _ = sizes(SmallRuns(tmp_path), algo__kl_coef=0.1, algo__critic=True)
    assert large["reference"] == 4 * count and large["critic, gradients, AdamW"] == 16 * count


def test_memory_grows_with_answers_and_shrinks_with_the_token_budget(tmp_path: Path) -> None:
    small = SmallRuns(tmp_path)
    plain, longer = sizes(small)[0], sizes(small, sampling__max_new_tokens=80)[0]
    assert longer["KV cache"] == pytest.approx(plain["KV cache"] * 100 / 28)
    assert sizes(small, train__token_budget=28)[0]["activations"] == pytest.approx(plain["activations"] / 9)


def test_a_runs_folder_must_be_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is not writable"):
        check_writable(tmp_path / "file" / "runs")
