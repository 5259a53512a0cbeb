"""bench/transformers_generate.py and bench/trl_step.py: both systems get the same weights, requests and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_generate as script
import trl_step

from assay.bench import engine
from assay.bench.engine import Options
from assay.bench.step import StepBenchmark, StepOptions, step_benchmark
from assay.bench.workload import SHAPES, Workload, random_model
from assay.cli.main import main, run_command

CPU = torch.device("cpu")
COMMAND = partial(run_command, script, script.PROGRAM)


@pytest.mark.slow
def test_runs_alternate_on_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    seconds = iter([4.0, 9.0, 1.0, 2.0, 1.0, 4.0])

    def timed(generate: Any, requests: Any, device: Any) -> Any:
        system = generate.args[0] if isinstance(generate, partial) else generate.__self__
        calls.append((type(system).__name__, requests))
        return generate(requests), next(seconds)

    monkeypatch.setattr(engine, "timed", timed)
    monkeypatch.setattr(script, "timed", timed)
    work = Workload(shape="tiny", lengths="longtail", prompts=3, requests=7, prompt_tokens=4, new=12, max_batch=4)
    ours, theirs = script.measure_both(work, Options(device="cpu", dtype="float32", repeat=2, mismatch=False))
    assert [name for name, _ in calls] == ["NativeEngine", "TransformersEngine"] * 3
    assert all(calls[index][1] is calls[index + 1][1] for index in (0, 2, 4))
    assert len({tuple(requests[0].prompt_ids) for _, requests in calls}) == 3  # each run has its own prompts
    tokens = sum(work.new_tokens)
    assert theirs["system"] == "transformers" and theirs["logprobs"] is False and theirs["id"] == ours["id"]
    assert theirs["runs"] == [round(tokens / 2, 1), round(tokens / 4, 1)]
    assert ours["ratio_to_transformers"] == 2.667  # 1 divided by the median of 1/2 and 1/4
    assert "mismatch_mean_abs" not in ours


def test_transformers_gets_the_same_weights() -> None:
    model = random_model(SHAPES["tiny"](), CPU, seed=1)
    hf = script.transformers_model(model, CPU, torch.float32)
    ids = torch.arange(40).view(2, 20) * 7 % 512
    with torch.no_grad():
        expected = model.unembed(model.hidden(ids.flatten(), [20, 20])).view(2, 20, -1)
        assert torch.allclose(hf(ids).logits, expected, atol=1e-5) and expected.std() > 0.05


def test_results_of_both_systems_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape tiny --prompts 1 --samples 2 --prompt-tokens 4 --new 3 --repeat 1 --device cpu --dtype float32"
    assert main([*sizes.split(), "--json", str(tmp_path / "result.json")], COMMAND) == 0
    assert "x transformers" in capsys.readouterr().out
    content = json.loads((tmp_path / "result.json").read_text())
    assert [row["system"] for row in content["rows"]] == ["assay", "transformers"]
    assert content["command"].startswith("python bench/transformers_generate.py --shape tiny")


TINY = Workload(shape="tiny", prompts=2, samples=4, prompt_tokens=9, new=8)
OPTIONS = StepOptions(device="cpu", dtype="float32", steps=2)
TRL_COMMAND = partial(run_command, trl_step, trl_step.PROGRAM)


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
        assert main(words, TRL_COMMAND) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.peer
def test_trl_trains_on_the_same_number_of_tokens() -> None:
    pytest.importorskip("trl")
    turns: list[int] = []
    with step_benchmark(replace(TINY, samples=4), OPTIONS) as bench:
        seconds = trl_step.trl_steps(bench, lambda: turns.append(1))  # checks the lengths itself
    assert len(seconds) == 3 and min(seconds) > 0 and len(turns) == 2
