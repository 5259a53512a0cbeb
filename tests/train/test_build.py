"""Building a run: custom engines, and engine capabilities, which are checked before the run starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.runs import checkpoints

ENGINE = """
from dataclasses import replace

from assay.engine import NativeEngine

MADE = []

def make(model, *, device, dtype, max_batch, max_length, decode, **options):
    MADE.append(sorted(options))
    return NativeEngine(
        model.spec, device=device, dtype=dtype, max_batch=max_batch, max_length=max_length, decode=decode
    )

def without(*names):
    def make_limited(model, **options):
        engine = make(model, **options)
        missing = dict.fromkeys(names, False)
        engine.info = replace(engine.info, capabilities=replace(engine.info.capabilities, **missing))
        if "fingerprint" in names:
            engine.fingerprint = lambda: None
        return engine
    return make_limited

no_logprobs = without("temperature_logprobs")
bare = without("exact_seeds", "fingerprint", "entropy", "kept_mass", "handles", "score", "inflight_updates")
no_kept_mass = without("kept_mass")
number = 3

def raises(model, **options):
    raise RuntimeError("the server does not answer")

def refuses(model, **options):
    from assay.types import UserError
    raise UserError("start the server first")

def incomplete(model, **options):
    return object()
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None, one_thread: None) -> SmallRuns:
    (tmp_path / "my_engine.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    return SmallRuns(tmp_path)


def test_a_run_with_a_custom_engine_equals_one_with_the_engine_that_it_wraps(small: SmallRuns) -> None:
    assert small.train("--name", "own", "--engine.name", "my_engine.py:make") == 0
    assert small.train("--name", "native") == 0
    small.same_run("own", "native", steps=2)
    assert 'name = "my_engine.py:make"' in (small.runs / "own" / "config.toml").read_text()


def test_a_custom_engine_serves_evaluations_and_resumed_runs(small: SmallRuns, capsys: pytest.CaptureFixture) -> None:
    assert small.train("--engine.name", "my_engine.py:make", "--train.steps", 1) == 0
    assert small.resume("small", "--train.steps", 2) == 0
    assert checkpoints.last(small.runs / "small") == 2
    words = ["--eval.final_examples", 2, "--device", "cpu"]
    assert small("eval", "run:small@last", "--engine.name", "my_engine.py:make", *words) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm", "should be 'auto', 'native', 'hf' or your own as file.py:function, not 'vllm'"),
        ("my_engine.py", "file.py:function, not 'my_engine.py'"),
        ("missing.py:make", "there is no file"),
        ("my_engine.py:made", "has no 'made'"),
        ("my_engine.py:number", "my_engine.py:number must be a function that returns an engine; it is 3"),
        ("my_engine.py:raises", "my_engine.py:raises failed to make an engine: RuntimeError: the server does not"),
        ("my_engine.py:refuses", "start the server first"),
        ("my_engine.py:incomplete", "returned no engine: it lacks info, add, step"),
        ("my_engine.py:no_logprobs", "set engine.name to auto"),
    ],
)
def test_an_engine_without_required_capabilities_is_refused_before_the_run_starts(
    small: SmallRuns, capsys: pytest.CaptureFixture, name: str, message: str
) -> None:
    assert small.train("--engine.name", name) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not small.runs.exists()


def test_missing_capabilities_are_reported_once_and_their_metrics_left_out(
    small: SmallRuns, capsys: pytest.CaptureFixture
) -> None:
    assert small.train("--engine.name", "my_engine.py:bare") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        "(exact_seeds)",
        "not verified after a sync",
        "sampling/entropy is left",
        "sampling/kept_mass is left",
    ):
        assert shown.count(words) == 1, shown
    rows = small.metrics()
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 2 and all("sampling/logprob" in row for row in steps)
    assert not any("sampling/entropy" in row or "sampling/kept_mass" in row for row in rows)


def test_only_the_capability_that_is_missing_is_reported(small: SmallRuns, capsys: pytest.CaptureFixture) -> None:
    assert small.train("--engine.name", "my_engine.py:no_kept_mass", "--train.steps", 1) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "sampling/kept_mass is left out" in shown
    assert "exact_seeds" not in shown and "not verified" not in shown and "sampling/entropy is" not in shown
    (step,) = [row for row in small.metrics() if "reward/mean" in row]
    assert step["sampling/entropy"] > 0 and "sampling/kept_mass" not in step


def test_a_warm_start_alone_needs_no_log_probabilities(small: SmallRuns, capsys: pytest.CaptureFixture) -> None:
    words = ["--train.steps", 0, "--sft.steps", 2, "--sft.batch", 4]
    assert small.train("--engine.name", "my_engine.py:no_logprobs", *words) == 0
