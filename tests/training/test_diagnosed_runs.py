"""Real runs that cannot learn: each says why while it runs and at its end. Healthy runs say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import SmallRuns, mostly_slow

from assay.checks import diagnose_run
from assay.runs import Run

CODE = """
from assay.envs import Env

class Masking(Env):
    name = "masking"

    def reset(self, *, seed=None, options=None):
        return f"state {seed}", {}

    def step(self, action):
        return "", sum(map(ord, action)) % 4 / 3, True, False, {"masked": True}

def zero(completion, answer):
    return 0.0

def half(completion, answer):
    return 0.5

def one(completion, answer):
    return 1.0

def unreadable(completion, answer):
    return {"reward": 0.0, "status": "no_answer"}

def by_question(completion, answer):
    return float(int(answer) % 2)

def broken_mostly(completion, answer):
    rest = sum(map(ord, completion)) % 7
    return 1 / (rest < 2) - rest

def no_advantage(rewards):
    return [0 * rewards_G for rewards_G in rewards]

def no_gradient(logprobs, behaviour, advantages, low, high):
    return 0 * logprobs, {}

def not_finite(logprobs, behaviour, advantages, low, high):
    return logprobs / 0, {}
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
    "never_rewarded": (["--reward.function", "code.py:zero", *map(str, LONG)], "reward.function"),
    "equal_rewards": (["--reward.function", "code.py:half", *map(str, LONG)], "reward.function"),
    "equal_in_groups": (["--reward.function", "code.py:by_question", *map(str, LONG)], "train.samples (now 6)"),
    "judge_fails": (["--reward.function", "code.py:broken_mostly"], "reward.timeout_s"),
    "zero_advantages": (["--algo.advantage", "code.py:no_advantage"], "algo.advantage"),
    "zero_gradient": (["--algo.policy_loss", "code.py:no_gradient"], "algo.policy_loss"),
    "not_finite": (["--algo.policy_loss", "code.py:not_finite", "--train.max_skipped", "0"], "optim.lr"),
    "tiny_updates": (["--optim.lr", "1e-30"], "optim.lr (now 1e-30)"),
    "masked": (
        ["--algo.mask_overlong", "true", "--sampling.max_new_tokens", "2", "--sampling.min_new_tokens", "2"],
        "sampling.max_new_tokens (now 2), or set algo.mask_overlong = false",
    ),
    "masked by the environment": (["--env", "code.py:Masking", *OWN_ENV], "info['masked']"),
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> SmallRuns:
    (tmp_path / "code.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
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
def test_a_resumed_run_counts_the_steps_before(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--train.samples", 6, "--reward.function", "code.py:zero")
    assert small.train("--train.steps", 3, *given) == 0
    assert "warning: " not in capsys.readouterr().out.partition("paired p")[0]
    assert small.resume("small", "--train.steps", 6) == 0
    assert "in all 4 steps" in capsys.readouterr().out
