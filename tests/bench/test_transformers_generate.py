"""bench/transformers_generate.py: the same weights and requests for both systems."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_generate as script

from assay.bench import engine
from assay.bench.engine import Options
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


def test_options_of_other_measurements_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--table", "--startup"):
        assert main([option], COMMAND) == 2
        assert "assay bench engine" in capsys.readouterr().err
