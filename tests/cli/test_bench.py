"""`assay bench engine`, `step` and `episodes`."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.bench import step, workload
from assay.bench.engine import Options
from assay.bench.workload import TABLE, Workload, command_options
from assay.cli import bench
from assay.cli.main import main, parse
from assay.runs import console

HOW = ["--device", "cpu", "--dtype", "float32"]
SMALL = ["--shape", "tiny", "--prompts", "2", "--samples", "3", "--prompt-tokens", "9", "--new", "8", *HOW]
EPISODES = ["--episodes", "12", "--samples", "3", "--step-tokens", "8", *HOW]


def parsed(*words: str) -> argparse.Namespace:
    return parse(bench, "assay bench", list(words))


def parsed_command(row: dict[str, Any]) -> argparse.Namespace:
    """The arguments of the command that a row was measured with."""
    return parsed(*shlex.split(row["command"])[2:])


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown at once, and in plain lines, as in a terminal."""
    monkeypatch.setattr(console, "INTERVAL", 0.0)
    monkeypatch.setattr(console, "IDLE_INTERVAL", 0.0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def shows(printed: str, *operations: str) -> bool:
    places = [printed.index(f"\n{text}  ") for text in operations]
    return places == sorted(places) and "\x1b[?25l" not in printed  # no live display


HELP = """
import sys
from assay.cli.main import main
for words in (["bench"], ["bench", "engine"], ["bench", "step"], ["bench", "episodes"]):
    try:
        main([*words, "--help"])
    except SystemExit:
        pass
sys.exit(" and ".join({"torch", "pydantic"} & {*sys.modules}) or 0)
"""


def test_help_imports_neither_torch_nor_the_settings() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--prompt-tokens" in done.stdout and "--train-only" in done.stdout and "--step-tokens" in done.stdout


def test_options_of_a_workload_round_trip() -> None:
    for work in (*TABLE, Workload(shape="tiny", model=None, top_p=0.9, max_batch=3, temperature=0.0)):
        assert bench.engine_work(parsed("engine", *command_options(work))) == work
    assert command_options(Workload(shape="tiny", top_p=0.5)) == ["--shape", "tiny", "--top-p", "0.5"]  # no defaults


def test_engine_results_are_printed_written_and_added_to(
    tmp_path: Path, progress: None, capsys: pytest.CaptureFixture[str], stdout_of: Callable[..., str]
) -> None:
    file, peers = tmp_path / "results.json", tmp_path / "peers.jsonl"
    peers.write_text('{"engine": "vllm", "shape": "tiny", "logprobs": true, "tokens_per_s": 1}\n')
    printed = stdout_of(main(["bench", "engine", *SMALL, "--repeat", "2", "--json", str(file), "--parts"]))
    assert "gen-tiny-2x3x8" in printed and "6 sequences from 2 prompts" in printed and "--parts needs CUDA" in printed
    assert shows(printed, "warm-up: sampling", "run 1 of 2: sampling", "run 2 of 2: sampling")
    longtail = ["--lengths", "longtail", "--requests", "20", "--peer-rows", str(peers), "--json", str(file)]
    assert main(["bench", "engine", *SMALL, *longtail, "--no-mismatch", "--repeat", "1"]) == 0
    assert "1 to 8 new tokens" in capsys.readouterr().out
    content = json.loads(file.read_text())
    fixed, peer, ours = content["rows"]
    assert {"machine", "versions", "command", "rows"} == content.keys()
    assert (fixed["system"], peer["system"], ours["system"]) == ("assay", "vllm", "assay")
    assert len(fixed["runs"]) == 2 and min(fixed["runs"]) <= fixed["tokens_per_s"] <= max(fixed["runs"])
    assert fixed["first_run_tokens_per_s"] > 0 and fixed["mismatch_mean_abs"] < 1e-5
    assert ours["requests"] == 20 and "mismatch_mean_abs" not in ours
    again = parsed_command(ours)
    assert bench.engine_work(again).id in ours["id"] and not again.mismatch


def test_a_result_file_of_another_machine_is_rejected_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"machine": {"gpu": "another"}, "versions": {}, "command": "", "rows": []}))
    for path, hint in ((file, "give another --json file"), (tmp_path / "no" / "x.json", "does not exist")):
        assert main(["bench", "engine", *SMALL, "--json", str(path)]) == 2
        output = capsys.readouterr()
        assert hint in output.err and output.err.count("\n") == 1
        assert "sequences" not in output.out  # printed when a measurement starts


def test_the_engine_table_has_all_workloads_and_startup() -> None:
    args = parsed("engine", "--table", *HOW)
    jobs = bench.engine_jobs(args, bench.engine_work(args), Options())
    assert [job.args[0] for _, job in jobs] == [*TABLE, workload.STARTUP]  # type: ignore[attr-defined]
    assert "two starts" in jobs[-1][0] and all(" sequence" in note for note, _ in jobs[:-1])


@pytest.mark.slow
def test_two_starts_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    assert main(["bench", "engine", "--startup", *SMALL, "--json", str(file)]) == 0
    (start,) = json.loads(file.read_text())["rows"]
    assert start["id"].startswith("startup-tiny") and start["runs"] == [start["seconds_cold"], start["seconds"]]


def test_step_results_are_printed_and_written(tmp_path: Path, progress: None, stdout_of: Callable[..., str]) -> None:
    file = tmp_path / "results.json"
    printed = stdout_of(main(["bench", "step", *SMALL, "--steps", "1", "--json", str(file)]))
    assert "2 prompts of 9 tokens, 3 samples of 8 tokens" in printed
    assert "step-tiny-2x3x8-prompt_tokens9" in printed and "generation" in printed and "reference" not in printed
    assert shows(printed, "warm-up: sampling", "warm-up: training", "step 1 of 1: training")
    sweep = ["--train-only", "--shape", "tiny", "--sequences", "3", "--tokens", "12"]
    sweep += ["--set", "train.token_budget=12,36"]
    printed = stdout_of(main(["bench", "step", *sweep, *HOW, "--steps", "1", "--json", str(file)]))
    assert "training on 3 sequences of 12 tokens train.token_budget=36" in printed
    assert shows(printed, "run 1 of 1: training")
    content = json.loads(file.read_text())
    step_row, small, large = content["rows"]
    assert step_row["trained_tokens"] == 48 and small["token_budget"] == 12 and large["token_budget"] == 36
    assert len({row["id"] for row in content["rows"]}) == 3 and small["tokens_per_s"] > 0
    assert "--set train.token_budget=12,36" in content["command"]
    assert small["command"].endswith("--set train.token_budget=12")
    assert bench.step_work(parsed_command(step_row)).id.replace("gen-", "step-") in step_row["id"]


def test_the_step_table_has_the_step_and_the_trainings() -> None:
    args = parsed("step", "--table", "--kl", "0.1", *HOW)
    jobs = [job for _, job in bench.step_jobs(args, bench.step_work(args), bench.step_options(args))]
    work, options = zip(*(job.args for job in jobs), strict=True)  # type: ignore[attr-defined]
    assert work == (Workload(), *workload.TRAINING_TABLE) and [option.kl for option in options] == [0.1, 0.0, 0.0]


def test_step_results_are_compared_with_rows_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, peers = tmp_path / "results.json", tmp_path / "trl.txt"
    peers.write_text('{"system": "trl", "mode": "hf", "step_s": 9, "peak_gib": 1}\n' * 2)
    row = {"id": "step-0.5b-16x64x256", "system": "assay", "step_s": 3}
    monkeypatch.setattr(step, "measure_step", lambda *_: [row])
    assert main(["bench", "step", "--peer-rows", str(peers), "--json", str(file), *HOW]) == 0
    trl, ours = json.loads(file.read_text())["rows"]
    assert trl["system"] == "trl" and ours["ratio_to_trl"] == 3.0


def test_episode_results_are_printed_written_and_added_to(
    tmp_path: Path, progress: None, stdout_of: Callable[..., str]
) -> None:
    file = tmp_path / "results.json"
    printed = stdout_of(main(["bench", "episodes", *EPISODES, "--json", str(file)]))
    assert "12 episodes, at most 256 running, actions of up to 8 tokens" in printed and "12 of 12" in printed
    assert shows(printed, "warm-up: episodes, rounds", "run 1 of 1: episodes, own-pace")
    assert main(["bench", "episodes", *EPISODES, "--max-batch", "5", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    ids = [row["id"] for row in content["rows"]]
    assert len(set(ids)) == 4 and sum("max_batch5" in name for name in ids) == 2
    again = parsed_command(content["rows"][-1])
    assert (again.bench_command, again.max_batch, again.episodes) == ("episodes", 5, 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("engine --shape 9b", "unknown shape '9b'"),
        ("engine --new 0", "--new must be at least 1"),
        ("engine --lengths longtail --prompts 9 --requests 8", "must not be above --requests 8"),
        ("engine --shape tiny --device gpu", "unknown device 'gpu'"),
        ("engine --model /no/such/model", "/no/such/model"),
        ("engine --shape tiny --peer-rows /no/such/file", "cannot read /no/such/file"),
        ("engine --shape tiny --top-p 0 --new 2 --samples 1 --prompts 1", "top_p must be"),
        ("engine --table --shape tiny", "leave out --shape tiny"),
        ("step --new 8 --train-only", "--new is not for --train-only"),
        ("step --tokens 8", "--tokens is only for --train-only"),
        ("step --table --new 8", "--table has its own workloads"),
        ("step --train-only --kl 0.1", "--kl is not for --train-only"),
        ("step --train-only --shape tiny --tokens 600000", "exceeds the maximum length of tiny, 524288"),
        ("episodes --shape 9b", "known: nano, 0.5b, "),
        ("episodes --episodes 7", "must be a multiple of --samples 8"),
        ("recipes configs/demo.toml --help", "python bench/recipes.py"),
    ],
)
def test_mistakes_are_reported_in_one_line(refused: Callable[..., str], words: str, message: str) -> None:
    assert message in refused(main(["bench", *words.split()]))
