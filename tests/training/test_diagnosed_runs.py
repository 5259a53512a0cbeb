"""Real runs that cannot learn, get worse, or have a problem of data or machine: each says why. Healthy runs do not."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from small_run import SmallRuns, mostly_slow

from assay.checks import Diagnosis, diagnose_run
from assay.runs import Run
from assay.system.memory import host_memory_use

CODE = """
import itertools
import random

from assay.engine import NativeEngine
from assay.envs import Env

class Masking(Env):
    name = "masking"

    def reset(self, *, seed=None, options=None):
        return f"state {seed}", {}

    def step(self, action):
        return "", sum(map(ord, action)) % 4 / 3, True, False, {"masked": True}

def zero(completion, answer):
    return 0.0

def one(completion, answer):
    return 1.0

def unreadable(completion, answer):
    return {"reward": 0.0, "status": "no_answer"}

def by_question(completion, answer):
    return float(int(answer) % 2)

def broken_mostly(completion, answer):
    rest = sum(map(ord, completion)) % 7
    return 1 / (rest < 2) - rest

def no_gradient(logprobs, behaviour, advantages, low, high):
    return 0 * logprobs, {}

def not_finite(logprobs, behaviour, advantages, low, high):
    return logprobs / 0, {}

draw, coin = random.Random(0), itertools.cycle([0.0, 1.0])

def noise(completion, answer):
    return next(coin)

def seldom(completion, answer):
    return float(draw.random() < 0.01)

def imitate(logprobs, behaviour, advantages, low, high):
    return -logprobs, {}

class Unverified(NativeEngine):
    def fingerprint(self):
        return None

class Stale(Unverified):
    def update_weights(self, source, version):
        super().update_weights(source if version == 0 else self.first, version)
        self.first = getattr(self, "first", None) or Copy(source)

class Copy:
    def __init__(self, source):
        self.saved = [(name, weight.detach().clone()) for name, weight in source.weights()]

    def weights(self):
        return iter(self.saved)

class Imprecise(NativeEngine):
    def step(self, wait=True):
        events = super().step(wait)
        for logprobs in (event.completion.engine_logprobs for event in events):
            logprobs[:] = [value + draw.gauss(0, 0.4) for value in logprobs]
        return events

def stale(model, **options):
    return Stale(model.spec, **options)

def imprecise(model, **options):
    return Imprecise(model.spec, **options)
"""
ENOUGH = ("--train.steps", 5, "--train.samples", 6, "--train.prompts", 3)  # 90 answers
LONG = ("--sampling.max_new_tokens", 60, "--model.max_length", 128)  # random models end most answers before
OWN_ENV = ["--task", "", "--task.args", "{}", "--model.tokenizer", "characters", "--reward.function", ""]
RUNS: dict[str, tuple[list[str], str]] = {  # by cause; options, and a key or word of the remedy
    "truncated": (
        ["--reward.function", "code.py:zero", "--sampling.max_new_tokens", "2"],
        "sampling.max_new_tokens (now 2)",
    ),
    "too_easy": (["--reward.function", "code.py:one"], "harder problems"),
    "no_answer": (["--reward.function", "code.py:unreadable", *map(str, LONG)], "reward.extract"),
    "equal_in_groups": (["--reward.function", "code.py:by_question", *map(str, LONG)], "train.samples (now 6)"),
    "judge_fails": (["--reward.function", "code.py:broken_mostly"], "reward.timeout_s"),
    "zero_gradient": (["--algo.policy_loss", "code.py:no_gradient"], "algo.policy_loss"),
    "not_finite": (["--algo.policy_loss", "code.py:not_finite", "--train.max_skipped", "0"], "optim.lr"),
    "masked by the environment": (["--env", "code.py:Masking", *OWN_ENV], "info['masked']"),
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> SmallRuns:
    (tmp_path / "code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return SmallRuns(tmp_path)


@pytest.mark.parametrize("name", mostly_slow(RUNS, quick=["truncated"]))
def test_a_run_that_cannot_learn_says_why_once_while_it_runs_and_again_at_its_end(
    name: str, small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    options, remedy = RUNS[name]
    assert small.train(*ENOUGH, *options) == (2 if name == "not_finite" else 0)
    output = capsys.readouterr().out
    (stored,) = small.summary()["diagnosis"]
    cause = name.partition(" ")[0]
    assert stored["name"] == cause and remedy in stored["remedy"]
    during, _, end = output.partition("paired p")
    assert during.count(stored["remedy"]) == 1 and "in all 4 steps" in during
    assert stored["evidence"] in end and stored["remedy"] in end
    assert ("assay chat" in output) == (cause == "too_easy")
    assert [found.name for found in diagnose_run(Run.open(small.runs / "small"))] == [cause]


@pytest.mark.slow
def test_updates_without_effect_on_any_evaluated_answer_are_reported_at_the_end(
    small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights change, but by too little to change an answer."""
    more = ("--task.args", "{train_size = 24, eval_size = 30}", "--eval.final_examples", 30, "--optim.lr", 1e-12)
    assert small.train(*more) == 0
    (stored,) = small.summary()["diagnosis"]
    assert stored["name"] == "no_change" and "optim.lr (now 1e-12)" in stored["remedy"]
    assert f"what to change: {stored['remedy']}" in capsys.readouterr().out
    assert all(row["weights/changed"] for row in small.metrics() if "reward/mean" in row)


@pytest.mark.slow
def test_a_resumed_run_counts_the_steps_before_and_repeats_no_warning(
    small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--train.samples", 6, "--reward.function", "code.py:zero")
    for steps, warnings in ((3, 0), (6, 1), (7, 0)):
        assert (
            small.train(*given, "--train.steps", 3) if steps == 3 else small.resume("small", "--train.steps", steps)
        ) == 0
        assert capsys.readouterr().out.partition("paired p")[0].count("in all 4 steps") == warnings


STEPS = ("--train.steps", 30, "--train.prompts", 4, "--train.samples", 4)
NOISE = ("--reward.function", "code.py:noise")
IMITATE = ("--algo.policy_loss", "code.py:imitate")
WORSE: dict[str, tuple[tuple[object, ...], str]] = {  # by cause: options, and a part of the remedy
    "entropy_collapse": (
        (*NOISE, *IMITATE, "--optim.lr", 1e-2, "--train.steps", 50),
        "optim.lr (now 0.01)",
    ),
    "always_clipped": (
        (*NOISE, "--train.passes", 4, "--algo.clip_low", 1e-4, "--algo.clip_high", 1e-4),
        "algo.clip_low (now 0.0001)",
    ),
    "few_useful_groups": (
        ("--reward.function", "code.py:seldom", "--train.prompts", 20, "--train.samples", 2),
        "train.samples (now 2)",
    ),
    "mismatch": (("--engine.name", "code.py:imprecise", "--train.steps", 5, "--train.samples", 6), "algo.correction"),
    "stale_weights": (
        ("--engine.name", "code.py:stale", "--engine.verify", "off", "--optim.lr", 1e-2),
        "engine.verify (now off)",
    ),
}


def found(small: SmallRuns, name: str = "small") -> dict[str, Diagnosis]:
    return {cause.name: cause for cause in diagnose_run(Run.open(small.runs / name))}


@pytest.mark.parametrize("name", mostly_slow(WORSE, quick=[]))
def test_a_run_that_gets_worse_is_warned_once(name: str, small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    options, remedy = WORSE[name]
    assert small.train(*STEPS, *options) == 0
    output = capsys.readouterr().out
    causes = found(small)
    assert list(causes) == [name] and remedy in causes[name].remedy
    during = output.partition("paired p")[0]
    warnings = [line for line in during.splitlines() if line.startswith("warning: ") and remedy in line]
    assert len(warnings) == 1
    stored = {cause["name"]: cause for cause in small.summary()["diagnosis"]}
    assert name in stored and stored[name]["remedy"] == causes[name].remedy


def test_memory_that_is_nearly_full_is_reported(
    small: SmallRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 30 kB\n")
    monkeypatch.setattr("assay.training.recorder.host_memory_use", partial(host_memory_use, tmp_path))
    assert small.train("--train.steps", 5) == 0
    assert "97 % of the main memory" in found(small)["memory_full"].evidence
    assert capsys.readouterr().out.partition("paired p")[0].count("97 % of the main memory") == 1


def test_settings_that_cannot_work_are_named_at_the_start(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--train.steps", 1, "--reward.function", "", "--reward.accuracy", 0, "--optim.lr", 1e-15)
    assert small.train(*given) == 0
    before = capsys.readouterr().out.partition("accuracy before")[0]
    assert "every answer gets the same reward" in before and "optim.lr = 1e-15 is below" in before
