"""Losses and gradients that are not finite: updates are skipped and counted, batches dumped, errors reported."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_run import SmallRuns, mostly_slow

from assay.build import cost
from assay.cli.main import main
from assay.runs import checkpoints
from assay.runs.rollouts import read_rollouts
from assay.training.learner.learner import Learner
from assay.training.progress import RunState
from assay.training.run import TrainingRun
from assay.types import Group

pytestmark = pytest.mark.usefixtures("no_curves", "one_thread")

# A loss of one's own that is poisoned for as long as a file lies beside it; steps are told apart by its number.
LOSS = """
from pathlib import Path
import torch
calls = [0]

class PoisonedGradient(torch.autograd.Function):
    forward = staticmethod(lambda context, values: values.clone())
    backward = staticmethod(lambda context, gradient: gradient * float("inf"))

def loss(logprobs, behaviour, advantages, low, high):
    calls[0] += 1
    poison = Path(__file__).with_name("poison").read_text().split()
    if str(calls[0]) in poison[1:] or poison[1:] == ["all"]:
        logprobs = PoisonedGradient.apply(logprobs) if poison[0] == "gradient" else logprobs * float(poison[0])
    return -advantages * logprobs, {}
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallRuns:
    """Its losses are not tried before the run, which counts their calls."""
    monkeypatch.setattr(cost, "has_own_code", lambda cfg: False)
    small = SmallRuns(tmp_path)
    (tmp_path / "loss.py").write_text(LOSS)
    return small


def train(small: SmallRuns, poison: str, *words: object) -> int:
    (small.folder / "poison").write_text(poison)
    changes = ("--algo.policy_loss", f"{small.folder}/loss.py:loss", "--train.steps", 6, "--save.every", 2)
    return small.train(*changes, *words)


def test_a_run_of_which_every_update_was_skipped_is_saved_and_fails(
    small: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(small, "nan all", "--train.steps", 2) == 2
    assert small.summary()["steps"] == checkpoints.last(small.runs / "small") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "every update was skipped, because the loss term 'policy' (nan) was not finite" in error
    assert "fix it" in error and "optim.lr" not in error


@pytest.mark.parametrize("poison", mostly_slow(["nan", "gradient"], quick=["gradient"]))
def test_a_nonfinite_update_is_skipped_counted_and_its_batch_dumped(
    small: SmallRuns, capsys: pytest.CaptureFixture[str], poison: str
) -> None:
    assert train(small, f"{poison} 2 4 5", "--train.max_skipped", 3) == 0
    run = small.runs / "small"
    rows = {row["step"]: row for row in small.metrics() if "optim/lr" in row}
    assert [rows[step]["optim/non_finite"] for step in range(1, 7)] == [0, 1, 0, 1, 1, 0]
    assert sorted(path.name for path in (run / "skipped").glob("*.json")) == [f"step-00000{n}.json" for n in (2, 4, 5)]
    what = "the gradient" if poison == "gradient" else "the loss term 'policy' (nan)"
    assert f"warning: {what} is not finite: this update is skipped" in capsys.readouterr().out
    for step in (2, 4, 5):
        assert read_rollouts(run, step, "skipped") == read_rollouts(run, step)  # rewards and advantages included
        (update,) = json.loads((run / "skipped" / f"step-00000{step}.json").read_text())["updates"]
        assert not math.isfinite(float(update["grad_norm"]))
        assert math.isfinite(float(update["loss"])) == (poison == "gradient")
        assert update["gradients"] and not update["weights"] and update["what"] == what
    state = json.loads((small.checkpoint(6) / "state.json").read_text())
    assert state["skipped"] == 0


@pytest.mark.slow
def test_too_many_consecutive_skipped_steps_end_the_run(small: SmallRuns, stderr_of: Callable[..., str]) -> None:
    said = stderr_of(train(small, "nan 4 5 6", "--train.max_skipped", 2)).strip()
    assert said.count("\n") == 0 and "the loss term 'policy' (nan) was not finite for 2 steps in a row" in said
    assert f"saved in {small.runs / 'small' / 'skipped'}" in said and "optim.lr" not in said
    assert "fix it, and resume from the checkpoint of step 4, whose weights are finite, with assay train" in said
    assert [row["step"] for row in small.metrics() if "optim/lr" in row] == [1, 2, 3, 4, 5]  # the last one is logged
    assert small.resume("small") == 2  # from step 4, which was skipped: one more and it stops again
    assert small.resume("small", "--train.max_skipped", 0, "--optim.lr", 1e-4) == 0
    assert small.summary()["steps"] == 6


@pytest.mark.slow
def test_nonfinite_weights_are_never_saved_and_the_last_finite_checkpoint_is_named(
    small: SmallRuns, stderr_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update with a finite gradient overflows: nothing fails until the next step, by when it would be saved."""
    record = TrainingRun.record

    def overflow(self: TrainingRun, *args: object) -> None:
        if self.state.step == 3:
            with torch.no_grad():
                next(self.learner.critic.model.trunk.parameters()).view(-1)[0] = math.inf
        record(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingRun, "record", overflow)
    said = stderr_of(train(small, "nan 0", "--save.every", 1, "--optim.lr", 0.02, "--algo.critic", "true"))
    run = small.runs / "small"
    assert "is not finite after step 3, which is not saved" in said and said.count("\n") == 1
    assert "checkpoint of step 2" in said and f"assay train --resume {run} --optim.lr 0.002" in said
    assert checkpoints.steps(run)[-1] == 2
    monkeypatch.undo()
    assert small.resume("small", "--optim.lr", 0.002) == 0


def test_weights_that_become_nan_between_saves_end_the_run_with_a_command_that_continues_it(
    tmp_path: Path, stderr_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine notices them first: it cannot sample with them."""
    (tmp_path / "with space").mkdir()
    small = SmallRuns(tmp_path / "with space")
    update = Learner.update

    def overflow(self: Learner, groups: list[Group], state: RunState) -> dict[str, float]:
        metrics = update(self, groups, state)
        if state.step == 3:
            with torch.no_grad():
                next(self.policy.parameters()).fill_(math.nan)
        return metrics

    monkeypatch.setattr(Learner, "update", overflow)
    said = stderr_of(small.train("--train.steps", 4, "--save.every", 2, "--optim.lr", 0.02))
    assert "is not finite after step 3" in said and "checkpoint of step 2" in said and said.count("\n") == 1
    command = shlex.split(said[said.index("assay train") : said.index(", or")])
    monkeypatch.undo()
    assert main(command[1:]) == 0
    assert small.summary()["steps"] == 4
    assert [row["optim/lr"] for row in small.metrics() if "optim/lr" in row] == [0.02, 0.02, 0.002, 0.002]


def test_too_many_consecutive_skipped_steps_end_a_warm_start(
    small: SmallRuns, stderr_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from assay.training.learner import learner

    rows = learner.solution_rows
    monkeypatch.setattr(learner, "solution_rows", lambda *a: [learner.replace(r, advantage=math.nan) for r in rows(*a)])
    said = stderr_of(small.train("--sft.steps", 9, "--sft.batch", 2, "--train.max_skipped", 4))
    assert "the loss term 'policy' (nan) was not finite for 4 steps in a row" in said
    assert [row["sft/skipped"] for row in small.metrics() if "sft/step" in row] == [1.0] * 4
    command = shlex.split(said[said.index("assay train") : said.index(", or")])
    assert command[-2:] == ["--sft.lr", "1e-06"]
    monkeypatch.undo()
    assert main([*command[1:], "--sft.steps", "1", "--train.steps", "0"]) == 0
