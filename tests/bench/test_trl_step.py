"""bench/trl_step.py: steps of assay and of TRL alternate on the same prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import trl_step

from assay.bench.step import StepBenchmark, StepOptions, step_benchmark
from assay.bench.workload import Workload
from assay.cli.main import main, run_command

TINY = Workload(shape="tiny", prompts=2, samples=4, prompt_tokens=9, new=8)
OPTIONS = StepOptions(device="cpu", dtype="float32", steps=2)
COMMAND = partial(run_command, trl_step, trl_step.PROGRAM)


def test_steps_alternate() -> None:
    def steps_of_trl(bench: StepBenchmark, our_step: Callable[[], object]) -> list[float]:
        for _ in range(bench.options.steps):
            our_step()
        return [50.0, 40.0, 60.0]

    ours, theirs = trl_step.measure_both(TINY, OPTIONS, steps_of_trl=steps_of_trl)
    assert len(ours["runs"]) == 2 and ours["id"] == theirs["id"]
    assert ours["command"].startswith("python bench/trl_step.py --shape tiny")
    assert (theirs["system"], theirs["step_s"], theirs["runs"]) == ("trl", 50.0, [40.0, 60.0])
    assert "peak_gib" not in theirs and "trained_tokens" not in theirs


def test_mistakes_are_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trl_step, "version_of", lambda package: None)
    for words, message in (([], "pip install trl"), (["--train-only"], "assay bench step")):
        assert main(words, COMMAND) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.peer
def test_trl_trains_on_the_same_number_of_tokens() -> None:
    pytest.importorskip("trl")
    turns: list[int] = []
    with step_benchmark(replace(TINY, samples=4), OPTIONS) as bench:
        seconds = trl_step.trl_steps(bench, lambda: turns.append(1))  # checks the lengths itself
    assert len(seconds) == 3 and min(seconds) > 0 and len(turns) == 2
