"""`assay plan`: the report, its JSON, models by shape, folder or file, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from web_parts import make_run, standard_run

from assay.bench.workload import SHAPES
from assay.cli.main import main
from assay.models.spec import spec_to_hf


def test_the_report_names_divisions_memory_settings_and_assumptions(stdout_of: Callable[..., str]) -> None:
    printed = stdout_of(main(["plan", "7b", "--gpus", "8", "--gpu", "h100", "--answer-tokens", "2048"]))
    for part in ("8 x H100", "all in turns", "limited by", "room for", "learner:", "weight sync:", "assumed:"):
        assert part in printed
    assert "--source async --source.max_staleness 1" in printed and "never measured on several GPUs" in printed


def test_json_has_every_division(stdout_of: Callable[..., str]) -> None:
    content = json.loads(stdout_of(main(["plan", "0.5b", "--gpus", "2", "--json"])))
    assert content["parameters"] == SHAPES["0.5b"]().parameters
    turns, split = sorted(content["layouts"], key=lambda made: made["engine_gpus"], reverse=True)
    assert turns["colocated"] and not split["colocated"]
    assert (split["engine_gpus"], split["learner_gpus"]) == (1, 1)


def test_the_shape_of_a_folder_and_the_lengths_of_a_run(tmp_path: Path, stdout_of: Callable[..., str]) -> None:
    spec = SHAPES["1.5b"]()
    (tmp_path / "config.json").write_text(json.dumps(spec_to_hf(spec)))
    run = standard_run(tmp_path / "runs")
    content = json.loads(stdout_of(main(["plan", str(tmp_path), "--lengths", str(run), "--json"])))
    assert content["parameters"] == spec.parameters
    assert content["mean_tokens"] == len("answer 0") + 1  # of step 3, in tokens of one character, with the end token


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("/no/such/model", "the shape of /no/such/model is not known: give a folder"),
        ("7b --gpus 0", "--gpus must be at least 1, not 0"),
        ("7b --gpu h300", "unknown GPU 'h300'"),
        ("7b --staleness -1", "--staleness must be at least 0, not -1"),
        ("7b --mean-tokens 2000", "--mean-tokens must be between 1 and --answer-tokens 1024, not 2000"),
        ("7b --lengths one --mean-tokens 9", "exclude each other"),
        ("7b --lengths one", "has kept no rollouts"),
        ("7b --gpu rtx4090", "cannot be trained on 1 x RTX4090"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    tmp_path: Path, refused: Callable[..., str], words: str, message: str
) -> None:
    make_run(tmp_path, "one", steps=1)
    assert message in refused(main(["plan", *words.split(), "--runs_dir", str(tmp_path)]))
