"""`assay bench step` as a user calls it."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from assay.bench import step
from assay.bench.step import Sequences
from assay.bench.workload import Workload
from assay.cli import bench, bench_step
from assay.cli.main import Parser, main

SMALL = ["--shape", "tiny", "--prompts", "2", "--samples", "3", "--prompt-tokens", "9", "--new", "8"]
HOW = ["--steps", "1", "--device", "cpu", "--dtype", "float32"]


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="assay bench")
    bench.add_arguments(parser)
    return parser.parse_args(["step", *words])


def test_defaults_are_the_standard_work() -> None:
    explicit = "--shape 0.5b --prompts 16 --samples 64 --prompt-tokens 128 --new 256"
    assert bench_step.work_of(parsed(*explicit.split())) == bench_step.work_of(parsed()) == Workload()
    assert bench_step.work_of(parsed("--train-only")) == Sequences()


def test_figures_are_printed_written_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["bench", "step", *SMALL, *HOW, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "a step with 2 prompts of 9 tokens, 3 answers of 8 tokens to each" in said
    assert "step-tiny-2x3x8-prompt_tokens9" in said and "generation" in said and "reference" not in said
    sweep = ["--train-only", "--shape", "tiny", "--sequences", "3", "--tokens", "12", "--set", "token_budget=12,36"]
    assert main(["bench", "step", *sweep, *HOW, "--json", str(file)]) == 0
    assert "training on 3 sequences of 12 tokens token_budget=36" in capsys.readouterr().out
    content = json.loads(file.read_text())
    step, small, large = content["rows"]
    assert step["trained_tokens"] == 48 and small["token_budget"] == 12 and large["token_budget"] == 36
    assert len({row["id"] for row in content["rows"]}) == 3 and small["tokens_per_s"] > 0
    assert "--set token_budget=12,36" in content["command"] and small["command"].endswith("--set token_budget=12")
    again = parsed(*shlex.split(step["command"])[3:])  # the command of a row measures that row again
    assert bench_step.work_of(again).id.replace("gen-", "step-") in step["id"]


def test_the_table_has_the_step_and_the_trainings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Workload(shape="tiny", prompts=1, samples=2, prompt_tokens=4, new=3)
    monkeypatch.setattr("assay.bench.workload.Workload", lambda **values: small)
    monkeypatch.setattr(step, "TABLE", (Sequences(shape="tiny", sequences=2, tokens=5),))
    file, peers = tmp_path / "figures.json", tmp_path / "trl.txt"
    peers.write_text('{"system": "trl", "mode": "hf", "step_s": 9, "peak_gib": 1}\n' * 2)
    words = ["--table", *HOW, "--kl", "0.1", "--peer-rows", str(peers), "--json", str(file)]
    assert main(["bench", "step", *words]) == 0
    content = json.loads(file.read_text())
    assert [(row["id"].split("-")[0], row["system"]) for row in content["rows"]] == [
        *(("step", "trl"), ("step", "assay"), ("train", "assay")),
    ]
    assert content["rows"][1]["kl"] == 0.1 and content["rows"][2]["kl"] == 0
    assert content["command"].startswith("assay bench step --table ")
    assert "step-tiny-1x2x3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "7b"], "unknown shape '7b'"),
        (["--train-only", "--shape", "7b"], "unknown shape '7b'"),
        (["--samples", "1"], "--samples must be at least 2"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--set", "budget=3"], "there is no setting 'budget'"),
        (["--set", "token_budget"], "takes a value such as 16384"),
        (["--new", "8", "--train-only"], "--new is not for --train-only"),
        (["--tokens", "8"], "--tokens is for --train-only"),
        (["--table", "--new", "8"], "--table has work of its own"),
        (["--table", "--peer", "trl"], "--peer is for one whole step"),
        (["--train-only", "--kl", "0.1"], "--kl is for whole steps"),
        (["--shape", "tiny", "--peer-rows", "/no/such/file"], "cannot read /no/such/file"),
        (["--shape", "tiny", "--device", "gpu"], "unknown device 'gpu'"),
        (["--peer", "nobody"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["bench", "step", *words]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1
