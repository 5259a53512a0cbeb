"""`assay bench engine` as a user calls it."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from assay.bench import workload
from assay.bench.workload import TABLE, Workload, words_of
from assay.cli import bench
from assay.cli.main import Parser, main

SMALL = ["--shape", "tiny", "--prompts", "2", "--samples", "3", "--prompt-tokens", "9", "--new", "8"]
SMALL += ["--repeat", "2", "--device", "cpu", "--dtype", "float32"]


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="assay bench")
    bench.add_arguments(parser)
    return parser.parse_args(["engine", *words])


def test_defaults_are_the_standard_workload() -> None:
    assert bench.workload(parsed()) == Workload() == TABLE[0]
    assert bench.workload(parsed("--lengths", "longtail")) == TABLE[2]
    explicit = "--shape 0.5b --prompts 16 --samples 64 --prompt-tokens 128 --new 256"
    assert bench.workload(parsed(*explicit.split())) == TABLE[0]


@pytest.mark.parametrize("work", [*TABLE, Workload(shape="tiny", model=None, top_p=0.9, max_batch=3, temperature=0.0)])
def test_words_of_a_workload_give_it_back(work: Workload) -> None:
    assert bench.workload(parsed(*words_of(work))) == work


def test_figures_are_printed_written_and_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, peers = tmp_path / "figures.json", tmp_path / "peers.jsonl"
    peers.write_text('{"engine": "vllm", "shape": "tiny", "logprobs": true, "tokens_per_s": 1}\n')
    assert main(["bench", "engine", *SMALL, "--json", str(file), "--parts"]) == 0
    said = capsys.readouterr().out
    assert "gen-tiny-2x3x8" in said and "6 sequences from 2 prompts" in said and "--parts is for CUDA only" in said
    longtail = [*SMALL, "--lengths", "longtail", "--requests", "20", "--peer-rows", str(peers), "--json", str(file)]
    assert main(["bench", "engine", *longtail, "--compare", "transformers", "--no-mismatch"]) == 0
    assert "1 to 8 new tokens" in capsys.readouterr().out
    content = json.loads(file.read_text())
    fixed, peer, ours, theirs = content["rows"]
    assert {"machine", "versions", "command", "rows"} == content.keys()
    assert (fixed["system"], peer["system"], ours["system"], theirs["system"]) == (
        *("assay", "vllm", "assay", "transformers"),
    )
    assert len(fixed["runs"]) == 2 and min(fixed["runs"]) <= fixed["tokens_per_s"] <= max(fixed["runs"])
    assert fixed["first_run_tokens_per_s"] > 0 and fixed["mismatch_mean_abs"] < 1e-5
    assert ours["requests"] == 20 and ours["ratio_to_transformers"] > 0 and "mismatch_mean_abs" not in ours
    # The command of a row measures that row again.
    again = parsed(*shlex.split(ours["command"])[3:])
    assert bench.workload(again).id in ours["id"] and again.compare == "transformers" and not again.mismatch


def test_a_file_that_cannot_be_added_to_is_found_out_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("assay.bench.engine.measure", lambda *args: pytest.fail("measured for nothing"))
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({"machine": {"gpu": "another"}, "versions": {}, "command": "", "rows": []}))
    for path, hint in ((file, "give another --json file"), (tmp_path / "no" / "x.json", "there is no folder")):
        assert main(["bench", "engine", *SMALL, "--json", str(path)]) == 2
        said = capsys.readouterr().err
        assert hint in said and said.count("\n") == 1


def test_the_table_measures_each_workload_and_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Workload(shape="tiny", prompts=1, samples=2, prompt_tokens=4, new=3)
    longtail = Workload(shape="tiny", lengths="longtail", prompts=2, requests=4, prompt_tokens=4, new=20)
    monkeypatch.setattr(workload, "TABLE", (small, longtail))
    monkeypatch.setattr(workload, "STARTUP", small)
    file = tmp_path / "figures.json"
    words = ["--table", "--repeat", "1", "--device", "cpu", "--dtype", "float32", "--json", str(file)]
    assert main(["bench", "engine", *words]) == 0
    content = json.loads(file.read_text())
    speed, tail, start = content["rows"]
    assert content["command"].startswith("assay bench engine --table ")
    assert speed["id"].startswith("gen-tiny-1x2x3") and tail["id"].startswith("gen-tiny-longtail")
    assert start["id"].startswith("startup-tiny") and start["runs"] == [start["seconds_cold"], start["seconds"]]
    assert min(start["runs"]) > 0.2  # Python and torch alone take longer
    assert "two starts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shape", "7b"], "unknown shape '7b'"),
        (["--new", "0"], "--new must be at least 1"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--shape", "tiny", "--device", "gpu"], "unknown device 'gpu'"),
        (["--shape", "tiny", "--dtype", "float16"], "dtype 'float16' is not supported"),
        (["--model", "/no/such/model"], "there is no model"),
        (["--shape", "tiny", "--peer-rows", "/no/such/file"], "cannot read /no/such/file"),
        (["--shape", "tiny", "--top-p", "0", "--new", "2", "--samples", "1", "--prompts", "1"], "top_p must be"),
        (["--table", "--shape", "tiny"], "--table has workloads of its own: leave out --shape tiny"),
        (["--table", "--startup"], "not allowed with"),
        (["--compare", "nobody"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["bench", "engine", *words]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1
