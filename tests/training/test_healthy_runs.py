"""Runs that learn, of different kinds and seeds: the doctor finds nothing, neither while they run nor at their end."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.checks import diagnose_run
from assay.cli.main import main
from assay.runs import Run

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo.toml"
# The demo's task and warm start, with fewer steps.
SFT = ("--train.steps", 0, "--sft.steps", 160, "--eval.final_examples", 100)
RL = ("--sft.steps", 0, "--train.prompts", 16, "--eval.every", 0, "--save.every", 0, "--eval.final_examples", 300)
KINDS: dict[str, tuple[object, ...]] = {
    "kl": ("--algo.kl_coef", 0.04),
    "dapo": ("--algo.recipe", "dapo"),
    "ppo": ("--algo.recipe", "ppo", "--critic.lr", 1e-3),
    "qlora": ("--lora.rank", 8, "--lora.quantize", "nf4", "--optim.lr", 5e-3),
    "replay": ("--replay.groups", 8),
}
STEPS = 30
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
    assert "warning: " not in output, output


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_learns_has_no_cause(
    kind: str, warm_start: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = [*KINDS].index(kind)
    words = ["train", DEMO, "--model", warm_start, "--name", "run", "--runs_dir", tmp_path, "--seed", seed]
    assert main([*map(str, (*words, *RL, "--train.steps", STEPS, *KINDS[kind]))]) == 0
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
