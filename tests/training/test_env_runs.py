"""Whole runs in environments: training, evaluation, resume, and stored episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import SmallRuns

from assay.runs import checkpoints
from assay.runs.rollouts import read_rollouts
from tests.training.test_resume import Stop, stop_at

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")
GUESS = """
model = "preset:nano"
device = "cpu"
env = {name = "guess", max_tokens = 3, args = {high = 4, tries = 3}}
algo = {step_credit = true, discount = 0.9}
sampling.max_new_tokens = 9
train = {steps = 4, prompts = 3, samples = 4}
optim.lr = 1e-3
eval = {examples = 4, final_examples = 5}
save.every = 2
reward.workers = 0
"""


def runs(folder: Path, config: str) -> SmallRuns:
    small = SmallRuns(folder)
    small.config.write_text(config)
    return small


@pytest.mark.slow
def test_an_environment_run_trains_on_its_steps_and_resumes_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = runs(tmp_path, GUESS)
    assert small.train() == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(Stop):
            small.train("--name", "stopped")
    assert checkpoints.last(small.runs / "stopped") == 2
    assert small.resume("stopped") == 0
    small.same_run("small", "stopped", 4)
    several = [r for step in range(1, 5) for g in read_rollouts(small.runs / "small", step) for r in g.rollouts]
    several = [rollout for rollout in several if len(rollout.turns) > 1]
    assert several and all(len(r.token_advantages or ()) == r.length for r in several)
    assert any(1 < len(set(r.token_advantages or ())) <= len(r.turns) for r in several)
    assert all(sum(r.loss_mask) == r.length < len(r.token_ids) for r in several)
    rows = [row for row in small.metrics() if "turns/mean" in row]
    assert all(1 < row["turns/mean"] <= 3 for row in rows)
    apart = [row["mismatch/logprob_abs_diff_max"] for row in rows if "mismatch/logprob_abs_diff_max" in row]
    assert len(apart) > 1 and max(apart) < 1e-4
    assert small.summary()["task"] == "guess"
    capsys.readouterr()
    file = tmp_path / "found.json"
    words = ("run:small@0", "run:small@last", "--eval.final_examples", 6, "--json", file)
    assert small("eval", *words) == 0  # its environment comes along
    found = json.loads(file.read_text())
    assert (
        found[0]["n"] == 6 and found[0]["task"] == "guess" and set(found[0]["statuses"]) <= {"ok", "wrong", "no_answer"}
    )
    assert small.resume("small", "--env.max_tokens", 4) == 2
    assert "env.max_tokens" in capsys.readouterr().err


WARMUP = """
from assay.envs.builtin import GuessNumber

class Warmup(GuessNumber):
    def step(self, action):
        first = self.left == self.tries
        *what, info = super().step(action)
        return (*what, info | {"masked": first})
"""


def test_an_environment_masks_turns(tmp_path: Path) -> None:
    small = runs(tmp_path, GUESS)
    (tmp_path / "warmup.py").write_text(WARMUP)
    words = ("--env.name", tmp_path / "warmup.py:Warmup", "--replay.groups", 2, "--train.steps", 3)
    assert small.train(*words) == 0
    found = [r for step in (1, 2, 3) for g in read_rollouts(small.runs / "small", step) for r in g.rollouts]
    assert all([turn.masked for turn in r.turns] == [position == 0 for position in range(len(r.turns))] for r in found)
    assert all(r.loss_mask.count(1) == r.length - len(r.turns[0].completion.token_ids) for r in found)
    rows = [row for row in small.metrics() if "turns/masked" in row]
    assert len(rows) == 3 and all(row["turns/masked"] == pytest.approx(1 / row["turns/mean"]) for row in rows)
    assert sum(row.get("optim/grad_norm", 0) > 0 for row in rows) > 1
    apart = [row["mismatch/logprob_abs_diff_max"] for row in rows if "mismatch/logprob_abs_diff_max" in row]
    assert apart[0] < 1e-4  # later steps have replayed groups in them


SHAKY = """
from assay.envs.builtin import GuessNumber

class Shaky(GuessNumber):
    def step(self, action):
        found = super().step(action)
        if self.secret % 2:
            raise OSError("the line is down")
        return found
"""


@pytest.mark.slow
def test_a_warning_names_what_failed_environment_or_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = runs(tmp_path, GUESS)
    (tmp_path / "shaky.py").write_text(SHAKY)
    few = ("--train.steps", 1, "--train.prompts", 8)
    assert small.train("--env.name", tmp_path / "shaky.py:Shaky", *few) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: the environment failed on some steps (status/error), which are not trained on: OSError" in said
    (tmp_path / "reward.py").write_text(
        "def reward(completion, answer):\n    return 1 / ((1 + sum(map(ord, completion))) % 3)\n"
    )
    words = ("--env.name", "single", "--task", "abacus", "--env.args", "{}", "--env.max_tokens", 0)
    own = ("--reward.function", tmp_path / "reward.py:reward", "--algo.step_credit", "false", "--algo.discount", 1.0)
    assert small.train(*words, *own, *few, "--name", "judged") == 0
    assert "warning: the environment, or its judge, failed on" in " ".join(capsys.readouterr().out.split())
    assert small.train("--env.name", "", *words[2:], *own, *few, "--name", "plain") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: the judge failed on some answers" in said and "which are not trained on: ZeroDivisionError" in said
