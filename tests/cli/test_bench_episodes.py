"""`assay bench episodes` as a user calls it."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

import pytest

from assay.cli import bench
from assay.cli.main import Parser, main

SMALL = ["--episodes", "12", "--samples", "3", "--step-tokens", "8", "--device", "cpu", "--dtype", "float32"]


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="assay bench")
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_figures_are_printed_written_and_added_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main(["bench", "episodes", *SMALL, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "nano: 12 episodes, 256 at once, actions of up to 8 tokens" in said and "12 of 12" in said
    assert main(["bench", "episodes", *SMALL, "--max-batch", "5", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert {"machine", "versions", "command", "rows"} == content.keys()
    ids = [row["id"] for row in content["rows"]]
    assert len(set(ids)) == 4 and sum("max_batch5" in name for name in ids) == 2
    again = parsed(*shlex.split(content["rows"][-1]["command"])[2:])  # it measures that row again
    assert (again.bench_command, again.max_batch, again.episodes) == ("episodes", 5, 12)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--episodes", "7"], "must be a multiple of --samples 8"),
        (["--max-batch", "0"], "--max-batch must be at least 1"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--dtype", "float16"], "dtype 'float16' is not supported"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
        (["--peer-rows", "x"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["bench", "episodes", *words]) == 2
    found = capsys.readouterr().err
    assert said in found and found.count("\n") == 1
