"""The best throughput of runs with the same work on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from metric_rows import steps

from assay.checks import diagnose_run
from assay.checks.results import record_speed
from assay.runs import Run
from assay.runs.reading import RunFiles

CONFIG = '[model]\nsource = "preset:nano"\n[train]\nsamples = {samples}\n'


def make_run(folder: Path, name: str, speed: float, samples: int = 4, seconds: float = 2.0) -> Run:
    run = Run.create(folder, name, CONFIG.format(samples=samples))
    rows = steps(8, {"time/tokens_per_s": speed, "time/generate": seconds})
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.close()
    return run


def record(run: Run) -> None:
    record_speed(run.path, RunFiles(run.path).metrics(), RunFiles(run.path).config())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_run_is_compared_with_the_best_one_of_the_same_work(tmp_path: Path) -> None:
    for name, speed in (("first", 800.0), ("best", 1000.0), ("other", 900.0)):
        record(make_run(tmp_path, name, speed))
    (cause,) = diagnose_run(make_run(tmp_path, "slow", 200.0))
    assert cause.name == "slow" and "1,000 in run best" in cause.evidence and "200 tokens" in cause.evidence
    assert not diagnose_run(make_run(tmp_path, "half", 500.0))
    assert not diagnose_run(make_run(tmp_path, "other-work", 200.0, samples=8))


def test_runs_of_other_machines_are_not_compared(tmp_path: Path) -> None:
    record(make_run(tmp_path, "best", 1000.0))
    slow = make_run(tmp_path, "slow", 200.0)
    assert diagnose_run(slow)
    file = slow.path / "environment.json"
    content = json.loads(file.read_text())
    content["machine"]["host"] = "elsewhere"
    file.write_text(json.dumps(content))
    assert not diagnose_run(slow)
    file.unlink()
    assert not diagnose_run(slow)


def test_short_steps_are_not_recorded_and_a_missing_cache_is_no_error(tmp_path: Path, cache: Path) -> None:
    record(make_run(tmp_path, "short", 1000.0, seconds=0.1))
    assert not cache.exists()
    cache.write_text("not a folder")
    record(make_run(tmp_path, "run", 1000.0))
    assert not diagnose_run(make_run(tmp_path, "slow", 200.0))
