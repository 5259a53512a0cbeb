"""What the microbenchmark of a dry run measures, on a real run: work that equals that of the run, and usable speeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns

from assay.build.cost import Speeds, Work, predict
from assay.build.dry_run import group_tokens, measure
from assay.build.run import assemble
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.engine.base import SamplingParams
from assay.models import fingerprint
from assay.runs.console import Console
from assay.runs.directory import read_metrics
from assay.runs.rollouts import read_rollouts
from assay.training.learner.pack import Row, pack
from assay.training.parallel import start_mesh
from assay.training.run import TrainingRun


def built(folder: Path, settings: Mapping[str, Any]) -> TrainingRun:
    cfg = load_settings(TrainConfig, SmallRuns(folder).config, settings)
    return assemble(cfg, Console(quiet=True), "preset:nano", start_mesh(cfg), 0.0)


def measured(run: TrainingRun) -> tuple[Speeds, Work]:
    with run.collector:
        return measure(run, run.source.prompts.next(4), start_s=1.5)


def test_a_measurement_changes_no_weights_and_predicts_a_positive_time(tmp_path: Path) -> None:
    run = built(tmp_path, {})
    before = fingerprint(run.learner.policy.named_parameters())
    speeds, work = measured(run)
    assert fingerprint(run.learner.policy.named_parameters()) == before == run.collector.engine.fingerprint()
    assert min(speeds.position.at(1), speeds.judge.at(1), speeds.update.at(1), speeds.sync) > 0
    cost = predict(work, speeds)
    assert 0 < cost.step < 60 and cost.total > 1.5 + work.steps * cost.step


def test_the_work_is_that_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers always reach their limit here. The run says how many evaluations and tokens it had."""
    settings = {"train.steps": 4, "eval.every": 2, "save.every": 2, "save.keep": 1, "save.best": False}
    _, work = measured(built(tmp_path, settings))
    small = SmallRuns(tmp_path)
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value).lower())]
    assert small.train("--name", "run", *words) == 0, capsys.readouterr().err
    path = small.runs / "run"
    assert work.steps * work.prompts * work.samples == 4 * len(read_rollouts(path, 1)) * 3
    evaluations = sum(part.times for part in work.evaluations)
    assert evaluations == sum("time/eval" in row for row in read_metrics(path))
    assert {part.problems for part in work.evaluations} == {4, 5}
    assert work.kept == len(list((path / "checkpoints").glob("step-*")))
    weights = (path / "checkpoints" / "step-000004" / "model" / "model.safetensors").stat().st_size
    assert work.checkpoint_bytes == pytest.approx(3 * weights, rel=0.05)  # and two moments


def test_tokens_of_an_update_are_those_of_its_packed_rows(tmp_path: Path) -> None:
    """The trainer computes the shared prompt of a group once."""
    run = built(tmp_path, {"train.samples": 3})
    with run.collector:
        params = SamplingParams(n=3, max_new_tokens=6)
        (group,) = run.collector.collect(run.source.prompts.next(1), params, (0, 0))
    rows = [Row.of(rollout, 1.0, ()) for rollout in group.rollouts]
    batch = pack(rows, "cpu")
    assert sum(batch.shared) > 0 and group_tokens(group) == sum(batch.lengths) - sum(batch.shared)


def test_observations_of_an_environment_are_counted(tmp_path: Path) -> None:
    settings = {"task.name": "", "env.name": "guess", "env.args.high": 4, "env.args.tries": 2, "env.max_tokens": 1}
    _, work = measured(built(tmp_path, {**settings, "reward.function": ""}))
    assert work.observed > 0 and work.answers.mean <= 2
