"""Building a run: custom engines, engine capabilities, and the checks and memory estimate of a dry run.

tests/cli/test_train.py checks the command.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import SmallRuns

from assay.build import models as policy_module
from assay.build import run as run_module
from assay.build.cost import memory_by_purpose
from assay.build.run import new_run
from assay.config import TrainConfig
from assay.config.settings import load_settings
from assay.runs import checkpoints
from assay.runs.console import Console
from assay.runs.directory import check_writable
from assay.training.learner.update import Updater
from assay.types import UserError

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


def test_a_custom_engine_serves_evaluations_and_resumed_runs(small: SmallRuns) -> None:
    assert small.train("--engine.name", "my_engine.py:make", "--train.steps", 1) == 0
    assert small.resume("small", "--train.steps", 2) == 0
    assert checkpoints.last(small.runs / "small") == 2
    words = ["--eval.final_examples", 2, "--device", "cpu"]
    assert small("eval", "run:small@last", "--engine.name", "my_engine.py:make", *words) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sglan", "'hf', 'assay', 'vllm', 'sglang', 'openai' or your own as file.py:function, not 'sglan'"),
        ("my_engine.py:number", "my_engine.py:number must be a function that returns an engine; it is 3"),
        ("my_engine.py:raises", "my_engine.py:raises failed to make an engine: RuntimeError: the server does not"),
        ("my_engine.py:refuses", "start the server first"),
        ("my_engine.py:incomplete", "returned no engine: it lacks info, "),
        ("my_engine.py:no_logprobs", "set engine.name to auto"),
    ],
)
def test_an_engine_without_required_capabilities_is_refused_before_the_run_starts(
    small: SmallRuns, refused: Callable[..., str], name: str, message: str
) -> None:
    assert message in refused(small.train("--engine.name", name))
    assert not small.runs.exists()


def test_missing_capabilities_are_reported_once_and_their_metrics_left_out(
    small: SmallRuns, stdout_of: Callable[..., str]
) -> None:
    shown = " ".join(stdout_of(small.train("--engine.name", "my_engine.py:bare")).split())
    for words in ("(exact_seeds)", "not verified", "sampling/entropy is", "sampling/kept_mass is"):
        assert shown.count(words) == 1, shown
    rows = small.metrics()
    steps = [row for row in rows if "reward/mean" in row]
    assert len(steps) == 2 and all("sampling/logprob" in row for row in steps)
    assert not any("sampling/entropy" in row or "sampling/kept_mass" in row for row in rows)


def test_a_warm_start_alone_needs_no_log_probabilities(small: SmallRuns) -> None:
    words = ["--train.steps", 0, "--sft.steps", 2, "--sft.batch", 4]
    assert small.train("--engine.name", "my_engine.py:no_logprobs", *words) == 0


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


@pytest.mark.parametrize(
    ("precision", "offload", "least"), [("8bit", False, 8), ("bfloat16", False, 6), ("8bit", True, 6)]
)
def test_memory_and_checkpoints_by_precision(tmp_path: Path, precision: str, offload: bool, least: float) -> None:
    """Matrices take `least` bytes per number; norms, of which a small model has relatively many, more."""
    settings = {"optim__precision": precision, "optim__offload": offload, "dtype": "bfloat16"}
    found, count = sizes(SmallRuns(tmp_path), **settings)
    assert least * count <= found["weights, gradients, AdamW"] < (least + 0.2) * count


def test_memory_grows_with_answers_and_shrinks_with_the_token_budget(tmp_path: Path) -> None:
    small = SmallRuns(tmp_path)
    plain, longer = sizes(small)[0], sizes(small, sampling__max_new_tokens=80)[0]
    assert longer["KV cache"] == pytest.approx(plain["KV cache"] * 100 / 28)
    assert sizes(small, train__token_budget=28)[0]["activations"] == pytest.approx(plain["activations"] / 9)


@pytest.mark.slow
def test_the_automatic_token_budget_is_saved_and_a_resumed_run_uses_it(
    small: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    updater = run_module.build_updater

    def build_updater(*args: Any) -> Updater:
        used.append(updater(*args))
        return used[-1]

    def saved() -> list[int]:
        run = small.runs / "small"
        folders = [run, small.checkpoint(checkpoints.last(run) or 0)]
        return [load_settings(TrainConfig, folder / "config.toml", {}).train.token_budget for folder in folders]

    monkeypatch.setattr(run_module, "build_updater", build_updater)
    monkeypatch.setattr(policy_module, "cpu_token_budget", lambda *sizes: 64)
    assert small.train("--train.steps", 1) == 0
    assert saved() == [64, 64]
    monkeypatch.setattr(policy_module, "cpu_token_budget", lambda *sizes: 32)  # another machine
    small.lose_summary()
    assert small.train("--train.steps", 1, "--resume", "small") == 0  # the config file names no token budget
    assert small.resume("small", "--train.steps", 2) == 0
    assert saved() == [64, 64] and [one.token_budget for one in used] == [64, 64, 64]
    assert small.resume("small", "--train.steps", 3, "--train.token_budget", 0) == 0
    assert saved() == [32, 32]


def test_a_runs_folder_must_be_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is not writable"):
        check_writable(tmp_path / "file" / "runs")
