"""Real runs that cannot learn or get worse say why, once. Runs that learn, of many kinds, have no cause at all."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from small_run import SmallRuns, mostly_slow

from assay.checks import diagnose_run
from assay.cli.main import main
from assay.runs import Run
from assay.system.memory import host_memory_use

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

calls = 0

def not_finite(logprobs, behaviour, advantages, low, high):
    global calls
    calls += 1
    return logprobs / (calls <= 1), {}  # finite when it is tried before the run

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
    "not_finite": (["--algo.policy_loss", "code.py:not_finite", "--train.max_skipped", "0"], "algo.policy_loss"),
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
    assert small.train("--train.samples", 6, "--reward.function", "code.py:zero", "--train.steps", 1) == 0
    for steps, warnings in ((3, 0), (6, 1), (7, 0)):
        assert small.resume("small", "--train.steps", steps) == 0
        assert capsys.readouterr().out.partition("paired p")[0].count("in all 4 steps") == warnings


def test_memory_that_is_nearly_full_is_reported(
    small: SmallRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 30 kB\n")
    monkeypatch.setattr("assay.training.recorder.host_memory_use", partial(host_memory_use, tmp_path))
    assert small.train("--train.steps", 5) == 0
    causes = {cause.name: cause for cause in diagnose_run(Run.open(small.runs / "small"))}
    assert "97 % of the main memory" in causes["memory_full"].evidence
    assert capsys.readouterr().out.partition("paired p")[0].count("97 % of the main memory") == 1


def test_settings_that_cannot_work_are_named_at_the_start(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--train.steps", 1, "--reward.function", "", "--reward.accuracy", 0, "--optim.lr", 1e-15)
    assert small.train(*given) == 0
    before = capsys.readouterr().out.partition("accuracy before")[0]
    assert "every answer gets the same reward" in before and "optim.lr = 1e-15 is below" in before


DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.toml"
# The demo's task and warm start, with fewer steps.
SFT = ("--train.steps", 0, "--sft.steps", 160, "--eval.final_examples", 100)
RL = (
    *("--train.steps", 30, "--sft.steps", 0, "--train.prompts", 16, "--eval.every", 0, "--save.every", 0),
    *("--eval.final_examples", 300),
)
KINDS: dict[str, tuple[object, ...]] = {
    "kl": ("--algo.kl_coef", 0.04),
    "dapo": ("--algo.recipe", "dapo"),
    "ppo": ("--algo.recipe", "ppo", "--critic.lr", 1e-3),
    "qlora": ("--lora.rank", 8, "--lora.quantize", "nf4", "--optim.lr", 5e-3),
    "replay": ("--replay.groups", 8),
}
ENVIRONMENT = """
model = "preset:nano"
device = "cpu"
env = {name = "guess", max_tokens = 3, args = {high = 4, tries = 3}}
sampling.max_new_tokens = 9
train = {steps = 40, prompts = 16, samples = 4}
optim.lr = 2e-3
eval.final_examples = 200
reward.workers = 0
"""


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model of the demo after its warm start, which RL improves."""
    folder = tmp_path_factory.mktemp("warm")
    assert main(["train", str(DEMO), "--name", "warm", "--runs_dir", str(folder), *map(str, SFT)]) == 0
    return f"run:{folder}/warm@last"


@pytest.fixture(autouse=True)
def without_pictures(no_curves: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(folder: Path, name: str, output: str) -> None:
    run = Run.open(folder / name)
    assert diagnose_run(run) == [] and "diagnosis" not in run.read_summary()
    warnings = [line for line in output.splitlines() if "warning: " in line]
    assert all("evaluation before training: " in line for line in warnings), output  # of an untrained model


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_learns_has_no_cause(
    kind: str, warm_start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = [*KINDS].index(kind)
    words = ["train", DEMO, "--model", warm_start, "--name", "run", "--runs_dir", tmp_path, "--seed", seed]
    assert main([*map(str, (*words, *RL, *KINDS[kind]))]) == 0
    check(tmp_path, "run", capsys.readouterr().out)


@pytest.mark.slow
def test_supervised_fine_tuning_has_no_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train", DEMO, "--name", "run", "--runs_dir", tmp_path, *SFT, "--sft.steps", 120)
    assert main([*map(str, words)]) == 0
    check(tmp_path, "run", capsys.readouterr().out)


@pytest.mark.slow
def test_an_environment_has_no_cause(small: SmallRuns, capsys: pytest.CaptureFixture[str]) -> None:
    small.config.write_text(ENVIRONMENT)
    assert small.train() == 0
    check(small.runs, "small", capsys.readouterr().out)
